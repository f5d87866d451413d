"""Watch a model: what every head does and the scale it really uses, without changing the model."""

from sqrtdk.torch.watch.effective import ScaleRecord
from sqrtdk.torch.watch.seen import Seen, Unattributed
from sqrtdk.torch.watch.session import watch

__all__ = ["ScaleRecord", "Seen", "Unattributed", "watch"]
