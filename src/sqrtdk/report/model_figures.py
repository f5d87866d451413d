"""The figure of an audited model: layers × heads, coloured by how sharp each head is."""

from __future__ import annotations

import statistics

from sqrtdk.audits import Audit
from sqrtdk.audits.reading import name_scale
from sqrtdk.display import count
from sqrtdk.report.panels import Axis, Figure, Heatmap, Panel, floats, one_panel

# As diagnosis has it: past this index weights condense.
_CONDENSED = 1.0


def show_heads(audit: Audit, name: str) -> Figure:
    """The entropy ratio of every head, a row per layer."""
    layers = list(audit.layers.values())
    widest = max(len(heads) for heads in layers)
    z = tuple(floats([*(head.entropy_ratio for head in heads), *[None] * (widest - len(heads))]) for heads in layers)
    text = tuple(
        tuple("–" if head.entropy_ratio is None else f"{head.entropy_ratio:.2f}" for head in heads)
        + ("",) * (widest - len(heads))
        for heads in layers
    )
    return one_panel(
        _state_heads(audit, name),
        Panel(
            "",
            Axis("head", ticks=tuple((float(head), str(head)) for head in range(widest))),
            Axis("layer", ticks=tuple((float(layer), str(layer)) for layer in range(len(layers)))),
            (Heatmap(z, 0.0, 1.0, text=text, colour_bar=False),),
        ),
        f"Entropy ratio H/ln n of each head, mean over its queries: 1 is uniform, 0 is one-hot. Input: "
        f"{audit.about.get('input', audit.about.get('batch', 'unknown'))}.",
        height=70 + 34 * len(layers),
    )


def _state_heads(audit: Audit, name: str) -> str:
    scales = list(dict.fromkeys(name_scale(one) for one in audit.scale))
    used = scales[0] if len(scales) == 1 else f"{len(scales)} different scales"
    indices = [head.saturation_index for head in audit.heads if head.saturation_index is not None]
    sharp = sum(index > _CONDENSED for index in indices)
    ratios = [head.entropy_ratio for head in audit.heads if head.entropy_ratio is not None]
    return (
        f"{name} uses {used}; {sharp} of its {count(len(indices), 'head')} are sharp (ρ > 1), the median "
        f"entropy ratio is {statistics.median(ratios):.2f}"
    )
