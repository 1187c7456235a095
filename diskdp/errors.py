"""Every error and warning that diskdp raises on purpose.

Each message says what is wrong, where, and what to do; the command line prints it as one line.
"""

from __future__ import annotations

from collections.abc import Sequence


class DiskDPError(Exception):
    """Base of all errors raised on purpose by diskdp."""


class PlanError(DiskDPError, ValueError):
    """A plan that is contradictory, out of range, or whose accounting has not been built."""


class SamplingError(DiskDPError):
    """A data set, loader or batch that does not match the plan."""


class DataError(DiskDPError, ValueError):
    """A table, image file or schema that cannot be read as declared."""


class NoiseError(DiskDPError, ValueError):
    """A secret or a deviation from which no noise can be made."""


class GradientError(DiskDPError):
    """A model or loss whose per-example gradients cannot be established exactly; names the parameters, if known."""

    def __init__(self, message: str, parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.parameters = tuple(parameters)


class FilterError(DiskDPError, ValueError):
    """Filter parameters outside their range."""


class OptimizerError(DiskDPError, ValueError):
    """An optimizer's settings outside their range, or made for another noise or filter."""


class NonFiniteError(DiskDPError):
    """A noised gradient that is not finite: the weights were not moved."""


class BudgetExhausted(DiskDPError):
    """One more step would spend more than the plan allows."""


class MemoryLimitError(DiskDPError, ValueError):
    """A memory budget that is none, or into which not even one example fits."""


class CheckpointError(DiskDPError):
    """A checkpoint that is damaged or belongs to another plan."""


class ConfigError(DiskDPError, ValueError):
    """A run file or command line that does not describe a run."""


class DiskDPWarning(UserWarning):
    """Base of all warnings issued by diskdp."""


class NotPrivateWarning(DiskDPWarning):
    """Nothing released under this configuration is differentially private."""


class NewKeyWarning(DiskDPWarning):
    """A run that goes on under another key than it had, so that repeated steps are charged again."""


class MemoryWarning(DiskDPWarning):
    """Memory ran out, and the work went on with fewer examples at once."""


class WeakDeltaWarning(DiskDPWarning):
    """A delta so large that publishing one record in full would satisfy it."""


class TruncationWarning(DiskDPWarning):
    """A cap on the batch size so near the expected one that cutting batches down costs privacy."""


class LowPrecisionWarning(DiskDPWarning):
    """Weights kept in so few bits that small updates do not change them."""


class OtherUpdateWarning(DiskDPWarning):
    """Weights that changed between two private steps."""


class StuckWeightsWarning(DiskDPWarning):
    """Trainable weights that the optimizer's first steps left where they were."""


class UncheckedUnitsWarning(DiskDPWarning):
    """A bound on the records of a unit that nothing has checked."""


class UnusedParameterWarning(DiskDPWarning):
    """A trainable parameter that the loss has not depended on for a long time."""


class AuditError(DiskDPError, ValueError):
    """An audit that cannot be made as asked."""


class TheoryError(DiskDPError, ValueError):
    """Constants of a theorem that are out of range or contradict one another."""
