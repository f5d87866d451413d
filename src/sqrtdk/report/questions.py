"""Questions of the report's sections. The right guess follows from the records; without a right guess none is asked."""

from __future__ import annotations

import math

from sqrtdk.records.families import is_usual
from sqrtdk.records.record import Record
from sqrtdk.report.answer import answer
from sqrtdk.report.cause import START, measure_cause, say_cause
from sqrtdk.report.chapters import Material
from sqrtdk.report.guess import Question, ask_choice, ask_number, list_sizes
from sqrtdk.report.inverse_scale import read_weights
from sqrtdk.report.story_figures import EXAMPLE, cells_of, choose_size
from sqrtdk.report.training_figures import NONE, compares_scaling, count_solved
from sqrtdk.wording.numbers import write_number

__all__ = [
    "ask_about_cause",
    "ask_about_claims",
    "ask_about_gradients",
    "ask_about_inverse",
    "ask_about_keys",
    "ask_about_models",
    "ask_about_saturation",
    "ask_about_temperature",
    "ask_about_training",
    "ask_about_variance",
]

# A ratio of spreads this near to one of the choices is that choice.
_NEAR = 1.1
_SHARES = ("fewer than half", "half or more, but not all", "all of them")


def _name_share(part: int, whole: int) -> str:
    return _SHARES[2 if part == whole else 1 if 2 * part >= whole else 0]


def ask_about_cause() -> Question:
    """Ask for the largest of the weights on the first screen.

    >>> ask_about_cause().label
    'largest weight'
    """
    return ask_number(
        f"A query of length dₖ = {START.d_k} meets {START.n} keys, all with random entries. Without the division, how "
        "much of the weight does the most attended key get?",
        "largest weight",
        [place / 20 for place in range(1, 21)],
        measure_cause(START, divided=False)["max_weight"],
        f"{say_cause(START, divided=False)} {say_cause(START, divided=True)}",
    )


def ask_about_keys(record: Record) -> Question:
    """Ask how many keys a query attends to without the division."""
    d_k, n = choose_size(record)
    none, sqrt = (cells_of(record)[d_k, n, policy] for policy in ("none", "sqrt"))
    return ask_number(
        f"Queries and keys have random entries, dₖ = {d_k}, and each query sees {n} keys. Without the division, as if "
        "how many keys shared the weight equally?",
        "keys",
        list_sizes(n),
        none["effective_keys"],
        f"{write_number(none['effective_keys'], 2)} of {n} keys, the mean over {none['rows']} queries. After division "
        f"by √dₖ it is {write_number(sqrt['effective_keys'], 2)}.",
    )


def ask_about_variance(record: Record) -> Question | None:
    """Ask how the spread of scores grows with dₖ; None if no choice is near to what was measured."""
    rows = {row["d_k"]: row["measured"] for row in record.tables["variance"] if row["scale"] == "none"}
    least = min(rows)
    larger = EXAMPLE[0] if EXAMPLE[0] in rows else max(rows)
    if larger == least:
        return None
    times, grown = larger / least, rows[larger] / rows[least]
    choices = {"as far as before": 1.0, f"{math.sqrt(times):g} times as far": math.sqrt(times)}
    choices |= {f"{times:g} times as far": times, f"{times**2:g} times as far": times**2}
    right = [name for name, value in choices.items() if 1 / _NEAR < grown / value < _NEAR]
    if len(right) != 1:
        return None
    return ask_choice(
        f"dₖ grows from {least} to {larger}, so each dot product q·k adds up {times:g} times as many random terms. How "
        "far do the dot products then spread (standard deviation)?",
        tuple(choices),
        right[0],
        f"The standard deviation goes from {write_number(rows[least], 3)} to {write_number(rows[larger], 3)}, which is "
        f"{write_number(grown, 2)} times as far.",
    )


def ask_about_saturation(record: Record) -> Question | None:
    """Ask from which dₖ on one or two keys hold most of the weight; None if that holds at every dₖ."""
    _, n = choose_size(record)
    begins = {row["n"]: row["concentrated_from"] for row in record.tables["crossover"] if row["n"] > 2}
    if n not in begins:
        return None
    others = [f"With {other} keys it begins at dₖ = {d_k}." for other, d_k in begins.items() if other != n]
    return ask_number(
        f"Without the division softmax picks fewer keys as dₖ grows. From which dₖ on do one or two of {n} keys hold "
        "most of the weight (mean Σp² of at least ½)?",
        "dₖ",
        list_sizes(max(512, begins[n])),
        begins[n],
        " ".join([f"From dₖ = {begins[n]} on with {n} keys (computed exactly).", *others]),
    )


def ask_about_training(material: Material) -> Question | None:
    """Ask how many runs learn without the division; None without runs that compare both."""
    records = [material.records[topic] for topic in ("widths", "ablation") if topic in material.records]
    record = next(filter(compares_scaling, records), None)
    if record is None:
        return None
    sizes = {row["d_k"] for row in record.tables["best"]}
    d_k = EXAMPLE[0] if EXAMPLE[0] in sizes else max(sizes)
    ((solved, runs),) = count_solved(record, d_k)[NONE]
    choices = ("none of them", "some of them", "all of them")
    return ask_choice(
        f"A small transformer learns a recall task from {runs} random starts at dₖ = {d_k}, without the division. How "
        "many of the runs solve the task?",
        choices,
        choices[0 if solved == 0 else 2 if solved == runs else 1],
        answer({"widths": record})[0],
    )


def ask_about_gradients(record: Record) -> Question:
    """Ask whether gradients shrink on average without the division; means whose intervals overlap do not differ."""
    at = choose_size(record)
    none, sqrt = (cells_of(record)[*at, policy] for policy in ("none", "sqrt"))
    choices = ("smaller", "larger", "no clear difference")
    if none["grad_q_high"] < sqrt["grad_q_low"]:
        right = choices[0]
    else:
        right = choices[1] if none["grad_q_low"] > sqrt["grad_q_high"] else choices[2]
    return ask_choice(
        f"At dₖ = {at[0]} and n = {at[1]}, is the mean gradient of a query without the division smaller or larger than "
        "with 1/√dₖ?",
        choices,
        right,
        answer({"gradients": record})[0],
    )


def ask_about_inverse(record: Record) -> Question:
    """Ask how many keys a query attends to after division by dₖ."""
    d_k, n = choose_size(record)
    return ask_number(
        f"Division by dₖ instead of √dₖ makes scores smaller still. At dₖ = {d_k}, as if how many of {n} keys shared "
        "the weight equally?",
        "keys",
        list_sizes(n),
        cells_of(record)[d_k, n, "inverse"]["effective_keys"],
        read_weights(record),
    )


def ask_about_temperature(record: Record) -> Question | None:
    """Ask how many keys a query attends to at the least temperature; None if √dₖ was not measured beside it."""
    rows = {row["relative"]: row for row in record.tables["temperature"]}
    least = min(rows)
    if 1 not in rows or least == 1:
        return None
    n = record.spec["n"]
    usual, sharp = (rows[relative]["effective_keys"] for relative in (1, least))
    return ask_number(
        f"With τ = √dₖ a query attends to {write_number(usual, 2)} of {n} keys. As if how many keys shared the weight "
        f"equally with τ = {least:g}·√dₖ?",
        "keys",
        list_sizes(n),
        sharp,
        f"With τ = {least:g}·√dₖ a query attends to {write_number(sharp, 2)} of {n} keys.",
    )


def ask_about_models(record: Record) -> Question | None:
    """Ask how many families of models use 1/√dₖ; None if none was measured."""
    measured = [row for row in record.tables["families"] if row["measured"] is not None]
    if not measured:
        return None
    usual = sum(map(is_usual, measured))
    return ask_choice(
        f"The scale was measured in the code of {len(measured)} families of the transformers library. How many of them "
        "use 1/√dₖ?",
        _SHARES,
        _name_share(usual, len(measured)),
        f"{usual} of {len(measured)} families use 1/√dₖ.",
    )


def ask_about_claims(record: Record) -> Question | None:
    """Ask how many claims of the four sources hold; None without claims."""
    verdicts = [row["verdict"] for row in record.tables["claims"]]
    if not verdicts:
        return None
    holds = verdicts.count("holds")
    others = ", ".join(
        f"{verdicts.count(name)} {words}"
        for name, words in (("depends", "depend on conditions"), ("wrong", "are wrong"), ("undecided", "are undecided"))
        if name in verdicts
    )
    return ask_choice(
        f"Four sources explain the division in {len(verdicts)} statements that can be computed. How many of them hold?",
        _SHARES,
        _name_share(holds, len(verdicts)),
        f"{holds} of {len(verdicts)} hold{f', {others}' if others else ''}.",
    )
