"""sqrtdk: the toolkit for the scale of attention. NumPy in, NumPy out; nothing heavier is imported here."""

from sqrtdk import backends, scales, theory
from sqrtdk.attention import Attention, Gradients, attention, attention_gradients
from sqrtdk.engines.reference import scaled_dot_product_attention, softmax
from sqrtdk.errors import SqrtdkError
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.summary import HeadSummary

__all__ = [
    "Attention",
    "AttentionStatistics",
    "Gradients",
    "HeadSummary",
    "SqrtdkError",
    "attention",
    "attention_gradients",
    "backends",
    "scaled_dot_product_attention",
    "scales",
    "softmax",
    "theory",
]
