"""Audits: what a model's heads did on one batch, the scales they used and what is wrong, as a record without torch."""

from sqrtdk.audits.comparison import Comparison, compare
from sqrtdk.audits.record import Audit, AuditedHead, AuditedScale

__all__ = ["Audit", "AuditedHead", "AuditedScale", "Comparison", "compare"]
