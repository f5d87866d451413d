"""Writes a watch's results as a table with a line per layer and head, lowest entropy ratio first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sqrtdk.show.table import Table, count, name_layer, shade_sharpness
from sqrtdk.wording.numbers import write_number

if TYPE_CHECKING:
    from sqrtdk.torch.watch.seen import Seen

MOST_LINES = 24
_COLUMNS = ("layer", "head", "entropy ratio", "saturation", "largest logit")
_MOST_SCALES = 6


def make_table(seen: Seen) -> Table:
    """Return the table of the heads with the lowest entropy ratios."""
    layers = seen.layers
    heads = sum(summary.heads for summary in layers.values())
    sorted_heads: list[tuple[float, tuple[str, ...]]] = []
    for path, summary in layers.items():
        ratios, indices = (summary[name].mean for name in ("entropy_ratio", "saturation_index"))
        for head, largest in enumerate(summary.write_largest("max_logit")):
            ratio, index = float(ratios[head]), float(indices[head])
            cells = name_layer(path), str(head), f"{ratio:.3f}", write_number(index, 3), largest
            sorted_heads.append((math.inf if math.isnan(ratio) else ratio, cells))
    sorted_heads.sort(key=lambda pair: pair[0])
    title = f"{count(len(layers), 'layer')}, {count(heads, 'head')}, {count(seen.calls, 'call')} of the model"
    left_out = f"; the {MOST_LINES} with the lowest entropy ratio" if heads > MOST_LINES else ""
    shown = sorted_heads[:MOST_LINES]
    return Table(
        f"{title}; padding: {seen.padding}{left_out}",
        _COLUMNS,
        [cells for _, cells in shown],
        left=1,
        shades={2: [shade_sharpness(ratio) for ratio, _ in shown]},
    )


def write_remarks(seen: Seen) -> list[str]:
    """Return the lines below the table: scales, computations that were not understood, and notes."""
    scales = sorted({write_number(record.effective) for record in seen.scales if record.effective is not None})
    lines = []
    if scales:
        more = ", …" if len(scales) > _MOST_SCALES else ""
        lines.append(f"effective scale: {', '.join(scales[:_MOST_SCALES])}{more}")
    unknown = sum(record.effective is None for record in seen.scales)
    if unknown:
        lines.append(f"effective scale of {count(unknown, 'layer')}: cannot be told (`scales` says why)")
    for missed in seen.unattributed:
        where = missed.layer or "the model itself"
        lines.append(f"not understood: {where} ({count(missed.times, 'call')}): {missed.reason}")
    return lines + seen.notes
