"""A record as a short table: text for `print`, HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# Lines of a table before its middle is left out.
MOST_ROWS = 16

_LEFT_OUT = "…"


class Table(NamedTuple):
    """A title, the names of columns and rows of cells, all text; the first `left` columns stand left, the rest right.

    >>> print(Table("squares", ("n", "n²"), [(str(n), str(n * n)) for n in range(100)]).as_text(most=4))
    squares
     n    n²
     0     0
     1     1
     …     …
    98  9604
    99  9801
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int = 0

    def as_text(self, most: int = MOST_ROWS) -> str:
        """Aligned lines, the title first (alone if there are no rows); beyond `most` rows the middle is left out."""
        if not self.rows:
            return self.title
        rows = ([self.columns] if any(self.columns) else []) + self._shorten(most)
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if at < self.left else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines])

    def as_html(self, most: int = MOST_ROWS) -> str:
        """The same as a table that brings its own style and no colours: it takes those of the page, light or dark."""
        from html import escape  # here, so that `import sqrtdk` does not pay for it

        def write_row(tag: str, cells: Sequence[str], style: str = "") -> str:
            aligned = (
                f'<{tag} style="text-align:{"left" if at < self.left else "right"};padding:.1em .6em;{style}">'
                f"{escape(cell)}</{tag}>"
                for at, cell in enumerate(cells)
            )
            return f"<tr>{''.join(aligned)}</tr>"

        title = f"<div>{escape(self.title)}</div>"
        if not self.rows:
            return title
        head = write_row("th", self.columns, "border-bottom:1px solid;") if any(self.columns) else ""
        body = "".join(write_row("td", row) for row in self._shorten(most))
        style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
        return f'<div>{title}<table style="{style}">{head}{body}</table></div>'

    def _shorten(self, most: int) -> list[tuple[str, ...]]:
        rows = list(self.rows)
        if len(rows) <= most:
            return rows
        return [*rows[: most - most // 2], (_LEFT_OUT,) * len(self.columns), *rows[len(rows) - most // 2 :]]


class Shown:
    """Shows itself as a table, wherever it is printed or is the last line of a notebook's cell."""

    def _table(self) -> Table:
        raise TypeError(f"{type(self).__name__} must define _table()")

    def __repr__(self) -> str:
        return self._table().as_text()

    def _repr_html_(self) -> str:
        return self._table().as_html()


def describe_array(array: Any) -> str:
    """Dtype and shape of an array, and where a tensor is.

    >>> import numpy as np
    >>> describe_array(np.zeros((2, 3)))
    'float64 [2, 3]'
    """
    device = getattr(array, "device", "cpu")
    where = "" if str(device) == "cpu" else f" on {device}"
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}{where}"


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "head"), count(0, "seed"), count(2, "backward pass"), count(3, "family")
    ('1 head', '0 seeds', '2 backward passes', '3 families')
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def name_layer(path: str) -> str:
    """The path of a layer as tables show it; a model that is itself the layer has an empty one.

    >>> name_layer("encoder.layer.0"), name_layer("")
    ('encoder.layer.0', '(the model)')
    """
    return path or "(the model)"
