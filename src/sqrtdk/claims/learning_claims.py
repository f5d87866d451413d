"""Claims that only training can decide: whether models learn without the scale, and whether trained ones need it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqrtdk.claims.claim import Finding, Verdict, claim
from sqrtdk.claims.evidence import LEARNING_RATES, Evidence
from sqrtdk.display import count
from sqrtdk.errors import SqrtdkError
from sqrtdk.lab import RunSpec
from sqrtdk.lab.outcomes import or_infinite
from sqrtdk.setting_names import name_setting


def _loss(value: float | None) -> str:
    return "∞" if value is None else f"{value:.2g}"


def require_runs(rows: Iterable[Mapping[str, Any]]) -> None:
    """Without any finished run there is nothing to decide by; the store or the record has the message of each."""
    if any(row["n"] == 0 for row in rows):
        raise SqrtdkError("every training run of a setting failed; `sqrtdk ablate --json` shows their messages")


@claim(
    "soft.trained",
    "S3",
    "at random initialisation scaling is critical, in a trained model less so",
    trains=True,
)
def _trained(evidence: Evidence) -> Finding:
    stages = {stage["stage"]: stage for stage in evidence.swap.tables["summary"]}
    require_runs(stages.values())
    trained, swapped, continued, scratch = (stages[name] for name in ("trained", "swapped", "continued", "scratch"))
    learned, stays, recovers, starts = (
        stage["solved_fraction"] >= 0.5 for stage in (trained, swapped, continued, scratch)
    )
    verdict: Verdict = "wrong"
    if not learned:
        verdict = "depends"
    elif not starts and (recovers or stays):
        verdict = "holds" if recovers and stays else "depends"
    lost = or_infinite(swapped["loss_median"]) > or_infinite(trained["loss_median"])
    why = (
        f"From a random start without scale {scratch['solved_fraction']:.0%} of the runs solve the task; "
        f"a trained model that loses its scale still solves it in {swapped['solved_fraction']:.0%}"
        + (", with a higher loss" if lost else "")
        + f", and after training on in {continued['solved_fraction']:.0%}."
    )
    return Finding(
        f"recall, held-out loss (median of {count(trained['n'], 'seed')}): trained with √dₖ "
        f"{_loss(trained['loss_median'])}, "
        f"scale then removed {_loss(swapped['loss_median'])}, trained on without {_loss(continued['loss_median'])}; "
        f"without from the start {_loss(scratch['loss_median'])} (chance {RunSpec().make_task().chance_loss:.2g})",
        verdict,
        why if learned else UNDECIDED.format(steps=evidence.steps),
        {name: {key: stage[key] for key in ("loss_median", "solved_fraction", "n")} for name, stage in stages.items()},
    )


@claim("grad.learning", "all", "without scaling, learning slows or fails", trains=True)
def _learning(evidence: Evidence) -> Finding:
    record = evidence.learning
    require_runs(record.tables["best"])
    best = {(row["scale"], row["init"]): row for row in record.tables["best"]}
    none, sqrt, inverse = (best[name, "unit"] for name in ("none", "sqrt", "inverse"))
    absorbed = best["none", "absorbed"]
    paired = next(
        row
        for row in record.tables["comparisons"]
        if (row["basis"], row["scale"], row["init"]) == ("best_lr", "none", "unit")
    )
    learned = sqrt["solved_fraction"] >= 0.5
    fails = none["solved_fraction"] < sqrt["solved_fraction"] and paired["higher"] > paired["lower"]
    control_learns = absorbed["solved_fraction"] > none["solved_fraction"]
    listed = "; ".join(
        f"{name_setting(row['scale'], row['init'])} {_loss(row['final_loss_median'])} "
        f"({row['solved_fraction']:.0%} solved)"
        for row in (none, sqrt, inverse, absorbed)
    )
    return Finding(
        f"recall at dₖ {sqrt['d_k']}, each at its own best of {len(LEARNING_RATES)} learning rates, median loss of "
        f"{count(sqrt['n'], 'seed')}: {listed}; no scaling above 1/√dₖ in {paired['higher']} of "
        f"{count(paired['n'], 'pair')} "
        f"(Wilcoxon p = {paired['wilcoxon_p']:.2g})",
        ("depends" if control_learns or not learned else "holds") if fails or not learned else "wrong",
        _explain_learning(fails, control_learns) if learned else UNDECIDED.format(steps=evidence.steps),
        {
            f"{scale},{init}": {key: row[key] for key in ("lr", "final_loss_median", "solved_fraction", "n")}
            for (scale, init), row in best.items()
        },
    )


UNDECIDED = "In {steps} steps not even the models with 1/√dₖ learn the task: more steps are needed to decide."


def _explain_learning(fails: bool, control_learns: bool) -> str:
    if not fails:
        return "Runs without scale learn as well as scaled ones here."
    if not control_learns:
        return "Neither another learning rate nor smaller weights at the start rescue it."
    return (
        "Unscaled runs from unit-variance q and k fail even at their best learning rate, but the same model without a "
        "scale learns when its weights start smaller: the size of the logits at the start matters, not the division."
    )
