"""The same operation on torch tensors: with gradients, on any device, with scales that learn."""

from sqrtdk.counterfactual import counterfactual
from sqrtdk.errors import missing_extra

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise missing_extra("torch", "torch") from None

from sqrtdk.torch import nn
from sqrtdk.torch.audit import audit
from sqrtdk.torch.distributed import all_reduce
from sqrtdk.torch.functional import attention, scaled_dot_product_attention
from sqrtdk.torch.head_effects import measure_heads
from sqrtdk.torch.huggingface import register_huggingface
from sqrtdk.torch.monitor import Monitor
from sqrtdk.torch.pressure import TemperaturePressure
from sqrtdk.torch.qk_clip import qk_clip_
from sqrtdk.torch.watch import watch

__all__ = [
    "Monitor",
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
