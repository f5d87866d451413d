"""Audits: records of a model's heads, scales and findings on one batch, without torch."""

from sqrtdk.audits.audit import Audit, AuditedHead, AuditedRows, AuditedScale
from sqrtdk.audits.comparison import Comparison, compare
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
