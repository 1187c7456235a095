"""Audits: does what is released keep the promise of the plan? See docs/audit.md."""

from diskdp.audit.results import Finding, RunAudit, Scenario, StepAudit
from diskdp.audit.step import audit_step

__all__ = ["Finding", "RunAudit", "Scenario", "StepAudit", "audit_step"]
