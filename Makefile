# `make demo` trains three private optimizers on a real table; `make test` is everything CI checks.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread a process: the tests run in parallel, and more threads than cores only slow them down.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
WORKERS ?= 2

.PHONY: demo test lint types pytest bench venv clean

demo: venv
	@$(BIN)/diskdp demo

test: lint types pytest

venv: $(STAMP)

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: venv
	@$(BIN)/mypy

pytest: venv
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n $(WORKERS)

bench: venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@$(BIN)/diskdp bench

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("diskdp needs Python 3.10 or newer: make PYTHON=python3.11 ..." if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || { echo "setting up $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing packages into $(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
