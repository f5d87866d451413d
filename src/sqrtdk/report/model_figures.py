"""Figure of an audited model: layers × heads, coloured by the sharpness of each head."""

from __future__ import annotations

import statistics

from sqrtdk.audits import Audit
from sqrtdk.audits.heat_map import map_heads
from sqrtdk.audits.sentences import name_scale
from sqrtdk.report.panels import Axis, Figure, Heatmap, Panel, floats, one_panel
from sqrtdk.show.table import count

# As in diagnosis: above this index a few keys dominate.
_CONCENTRATED = 1.0


def show_heads(audit: Audit, name: str) -> Figure:
    """Plan the entropy ratio of every head, a row per layer."""
    heat = map_heads(audit)
    z = tuple(floats([None if cell is None else cell.head.entropy_ratio for cell in row.cells]) for row in heat)
    text = tuple(tuple("" if cell is None else cell.text for cell in row.cells) for row in heat)
    return one_panel(
        _state_heads(audit, name),
        Panel(
            "",
            Axis("head", ticks=tuple((float(head), str(head)) for head in range(len(z[0])))),
            Axis("layer", ticks=tuple((float(layer), str(layer)) for layer in range(len(heat)))),
            (Heatmap(z, 0.0, 1.0, text=text),),
        ),
        f"Entropy ratio H/ln n of each head, mean over its queries: 1 is uniform, 0 is one-hot; dark cells are sharp. "
        f"Input: {audit.about.get('input', audit.about.get('batch', 'unknown'))}.",
        height=70 + 34 * len(heat),
    )


def _state_heads(audit: Audit, name: str) -> str:
    scales = list(dict.fromkeys(name_scale(one) for one in audit.scale))
    used = scales[0] if len(scales) == 1 else f"{len(scales)} different scales"
    indices = [head.saturation_index for head in audit.heads if head.saturation_index is not None]
    sharp = sum(index > _CONCENTRATED for index in indices)
    ratios = [head.entropy_ratio for head in audit.heads if head.entropy_ratio is not None]
    return (
        f"{name} uses {used}; {sharp} of its {count(len(indices), 'head')} are sharp (ρ > 1), the median "
        f"entropy ratio is {statistics.median(ratios):.2f}"
    )
