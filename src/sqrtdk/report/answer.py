"""Short answer of the report: a sentence on variance, softmax, training and gradients, each made from a record."""

from __future__ import annotations

from collections.abc import Mapping

from sqrtdk.records.record import Record
from sqrtdk.report.story_figures import EXAMPLE, cells_of, choose_size
from sqrtdk.report.training_figures import NONE, SQRT, compares_scaling, count_solved, write_solved
from sqrtdk.wording.numbers import write_number, write_percent

__all__ = ["answer"]

_CONTROL = ("none", "rescaled", "rescaled")


def answer(records: Mapping[str, Record]) -> list[str]:
    """Return the sentences that the records at hand can tell, four where all are there.

    >>> from sqrtdk.exercises import variance
    >>> answer({"variance": variance(d_ks=(64,), samples=1000)})[0][:26]
    'A score q·k has variance d'
    """
    sentences = []
    if "variance" in records:
        sentences.append(_tell_variance(records["variance"]))
    if "concentration" in records:
        sentences.append(_tell_softmax(records["concentration"]))
    trained = [records[topic] for topic in ("widths", "ablation") if topic in records]
    if trained := [record for record in trained if compares_scaling(record)]:
        sentences.append(_tell_training(trained[0]))
    if "gradients" in records:
        sentences.append(_tell_gradients(records["gradients"]))
    return sentences


def _tell_variance(record: Record) -> str:
    rows = [row for row in record.tables["variance"] if row["scale"] == "none"]
    row = next((row for row in rows if row["d_k"] == EXAMPLE[0]), rows[-1])
    measured = f"{write_number(row['measured'] ** 2, 3)} measured at dₖ = {row['d_k']}"
    scaled = [one["measured"] ** 2 for one in record.tables["variance"] if one["scale"] == "sqrt"]
    after = " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(scaled), max(scaled))))
    if not row["inside"]:
        return f"A score q·k should have variance dₖ, but has {measured}: the variance formula does not hold here."
    sizes = [str(one["d_k"]) for one in rows]
    if len(sizes) > 3:
        where = f" at every size from dₖ = {sizes[0]} to {sizes[-1]}"
    else:
        where = f" at dₖ = {', '.join(sizes[:-1])} and {sizes[-1]}" if len(sizes) > 1 else ""
    return f"A score q·k has variance dₖ ({measured}). After division by √dₖ the variance is {after}{where}."


def _tell_softmax(record: Record) -> str:
    d_k, n = choose_size(record)
    cells = cells_of(record)
    none, sqrt, inverse = (
        write_number(cells[d_k, n, policy]["effective_keys"], 2) for policy in ("none", "sqrt", "inverse")
    )
    return (
        f"At dₖ = {d_k} a query attends to {none} of {n} keys without the division. With 1/√dₖ it attends to {sqrt} "
        f"keys, with 1/dₖ to {inverse}."
    )


def _tell_training(record: Record) -> str:
    sizes = {row["d_k"] for row in record.tables["best"]}
    d_k = EXAMPLE[0] if EXAMPLE[0] in sizes else max(sizes)
    solved = {setting: write_solved(counts) for setting, counts in count_solved(record, d_k).items()}
    control = (
        f" With a rescaled init and step of W_q and W_k in place of the division, {solved[_CONTROL]} runs solve it."
        if _CONTROL in solved
        else ""
    )
    return (
        f"In training, {solved[NONE]} runs solve a recall task without the division at dₖ = {d_k}, and {solved[SQRT]} "
        f"with 1/√dₖ.{control}"
    )


def _tell_gradients(record: Record) -> str:
    d_k, n = at = choose_size(record)
    cells = cells_of(record)
    none, sqrt = cells[*at, "none"], cells[*at, "sqrt"]
    more = "more" if none["top_share"] > sqrt["top_share"] else "no more"
    larger = "larger" if none["grad_q_mean"] > sqrt["grad_q_mean"] else "no larger"
    return (
        f"Gradients are {larger} on average without the division and {more} uneven: at dₖ = {d_k}, n = {n} the mean is "
        f"{write_number(none['grad_q_mean'], 2)}, with 1/√dₖ {write_number(sqrt['grad_q_mean'], 2)}. A twentieth of "
        f"the rows holds {write_percent(none['top_share'])} of the squared gradient, with 1/√dₖ "
        f"{write_percent(sqrt['top_share'])}."
    )
