"""Audits: does what is released keep the promise of the plan? See docs/audit.md."""

from diskdp.audit.one_run import audit_run, one_run_epsilon, one_run_p_value
from diskdp.audit.results import Finding, RunAudit, Scenario, StepAudit
from diskdp.audit.step import audit_step

__all__ = [
    "Finding",
    "RunAudit",
    "Scenario",
    "StepAudit",
    "audit_run",
    "audit_step",
    "one_run_epsilon",
    "one_run_p_value",
]
