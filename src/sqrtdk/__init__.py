"""sqrtdk: the toolkit for the scale of attention. NumPy in, NumPy out; nothing heavier is imported here."""

from typing import TYPE_CHECKING

from sqrtdk import backends, scales, theory
from sqrtdk.diagnosis import diagnose
from sqrtdk.errors import SqrtdkError
from sqrtdk.operation.attention import Attention, Gradients, attention, attention_gradients
from sqrtdk.operation.engines.reference import scaled_dot_product_attention, softmax
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.summary import HeadSummary

__all__ = [
    "Attention",
    "AttentionStatistics",
    "Gradients",
    "HeadSummary",
    "SqrtdkError",
    "__version__",
    "attention",
    "attention_gradients",
    "backends",
    "diagnose",
    "scaled_dot_product_attention",
    "scales",
    "softmax",
    "theory",
]

if TYPE_CHECKING:
    from sqrtdk import torch as torch

    __version__: str
else:

    def __getattr__(name):
        # Looked up when asked for: torch and importlib.metadata would make every import of sqrtdk slower.
        if name == "torch":
            from importlib import import_module

            from sqrtdk.errors import MissingExtraError

            try:
                return import_module("sqrtdk.torch")
            except MissingExtraError as error:
                raise AttributeError(f"module 'sqrtdk' has no attribute 'torch': {error}") from None
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import metadata

        try:
            return metadata.version("sqrtdk")
        except metadata.PackageNotFoundError:
            raise AttributeError("the version is that of the installed package, but sqrtdk is not installed") from None
