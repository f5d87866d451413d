"""Audits: what a model's heads did on one batch, the scales they used and what is wrong, as a record without torch."""

from sqrtdk.audits.comparison import Comparison, compare
from sqrtdk.audits.record import Audit, AuditedHead, AuditedRows, AuditedScale
from sqrtdk.audits.shipped import SHIPPED, read_audit, read_shipped

__all__ = [
    "SHIPPED",
    "Audit",
    "AuditedHead",
    "AuditedRows",
    "AuditedScale",
    "Comparison",
    "compare",
    "read_audit",
    "read_shipped",
]
