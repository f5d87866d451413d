"""torch modules: learnable scales, and multi-head attention with any scale and a cache for decoding."""

from sqrtdk.torch.nn.cache import KVCache
from sqrtdk.torch.nn.learnable import LearnedTemperature, QKNorm, QueryTemperature, make_learnable
from sqrtdk.torch.nn.scaled_attention import ScaledAttention

__all__ = ["KVCache", "LearnedTemperature", "QKNorm", "QueryTemperature", "ScaledAttention", "make_learnable"]
