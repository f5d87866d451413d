"""Claims that only training can decide: learning without scaling, at several widths, and by trained models.

A verdict comes from 95% intervals. It is `undecided` where the intervals allow both answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqrtdk.claims.claim import Verdict, VerdictName, claim
from sqrtdk.claims.evidence import Evidence
from sqrtdk.errors import SqrtdkError
from sqrtdk.lab import RunSpec
from sqrtdk.lab.ablation import OUTCOMES, show_difference
from sqrtdk.lab.intervals import Interval, share_difference, wilson
from sqrtdk.lab.outcomes import or_infinite
from sqrtdk.records.record import Record, Row
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_setting
from sqrtdk.wording.numbers import write_loss, write_number

UNDECIDED = "In {steps} steps not even the models with 1/√dₖ learn the task: more steps are needed to decide."
_TOO_FEW = "{seeds} too few to decide: the 95% intervals leave both answers possible."

# Shares of runs that differ by less than half of the runs count as equal.
_SHARE_MARGIN = 0.5


def require_runs(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise an error if every run of a setting failed. The store or the record has the message of each run."""
    if any(row["n"] == 0 for row in rows):
        raise SqrtdkError("every training run of a setting failed; `sqrtdk ablate --json` shows their messages")


def solves_more_by(row: Row, other: Row) -> Interval:
    """Return the 95% interval of the difference between the shares of solved runs, row minus other."""
    solved, others = (round(one["solved_fraction"] * one["n"]) for one in (row, other))
    return share_difference(solved, row["n"], others, other["n"])


def explain_doubt(row: Row, steps: int) -> str:
    """Return why the claim is undecided, from the row of the models with 1/√dₖ."""
    if row["solved_fraction"] < 0.5:
        return UNDECIDED.format(steps=steps)
    return _TOO_FEW.format(seeds=f"{count(row['n'], 'seed')} {'is' if row['n'] == 1 else 'are'}")


def _solved(row: Row) -> str:
    return f"{round(row['solved_fraction'] * row['n'])} of {row['n']}"


@claim(
    "soft.trained",
    "S3",
    "at random initialisation scaling is critical, in a trained model less so",
    trains=True,
)
def _trained(evidence: Evidence) -> Verdict:
    stages = {stage["stage"]: stage for stage in evidence.swap.tables["summary"]}
    require_runs(stages.values())
    trained, swapped, continued, scratch = (stages[name] for name in ("trained", "swapped", "continued", "scratch"))
    verdict = _judge_trained(trained, swapped, continued, scratch)
    lost = or_infinite(swapped["loss_median"]) > or_infinite(trained["loss_median"])
    why = (
        f"From a random start with no scaling {_solved(scratch)} runs solve the task; "
        f"a trained model that loses its scale still solves it in {_solved(swapped)}"
        + (", with a higher loss" if lost else "")
        + f", and after training on in {_solved(continued)}."
    )
    return Verdict(
        f"recall, held-out loss (median of {count(trained['n'], 'seed')}): trained with √dₖ "
        f"{write_loss(trained['loss_median'])}, scale then removed {write_loss(swapped['loss_median'])}, trained on "
        f"without {write_loss(continued['loss_median'])}; without from the start {write_loss(scratch['loss_median'])} "
        f"(chance {write_number(RunSpec().make_task().chance_loss, 2)})",
        verdict,
        explain_doubt(trained, evidence.steps) if verdict == "undecided" else why,
        {
            **{
                name: {key: stage[key] for key in ("loss_median", "solved_fraction", "n")}
                for name, stage in stages.items()
            },
            "trained_minus_scratch": list(solves_more_by(trained, scratch)),
            "swapped_minus_scratch": list(solves_more_by(swapped, scratch)),
            "continued_minus_scratch": list(solves_more_by(continued, scratch)),
        },
    )


def _judge_trained(trained: Row, swapped: Row, continued: Row, scratch: Row) -> VerdictName:
    if trained["solved_fraction"] < 0.5:
        return "undecided"
    critical, kept = solves_more_by(trained, scratch), solves_more_by(swapped, scratch)
    if critical.high < _SHARE_MARGIN:
        return "wrong"
    if critical.low > 0.0 and kept.low > 0.0:
        return "holds"
    if critical.low > 0.0 and kept.high < _SHARE_MARGIN:
        # As bad as training without scaling from the start. The rest depends on whether further training repairs it.
        return "depends" if solves_more_by(continued, scratch).low > 0.0 else "wrong"
    return "undecided"


@claim("grad.learning", "all", "without scaling, learning slows or fails", trains=True)
def _learning(evidence: Evidence) -> Verdict:
    record = evidence.learning
    require_runs(record.tables["best"])
    best = {(row["scale"], row["init"], row["qk_step"]): row for row in record.tables["best"]}
    none, sqrt, inverse = (best[name, "unit", "unit"] for name in ("none", "sqrt", "inverse"))
    start, both = (best["none", "rescaled", step] for step in ("unit", "rescaled"))
    paired = _find_comparison(record, "none")
    fails, rescued, lacks = solves_more_by(sqrt, none), solves_more_by(start, none), solves_more_by(sqrt, start)
    verdict: VerdictName = "undecided"
    if sqrt["solved_fraction"] < 0.5:
        why = ""
    elif paired["outcome"] in ("as well", "better"):
        verdict, why = "wrong", f"At its own learning rate the model without scaling does {paired['outcome']} here."
    elif fails.low > 0.0 and rescued.low > 0.0:
        verdict, why = "depends", _explain_start(none, sqrt, start, both)
    elif fails.low > 0.0 and lacks.low > 0.0:
        verdict, why = "holds", f"A rescaled init does not make up for it: {_solved(start)} runs solve the task."
    listed = "; ".join(
        f"{name_setting(row['scale'], row['init'], qk_step=row['qk_step'])} {write_loss(row['final_loss_median'])} "
        f"({_solved(row)} solved)"
        for row in (none, sqrt, inverse, start, both)
    )
    return Verdict(
        f"recall at dₖ {sqrt['d_k']}, {evidence.steps} steps at a learning rate chosen on other seeds, median loss of "
        f"{count(sqrt['n'], 'seed')}: {listed}; 1/√dₖ solves it in {_show_percents(fails)} points more of the runs "
        "than no scaling (95% interval)",
        verdict,
        explain_doubt(sqrt, evidence.steps) if verdict == "undecided" else why,
        {
            **{
                ",".join(name[: 2 if name[2] == "unit" else 3]): {
                    key: row[key] for key in ("lr", "final_loss_median", "solved_fraction", "n")
                }
                for name, row in best.items()
            },
            "sqrt_minus_none": list(fails),
            "start_minus_none": list(rescued),
            "sqrt_minus_start": list(lacks),
        },
    )


def _show_percents(interval: Interval) -> str:
    return " to ".join(f"{100.0 * end:.0f}" for end in interval)


def _explain_start(none: Row, sqrt: Row, start: Row, both: Row) -> str:
    return (
        f"Without scaling {_solved(none)} runs solve the task, with 1/√dₖ {_solved(sqrt)}, and with no scaling but a "
        f"rescaled init (W_q and W_k × dₖ^−¼) {_solved(start)}. With a rescaled step as well it is {_solved(both)}: "
        "the division sets the start and the step, and both can be set without it."
    )


def _find_comparison(record: Record, scale: str, d_k: int | None = None) -> Row:
    """Return the comparison of a policy with sqrt, both with the default init."""
    rows: Sequence[Row] = record.tables["comparisons"]
    return next(
        row
        for row in rows
        if (row["scale"], row["init"], row["qk_step"]) == (scale, "unit", "unit") and d_k in (None, row["d_k"])
    )


def _describe_widths(record: Record) -> str:
    """Return how many runs solved the task at each width, each policy at its own learning rate."""
    rows = {(row["scale"], row["d_k"]): row for row in record.tables["best"] if _is_plain(row)}
    d_ks = record.spec["d_ks"]
    listed = (
        f"{name_setting(scale)} {', '.join(_solved(rows[scale, d_k]) for d_k in d_ks)}"
        for scale in ("none", "sqrt", "inverse")
    )
    return (
        f"record of {record.spec['date']} (`{record.spec['command']}`), runs that solve recall at dₖ "
        f"{', '.join(map(str, d_ks))}, each at a learning rate chosen on other seeds: {'; '.join(listed)}"
    )


def _list_outcomes(record: Record, scale: str) -> dict[str, list[int]]:
    """Return the outcomes of a policy compared with 1/√dₖ, each at its own learning rate, with their widths."""
    outcomes: dict[str, list[int]] = {}
    for d_k in record.spec["d_ks"]:
        outcomes.setdefault(_find_comparison(record, scale, d_k)["outcome"], []).append(d_k)
    return outcomes


def _show_outcomes(outcomes: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"{OUTCOMES[name]} at dₖ {', '.join(map(str, d_ks))}" for name, d_ks in outcomes.items())


def _is_plain(row: Row) -> bool:
    return (row["init"], row["qk_step"]) == ("unit", "unit")


@claim("grad.range", "S1", "dividing by √dₖ is empirically validated over a wide range of dₖ values")
def _range(evidence: Evidence) -> Verdict:
    record = evidence.widths
    rows = [row for row in record.tables["best"] if row["scale"] == "sqrt" and _is_plain(row)]
    shares = [wilson(round(row["solved_fraction"] * row["n"]), row["n"]) for row in rows]
    d_ks = record.spec["d_ks"]
    works = all(share.low > 0.5 for share in shares)
    rivals = _list_outcomes(record, "inverse")
    why = (
        f"With 1/√dₖ most runs learn one task in one small model at every width from {min(d_ks)} to {max(d_ks)}. "
        f"Beside it 1/dₖ: {_show_outcomes(rivals)}."
        if works
        else "It is not shown for every width that most runs with 1/√dₖ learn the task."
    )
    return Verdict(
        _describe_widths(record),
        "holds" if works else ("wrong" if any(share.high < 0.5 for share in shares) else "undecided"),
        why,
        {"d_k": d_ks, "solved_interval": [list(share) for share in shares], "inverse": rivals},
    )


@claim("grad.inverse", "S1", "dividing by dₖ potentially harms the performance of the model")
def _inverse(evidence: Evidence) -> Verdict:
    record = evidence.widths
    own = {d_k: _find_comparison(record, "inverse", d_k) for d_k in record.spec["d_ks"]}
    harmed, helped = _list_rates(record, "sqrt", "inverse"), _list_rates(record, "inverse", "sqrt")
    listed = _list_outcomes(record, "inverse")
    outcomes = set(listed)
    verdict: VerdictName = "undecided"
    if outcomes == {"worse"}:
        verdict = "holds"
    elif "worse" in outcomes or (outcomes <= {"as well", "better"} and harmed):
        verdict = "depends"
    elif outcomes <= {"as well", "better"}:
        verdict = "wrong"
    at_own = "; ".join(f"dₖ {d_k}: {show_difference(row)}" for d_k, row in own.items())
    seeds = count(len(record.spec["selection_seeds"]), "other seed")
    return Verdict(
        f"{_describe_widths(record)}. 1/dₖ beside 1/√dₖ, each at its own rate: {at_own}",
        verdict,
        f"1/dₖ beside 1/√dₖ, each at its own learning rate: {_show_outcomes(listed)}. At the same learning rate 1/dₖ "
        f"solves the task less often than 1/√dₖ {_show_rates(harmed)}, more often {_show_rates(helped)} ({seeds}, by "
        "95% intervals).",
        {
            "outcomes": {str(d_k): row["outcome"] for d_k, row in own.items()},
            "differences": {str(d_k): row["difference_interval"] for d_k, row in own.items()},
            "less_often_at": {f"{lr:g}": widths for lr, widths in harmed.items()},
            "more_often_at": {f"{lr:g}": widths for lr, widths in helped.items()},
        },
    )


def _list_rates(record: Record, more: str, less: str) -> dict[float, list[int]]:
    """Return the learning rates at which one policy solves the task more often in the selection, with the widths."""
    rows = {(row["scale"], row["lr"], row["d_k"]): row for row in record.tables["selection"] if _is_plain(row)}
    listed: dict[float, list[int]] = {}
    for lr in record.spec["lrs"]:
        for d_k in record.spec["d_ks"]:
            if solves_more_by(rows[more, lr, d_k], rows[less, lr, d_k]).low > 0.0:
                listed.setdefault(lr, []).append(d_k)
    return listed


def _show_rates(listed: Mapping[float, Sequence[int]]) -> str:
    return "; ".join(f"with lr {lr:g} at dₖ {', '.join(map(str, d_ks))}" for lr, d_ks in listed.items()) or "nowhere"
