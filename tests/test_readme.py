"""What the README shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diskdp.cli import run

ROOT = Path(__file__).parent.parent


def test_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    spent = float(capsys.readouterr().out.removeprefix("ε spent: "))
    assert 0.99 < spent <= 1.0


def test_commands_that_need_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    commands = [line.split()[1:] for line in re.findall(r"^    (diskdp (?:plan|explain) .*)$", text, re.MULTILINE)]
    assert [command[0] for command in commands] == ["plan", "explain"]
    assert [run(command) for command in commands] == [0, 0]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_first_two_commands_are_targets() -> None:
    commands = re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
