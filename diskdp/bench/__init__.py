"""What a private step costs: time, memory and exactness, diskdp beside its peers. Shown by `diskdp bench`."""

from diskdp.bench.cases import CASES, Case, CaseSpec, Unavailable
from diskdp.bench.methods import METHODS, Method, Training
from diskdp.bench.results import Results, Row
from diskdp.bench.run import Settings, bench_case, bench_passes

__all__ = [
    "CASES",
    "METHODS",
    "Case",
    "CaseSpec",
    "Method",
    "Results",
    "Row",
    "Settings",
    "Training",
    "Unavailable",
    "bench_case",
    "bench_passes",
]
