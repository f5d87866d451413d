"""Measures every attention head of a running model and the scale it applies, without changing the model."""

from sqrtdk.audits.audit import ScaleRecord
from sqrtdk.torch.watch.opening import watch
from sqrtdk.torch.watch.seen import Seen, Unattributed

__all__ = ["ScaleRecord", "Seen", "Unattributed", "watch"]
