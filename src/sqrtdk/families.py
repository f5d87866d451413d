"""The scale that families of models use by design: a law in dₖ for each."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["DESIGNED", "ScaleLaw", "law_of_family"]


@dataclass(frozen=True)
class ScaleLaw:
    """scale = multiple · dₖ^power.

    >>> ScaleLaw(1.0, -0.5).at(64), ScaleLaw(1.0, 0.0).at(64)
    (0.125, 1.0)
    """

    multiple: float
    power: float

    def at(self, d_k: int) -> float:
        """The scale of head vectors of that width."""
        return self.multiple * math.pow(d_k, self.power)


USUAL = ScaleLaw(1.0, -0.5)
NONE = ScaleLaw(1.0, 0.0)
INVERSE = ScaleLaw(1.0, -1.0)

DESIGNED = {
    # Raffel et al. 2020 fold the scale into the initialisation; so do the descendants of T5.
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop"), NONE),
    **dict.fromkeys(("pix2struct_text_model", "pix2struct_vision_model"), NONE),
    # The code it was trained with (Mesh TensorFlow) had no scale.
    "gpt_neo": NONE,
    # RMS norms of q and k take the place of the scale.
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_vision"), NONE),
    # The scale of half the head: their heads see the hidden state and the embedding side by side.
    **dict.fromkeys(("zamba", "zamba2"), ScaleLaw(2**0.5, -0.5)),
    # muP.
    "inkling_text": INVERSE,
}
"""Families (`model_type`) that mean another scale than 1/√dₖ and have no field in their configuration that says so."""


def law_of_family(family: str) -> ScaleLaw | None:
    """The law of a family (`model_type` of a configuration), None if it is not known.

    >>> law_of_family("t5")
    ScaleLaw(multiple=1.0, power=0.0)
    """
    return DESIGNED.get(family)
