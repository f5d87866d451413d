"""Table of a watch's results: a line per layer and head, the lowest entropy ratio first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sqrtdk.display import Table, count, name_layer, shade_sharpness

if TYPE_CHECKING:
    from sqrtdk.torch.watch.seen import Seen

MOST_LINES = 24
_COLUMNS = ("layer", "head", "entropy ratio", "saturation", "largest logit")
_MOST_SCALES = 6


def make_table(seen: Seen) -> Table:
    """The heads whose weights are the most concentrated."""
    layers = seen.layers
    heads = sum(summary.heads for summary in layers.values())
    sorted_heads: list[tuple[float, tuple[str, ...]]] = []
    for path, summary in layers.items():
        ratios, indices = (summary[name].mean for name in ("entropy_ratio", "saturation_index"))
        for head, largest in enumerate(summary.write_largest("max_logit")):
            ratio, index = float(ratios[head]), float(indices[head])
            cells = name_layer(path), str(head), f"{ratio:.3f}", f"{index:.3g}", largest
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
    """Lines below the table: scales, what was not understood, notes."""
    scales = sorted({f"{record.effective:.4g}" for record in seen.scales if record.effective is not None})
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
