"""Sentences on division by dₖ beside division by √dₖ: weights, gradients and training, each made from a record."""

from __future__ import annotations

from sqrtdk.records.record import Record
from sqrtdk.report.story_figures import EXAMPLE, cells_of, choose_size
from sqrtdk.report.training_figures import INVERSE, SQRT, count_solved, list_learned, state_rates, write_solved
from sqrtdk.wording.numbers import write_number

# A query that attends to more than this share of its keys has nearly uniform weights.
_NEARLY_ALL = 0.9


def read_weights(record: Record) -> str:
    """State how many keys a query attends to with either divisor, and whether the weights are nearly uniform."""
    d_k, n = choose_size(record)
    cells = cells_of(record)
    sqrt, inverse = (cells[d_k, n, policy]["effective_keys"] for policy in ("sqrt", "inverse"))
    uniform = (
        "The weights are nearly uniform, so attention hardly selects a key."
        if inverse > _NEARLY_ALL * n
        else "The weights are not uniform at this size."
    )
    return (
        f"At dₖ = {d_k} a query attends to {write_number(inverse, 2)} of {n} keys with 1/dₖ and to "
        f"{write_number(sqrt, 2)} with 1/√dₖ. {uniform}"
    )


def read_gradients(record: Record) -> str:
    """State the mean gradient of a query with either divisor."""
    d_k, n = choose_size(record)
    cells = cells_of(record)
    sqrt, inverse = (cells[d_k, n, policy]["grad_q_mean"] for policy in ("sqrt", "inverse"))
    less = f", {write_number(sqrt / inverse, 2)} times less" if inverse < sqrt else ", not less"
    return (
        f"The mean gradient of a query is {write_number(sqrt, 2)} with 1/√dₖ and {write_number(inverse, 2)} with 1/dₖ"
        f"{less}."
    )


def read_training(record: Record) -> str:
    """State how many runs solve the task with either divisor and at which learning rates; empty without such runs."""
    sizes = {row["d_k"] for row in record.tables["best"]}
    d_k = EXAMPLE[0] if EXAMPLE[0] in sizes else max(sizes)
    solved = count_solved(record, d_k)
    if not {SQRT, INVERSE} <= solved.keys():
        return ""
    inverse, sqrt = solved[INVERSE][0], solved[SQRT][0]
    fails = inverse[0] * sqrt[1] < sqrt[0] * inverse[1]
    rates = {scale: list_learned(record, scale, d_k) for scale in ("inverse", "sqrt")}
    tried = rates["sqrt"][1]
    learned = {
        scale: " and ".join(f"{lr:g}" for lr in found) if found else "none" for scale, (found, _) in rates.items()
    }
    where = (
        f" Of {tried} learning rates, at least half of the runs solve the task at {learned['inverse']} with 1/dₖ and "
        f"at {learned['sqrt']} with 1/√dₖ."
        if tried > 1
        else ""
    )
    chosen = ", each at its own learning rate" if state_rates(record) else ""
    return (
        f"Training at dₖ = {d_k} {'is worse with' if fails else 'does not rule out'} 1/dₖ: "
        f"{write_solved([inverse])} runs solve the task with 1/dₖ, {write_solved([sqrt])} with 1/√dₖ{chosen}.{where}"
    )
