"""Worked numbers of the four sources as settings of the Explore page, with the statement of the source."""

from __future__ import annotations

from typing import NamedTuple

S0 = "Math behind √dₖ Scaling Factor in Attention"
S1 = "Stabilizing Attention Scores in Transformers"
S3 = "Section 5.3: Scaled Attention: Why √d Matters"


class Preset(NamedTuple):
    """Setting of the page: its title, the query that sets it, the statement of the source and the source's title."""

    title: str
    query: dict[str, str]
    says: str
    source: str


PRESETS = (
    Preset("dₖ 64, 1024 keys", {}, "the standard deviation of q·k is √dₖ = 8; divided by √dₖ it is 1", S0),
    Preset(
        "three scores [14, 10, 12]",
        {"source": "scores", "scores": "14,10,12", "d_k": "64", "claimed": "0.867,0.016,0.117;0.419,0.254,0.326"},
        "no scaling [0.867, 0.016, 0.117], divided by 8 [0.419, 0.254, 0.326]",
        S0,
    ),
    Preset(
        "[50, 10, 5] over 10",
        {"source": "scores", "scores": "50,10,5", "d_k": "100", "claimed": "1.0,0.0,0.0;0.971,0.018,0.011"},
        "softmax[50, 10, 5] ≈ [1.0, 0.0, 0.0]; softmax[5, 1, 0.5] = [0.971, 0.018, 0.011]",
        S0,
    ),
    Preset(
        "[8.5, −2.1, 7.9]",
        {"source": "scores", "scores": "8.5,-2.1,7.9", "d_k": "64", "claimed": "0.99,0.00,0.01"},
        "[0.99, 0.00, 0.01, …]",
        S3,
    ),
    Preset(
        "five scores",
        {
            "source": "scores",
            "scores": "9.2,-3.1,8.8,-5.4,1.2",
            "d_k": "64",
            "claimed": "0.599,0,0.401,0,0;0.31,0.07,0.30,0.05,0.12",
        },
        "no scaling [0.599, 0, 0.401, 0, 0], over 8 [0.31, 0.07, 0.30, 0.05, 0.12]",
        S3,
    ),
    Preset("dₖ 512", {"d_k": "512", "n": "1024"}, "the standard deviation of q·k is 22.63", S3),
    Preset(
        "gradients, dₖ 512 and 16 keys",
        {"d_k": "512", "n": "16"},
        "saturated softmax has gradients near 0: without scaling they vanish",
        S3,
    ),
    Preset(
        "1/dₖ flattens",
        {"d_k": "512", "n": "64", "policy": "inverse", "correlation": "0.5"},
        "dividing by dₖ makes weights nearly uniform, 1/n each, and attention cannot focus",
        S1,
    ),
    Preset(
        "temperature ½",
        {"d_k": "64", "n": "32", "t": "0.5"},
        "τ = 0.5·√dₖ is sharper, τ = 2·√dₖ softer than √dₖ",
        S3,
    ),
)
