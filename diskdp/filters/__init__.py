"""Filters over privatised gradients: what they compute from past outputs costs no privacy."""

from diskdp.filters.disk import DiSK, Filter, NoFilter
from diskdp.filters.lowpass import LowPass

__all__ = ["DiSK", "Filter", "LowPass", "NoFilter"]
