"""Attention on torch tensors: with gradients, on any device, with scales that learn."""

from sqrtdk.diagnosis.alerts import Alert
from sqrtdk.diagnosis.counterfactual import counterfactual
from sqrtdk.errors import missing_extra

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise missing_extra("torch", "torch") from None

from sqrtdk.torch import nn
from sqrtdk.torch.functional import attention, scaled_dot_product_attention
from sqrtdk.torch.huggingface import register_huggingface
from sqrtdk.torch.models.audit import audit
from sqrtdk.torch.models.head_effects import measure_heads
from sqrtdk.torch.pressure import TemperaturePressure
from sqrtdk.torch.training.callbacks import StopTraining
from sqrtdk.torch.training.distributed import all_reduce
from sqrtdk.torch.training.monitor import Monitor
from sqrtdk.torch.training.qk_clip import qk_clip_
from sqrtdk.torch.watch import watch

__all__ = [
    "Alert",
    "Monitor",
    "StopTraining",
    "TemperaturePressure",
    "all_reduce",
    "attention",
    "audit",
    "counterfactual",
    "measure_heads",
    "nn",
    "qk_clip_",
    "register_huggingface",
    "scaled_dot_product_attention",
    "watch",
]
