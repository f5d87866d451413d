"""Scale formulas of the families of the transformers library, by design or as measured in their code."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

from sqrtdk.records.record import Record, Row

__all__ = [
    "DESIGNED",
    "SAME_SCALE",
    "UNUSUAL_COLUMNS",
    "ScaleFormula",
    "formula_of_family",
    "is_usual",
    "list_unusual",
    "load_zoo",
]

SAME_SCALE = 1e-3
"""Relative tolerance: a measured scale is a ratio of rounded lengths."""


@dataclass(frozen=True)
class ScaleFormula:
    """scale = multiple · dₖ^power.

    >>> ScaleFormula(1.0, -0.5).at(64), ScaleFormula(1.0, 0.0).at(64)
    (0.125, 1.0)
    """

    multiple: float
    power: float

    def at(self, d_k: int) -> float:
        """Return the scale for head vectors of this width."""
        return self.multiple * math.pow(d_k, self.power)


def is_usual(row: Row) -> bool:
    """Return whether the measured scale of a family's row is 1/√dₖ.

    >>> is_usual({"measured": 0.125, "d_k": 64}), is_usual({"measured": 1.0, "d_k": 64})
    (True, False)
    """
    return math.isclose(row["measured"] * math.sqrt(row["d_k"]), 1.0, rel_tol=SAME_SCALE)


USUAL, NONE, INVERSE = ScaleFormula(1.0, -0.5), ScaleFormula(1.0, 0.0), ScaleFormula(1.0, -1.0)

DESIGNED = {
    # Raffel et al. 2020 fold the scale into the initialisation; so do the descendants of T5.
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop"), NONE),
    **dict.fromkeys(("pix2struct_text_model", "pix2struct_vision_model"), NONE),
    # The code it was trained with (Mesh TensorFlow) did not scale.
    "gpt_neo": NONE,
    # RMS norms of q and k take the place of the scale.
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_vision"), NONE),
    # The scale of half the head, because their heads see the hidden state and the embedding side by side.
    **dict.fromkeys(("zamba", "zamba2"), ScaleFormula(2**0.5, -0.5)),
    # muP.
    "inkling_text": INVERSE,
}
"""Families (`model_type`) designed for another scale than 1/√dₖ, without a configuration field that says so."""


def formula_of_family(family: str) -> ScaleFormula | None:
    """Return the scale formula of a family (`model_type` of a configuration), by design or else as measured.

    None where the family is not known, or where its layers do not all use one of 1/√dₖ, 1/dₖ or no scaling.

    >>> formula_of_family("t5")
    ScaleFormula(multiple=1.0, power=0.0)
    >>> formula_of_family("llama").at(64)
    0.125
    """
    return DESIGNED.get(family) or _measured_formulas().get(family)


@cache
def load_zoo() -> Record:
    """Return the record of `sqrtdk zoo` that comes with the package.

    >>> load_zoo().kind
    'zoo'
    """
    content = (resources.files("sqrtdk.records.data") / "zoo.json").read_text(encoding="utf-8")
    return Record.from_json(json.loads(content))


UNUSUAL_COLUMNS = ("family", "d_k", "measured", "times √dₖ", "declared", "q or k normalised", "soft cap")


def list_unusual(record: Record) -> list[Row]:
    """Return the families of a zoo's record that use another scale than 1/√dₖ, as rows with `UNUSUAL_COLUMNS`.

    >>> {row["family"]: row["measured"] for row in list_unusual(load_zoo())}["gpt_neo"]
    1.0
    """
    rows = [row for row in record.tables["families"] if row["measured"] is not None and not is_usual(row)]
    return [
        dict(
            zip(
                UNUSUAL_COLUMNS,
                (
                    *(row["family"], row["d_k"], row["measured"], row["measured"] * math.sqrt(row["d_k"])),
                    *(row["declared"], "yes" if row["normalised"] else "no", row["softcap"]),
                ),
                strict=True,
            )
        )
        for row in rows
    ]


@cache
def _measured_formulas() -> dict[str, ScaleFormula]:
    layers: dict[str, list[tuple[int, float | None]]] = {}
    for row in load_zoo().tables["layers"]:
        layers.setdefault(row["family"], []).append((row["d_k"], row["measured"]))
    formulas = {}
    for family, measured in layers.items():
        fitting = [one for one in (USUAL, INVERSE, NONE) if all(_follows(one, *layer) for layer in measured)]
        if fitting:
            formulas[family] = fitting[0]
    return formulas


def _follows(formula: ScaleFormula, d_k: int, measured: float | None) -> bool:
    return measured is not None and math.isclose(measured, formula.at(d_k), rel_tol=SAME_SCALE)
