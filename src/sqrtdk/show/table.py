"""Short tables of records: text for `print`, HTML for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

# Lines of a table before its middle is left out.
MOST_ROWS = 16

_LEFT_OUT = "…"

# Red, green and blue of a cell's shade, which is half transparent for light and for dark pages.
HEAT = "31,131,201"


class Table(NamedTuple):
    """A title, the names of columns and rows of cells, all text.

    The first `left` columns, or the columns in `left`, are left-aligned, the others right-aligned.
    `shades` has the strength of the colour of cells in HTML, from 0 to 1: {column: one number per row}.

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
    left: int | frozenset[int] = 0
    shades: Mapping[int, Sequence[float]] = MappingProxyType({})

    def as_text(self, most: int = MOST_ROWS) -> str:
        """Return the title and aligned lines, the middle left out beyond `most` rows; the title alone without rows."""
        if not self.rows:
            return self.title
        shown = [self._cells(at) for at in self._shown_rows(most)]
        rows = ([self.columns] if any(self.columns) else []) + shown
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if self.stands_left(at) else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines])

    def stands_left(self, column: int) -> bool:
        """Return whether a column, given by its number, is left-aligned because it holds words."""
        return column < self.left if isinstance(self.left, int) else column in self.left

    def as_markdown(self) -> str:
        """Return all rows as a Markdown table, without the title."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        return "\n".join(lines)

    def as_html(self, most: int = MOST_ROWS) -> str:
        """Return the table as HTML with its own style. The text takes the colours of the page, light or dark."""
        from html import escape  # here, to keep `import sqrtdk` fast

        def write_row(tag: str, cells: Sequence[str], styles: Sequence[str]) -> str:
            aligned = (
                f'<{tag} style="text-align:{"left" if self.stands_left(at) else "right"};padding:.1em .6em;{style}">'
                f"{escape(cell)}</{tag}>"
                for at, (cell, style) in enumerate(zip(cells, styles, strict=True))
            )
            return f"<tr>{''.join(aligned)}</tr>"

        title = f"<div>{escape(self.title)}</div>"
        if not self.rows:
            return title
        line = ["border-bottom:1px solid;"] * len(self.columns)
        head = write_row("th", self.columns, line) if any(self.columns) else ""
        body = "".join(write_row("td", self._cells(at), self._styles(at)) for at in self._shown_rows(most))
        style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
        return f'<div>{title}<table style="{style}">{head}{body}</table></div>'

    def _shown_rows(self, most: int) -> list[int | None]:
        """Return the rows to show, with None in place of the middle."""
        numbers = range(len(self.rows))
        if len(numbers) <= most:
            return [*numbers]
        return [*numbers[: most - most // 2], None, *numbers[len(numbers) - most // 2 :]]

    def _cells(self, row: int | None) -> tuple[str, ...]:
        return (_LEFT_OUT,) * len(self.columns) if row is None else self.rows[row]

    def _styles(self, row: int | None) -> list[str]:
        if row is None:
            return [""] * len(self.columns)
        return [
            f"background:rgba({HEAT},{self.shades[column][row]:.2f})" if column in self.shades else ""
            for column in range(len(self.rows[row]))
        ]


class Shown:
    """Base of objects that are shown as a table, in `print` and at the end of a notebook cell."""

    def _table(self) -> Table:
        raise TypeError(f"{type(self).__name__} must define _table()")

    def __repr__(self) -> str:
        return self._table().as_text()

    def _repr_html_(self) -> str:
        return self._table().as_html()


def describe_array(array: Any) -> str:
    """Return dtype and shape of an array, and the device of a tensor that is not on the CPU.

    >>> import numpy as np
    >>> describe_array(np.zeros((2, 3)))
    'float64 [2, 3]'
    """
    device = getattr(array, "device", "cpu")
    where = "" if str(device) == "cpu" else f" on {device}"
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}{where}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it belongs.

    >>> count(1, "head"), count(0, "seed"), count(2, "backward pass"), count(3, "family")
    ('1 head', '0 seeds', '2 backward passes', '3 families')
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def name_layer(path: str) -> str:
    """Return the path of a layer as tables show it. The path is empty where the model itself is the layer.

    >>> name_layer("encoder.layer.0"), name_layer("")
    ('encoder.layer.0', '(the model)')
    """
    return path or "(the model)"


def shade_sharpness(entropy_ratio: float | None) -> float:
    """Return the strength of a head's colour: stronger for sharper heads, 0 where there is no ratio.

    >>> [round(shade_sharpness(ratio), 2) for ratio in (0.0, 0.5, 1.0, float("nan"), None)]
    [0.75, 0.38, 0.0, 0.0, 0.0]
    """
    # The comparison is False for NaN as well.
    return 0.75 * (1.0 - max(entropy_ratio, 0.0)) if entropy_ratio is not None and entropy_ratio < 1.0 else 0.0
