"""Numbers as readers see them: digits, powers of ten, percent, seconds. `numbers.js` follows the same rule in pages."""

from __future__ import annotations

import math
from collections.abc import Iterable

DIGITS = 4
"""Significant digits of a number."""
LEAST, MOST = 1e-3, 1e5
"""A number whose size is below the first, or not below the second, is written with a power of ten."""

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def write_number(value: float | None, digits: int = DIGITS) -> str:
    """Write a number with so many significant digits, and – for None and NaN. Large numbers have no decimals.

    >>> [write_number(x) for x in (22.6274, -12345.6, 9.81e-11, math.inf, None)]
    ['22.63', '−12346', '9.8·10⁻¹¹', '∞', '–']
    >>> write_number(2.118, 2), write_number(389.4, 2)
    ('2.1', '389')
    """
    if value is None or math.isnan(value):
        return "–"
    size = abs(value)
    if math.isinf(value):
        text = "∞" if value > 0 else "-∞"
    elif value and not LEAST <= size < MOST:
        text = spell_power(*f"{value:.1e}".split("e"))
    else:
        text = f"{value:.0f}" if size >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return text.replace("-", "−")


def write_decimals(value: float, decimals: int = 2) -> str:
    """Write a number with so many decimals, as numbers stand that are compared with each other.

    >>> write_decimals(0.96), write_decimals(-12.304, 1)
    ('0.96', '−12.3')
    """
    return f"{value:.{decimals}f}".replace("-", "−")


def write_setting(value: float) -> str:
    """Write a number that somebody set, such as a learning rate or a threshold, as it would be typed.

    >>> write_setting(3e-4), write_setting(100.0)
    ('0.0003', '100')
    """
    return f"{value:g}"


def spell_power(mantissa: str, exponent: str) -> str:
    """Write a number in scientific notation as it is written by hand.

    >>> spell_power("9.8", "-11")
    '9.8·10⁻¹¹'
    """
    return f"{mantissa}·{name_power(int(exponent))}"


def name_power(exponent: int) -> str:
    """Write a power of ten as it is written by hand.

    >>> name_power(-11)
    '10⁻¹¹'
    """
    return f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def write_percent(share: float) -> str:
    """Write a share in percent, with two digits.

    >>> [write_percent(share) for share in (0.0004, 0.0123, 0.791, 1.0, 0.0)]
    ['less than 0.1%', '1.2%', '79%', '100%', '0%']
    """
    return "less than 0.1%" if 0.0 < share < 1e-3 else f"{write_number(100.0 * share, 2)}%"


def write_change(value: float | None) -> str:
    """Write a difference with its sign.

    >>> write_change(0.25), write_change(-0.0016), write_change(None)
    ('+0.250', '−0.002', '–')
    """
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def write_loss(loss: float | None) -> str:
    """Write a loss. None stands for a run that diverged and is written as ∞.

    >>> write_loss(0.00612), write_loss(2.6134), write_loss(None)
    ('0.0061', '2.61', '∞')
    """
    if loss is None or not math.isfinite(loss):
        return "∞"
    return f"{loss:.2f}" if abs(loss) >= 0.1 else f"{loss:.2g}"


def write_range(values: Iterable[float]) -> str:
    """Write the least and the largest value, or the only one.

    >>> write_range([512, 4096, 1024]), write_range([512, 512])
    ('512 to 4096', '512')
    """
    ends = sorted(set(values))
    return f"{ends[0]}" if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def write_seconds(seconds: float) -> str:
    """Write a duration.

    >>> write_seconds(42.4), write_seconds(300)
    ('42 s', '5 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
