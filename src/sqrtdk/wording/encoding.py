"""Spelling of texts in encodings that lack some of their letters: √dₖ becomes sqrt d_k instead of an error."""

from __future__ import annotations

import codecs
import re
import sys
from typing import Any

_HANDLER = "sqrtdk.spell"
_SPELLINGS = {
    "√": "sqrt ", "ₖ": "_k", "ᵥ": "_v", "ᵢ": "_i", "ⱼ": "_j", "ᵀ": "^T", "∂": "d", "‖": "||", "Σ": "sum ", "δ": "delta",
    "σ": "sigma", "ρ": "rho", "τ": "tau", "ψ": "psi", "φ": "phi", "π": "pi", "β": "beta", "ε": "eps", "⟨": "<",
    "⟩": ">", "·": "*", "×": "x", "−": "-", "–": "-", "—": "-", "±": "+-", "≈": "~", "≠": "!=", "≤": "<=", "≥": ">=",
    "≳": ">~", "∞": "inf", "→": "->", "½": "1/2", "¼": "1/4", "…": "...", "•": "*", "“": '"', "”": '"', "’": "'",
    "✓": "yes", "✗": "no", "◐": "partly", "─": "-", "│": "|", "╭": "+", "╮": "+", "╰": "+", "╯": "+",
    "²": "^2", "³": "^3", "⁰": "^0", "¹": "^1", "⁴": "^4", "⁵": "^5", "⁶": "^6", "⁷": "^7", "⁸": "^8", "⁹": "^9",
    "⁻": "^-", "ˢ": "^s", "⌊": "floor(", "⌋": ")", "α": "alpha", "ü": "ue", "é": "e",
}  # fmt: skip


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = "".join(_SPELLINGS.get(letter, "?") for letter in error.object[error.start : error.end])
    return re.sub(r"(?<=\^)([-\d^]+)", lambda power: power[0].replace("^", ""), text), error.end


codecs.register_error(_HANDLER, _replace)


def takes_everything(stream: Any) -> bool:
    """Return whether a stream can write every letter, as UTF-8, UTF-16 and UTF-32 can.

    >>> import io
    >>> takes_everything(io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    False
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return codecs.lookup(encoding).name.startswith("utf")


def spell(text: str, encoding: str | None = None) -> str:
    """Return the text as an encoding (None: that of stdout) can write it, so that widths are those of the shown text.

    >>> spell("1/√dₖ ≤ 2·10⁻³", "ascii")
    '1/sqrt d_k <= 2*10^-3'
    """
    name = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(name, _HANDLER).decode(name)


def never_fail(*streams: Any) -> None:
    """Let text streams spell letters that their encoding lacks instead of raising."""
    for stream in streams:
        if hasattr(stream, "reconfigure") and not takes_everything(stream):
            stream.reconfigure(errors=_HANDLER)
