"""The answer in three sentences, each made from a record: variance, softmax, what becomes of learning."""

from __future__ import annotations

from collections.abc import Mapping

from sqrtdk.records import Record, Row
from sqrtdk.report.learning_figures import name_loss
from sqrtdk.report.story_figures import cells_of, choose_size, find_most_uneven, name_keys
from sqrtdk.report.training_figures import compares_scaling, fails_to_learn, has_own_rates, losses_of

__all__ = ["answer"]


def answer(records: Mapping[str, Record]) -> list[str]:
    """The sentences that the records at hand can tell, three where all are there.

    >>> from sqrtdk.exercises import variance
    >>> answer({"variance": variance(d_ks=(64,), samples=1000)})[0][:37]
    'The variance of a score q·k is dₖ: at'
    """
    sentences = []
    if "variance" in records:
        sentences.append(_tell_variance(records["variance"]))
    if "condensation" in records:
        sentences.append(_tell_softmax(records["condensation"]))
    last = [
        clause
        for clause in (
            _tell_gradients(records["gradients"]) if "gradients" in records else "",
            _tell_widths(records["widths"])
            if "widths" in records and compares_scaling(records["widths"])
            else _tell_training(records["ablation"])
            if "ablation" in records and compares_scaling(records["ablation"])
            else "",
        )
        if clause
    ]
    if last:
        joined = "; ".join(last)
        sentences.append(f"{joined[0].upper()}{joined[1:]}.")
    return sentences


def _tell_variance(record: Record) -> str:
    rows = [row for row in record.tables["variance"] if row["scale"] == "none"]
    row = next((row for row in rows if row["d_k"] == 64), rows[-1])
    measured = f"at dₖ = {row['d_k']} it is measured as {row['measured'] ** 2:.3g}"
    scaled = [one["measured"] ** 2 for one in record.tables["variance"] if one["scale"] == "sqrt"]
    after = " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(scaled), max(scaled))))
    if not row["inside"]:
        return f"The variance of a score q·k should be dₖ, but {measured}: the law is not borne out here."
    return f"The variance of a score q·k is dₖ: {measured}; after division by √dₖ it is {after}" + (
        f" at every size from dₖ = {rows[0]['d_k']} to {rows[-1]['d_k']}." if len(rows) > 1 else "."
    )


def _tell_softmax(record: Record) -> str:
    d_k, n = choose_size(record)
    cells = cells_of(record)
    none, sqrt = (cells[d_k, n, policy]["effective_keys"] for policy in ("none", "sqrt"))
    crossing = next(row for row in record.tables["crossover"] if row["n"] == n)
    beside = f"a query attends to {name_keys(none)} of {n} keys, with 1/√dₖ to {name_keys(sqrt)}"
    if n == 2:
        return f"Without the division, at dₖ = {d_k}, {beside}."
    first = crossing["concentrated_from"]
    return (
        f"Without the division one or two of {n} keys hold most of the weight from dₖ = {first} on (in the many-key "
        f"limit from 8 ln n = {crossing['nearly_one_hot']:.1f} on): at dₖ = {d_k}, which lies "
        f"{'below' if d_k < first else 'past' if d_k > first else 'at'} that, {beside}."
    )


def _tell_gradients(record: Record) -> str:
    at = find_most_uneven(record)
    cells = cells_of(record)
    none, sqrt = cells[*at, "none"], cells[*at, "sqrt"]
    shares = (
        f"at dₖ = {at[0]}, n = {at[1]} a twentieth of the rows holds {100 * none['top_share']:.0f} % of the squared "
        f"gradient, with 1/√dₖ {100 * sqrt['top_share']:.0f} %"
    )
    if none["top_share"] <= sqrt["top_share"]:
        return f"gradients do not become more uneven ({shares})"
    smaller = "" if none["grad_q_mean"] >= sqrt["grad_q_mean"] else " and smaller"
    return f"gradients become uneven{smaller}{'' if smaller else ' rather than simply vanish'} ({shares})"


def _tell_training(record: Record) -> str:
    losses = losses_of(record)
    named = {setting: name_loss(loss) for setting, loss in losses.items()}
    beside = f"loss {named['none', 'unit']} against {named['sqrt', 'unit']} with 1/√dₖ"
    if not fails_to_learn(record, "none"):
        return f"training without the scale does not fail here ({beside})"
    control = ("none", "absorbed")
    tried = " even at a learning rate of its own" if has_own_rates(record) else ""
    if control in losses and not fails_to_learn(record, *control):
        return f"training fails{tried} ({beside}) unless W_q and W_k start smaller in its place ({named[control]})"
    return f"training fails{tried} ({beside})"


def _tell_widths(record: Record) -> str:
    """The share of runs that learn at each width, without the scale, with it, and with its start and step alone."""
    rows: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(record.tables["best"], key=lambda row: row["d_k"]):
        rows.setdefault((row["scale"], row["init"], row.get("qk_step", "unit")), []).append(row)
    shares = {
        setting: ", ".join(f"{row['solved_fraction']:.0%}" for row in of_setting)
        for setting, of_setting in rows.items()
    }
    none, both = rows["none", "unit", "unit"], ("none", "absorbed", "absorbed")
    fails = all(row["solved_interval"][1] < 0.5 for row in none)
    rates = len(record.spec["lrs"])
    tried = f", each at the best of {rates} learning rates" if rates > 1 else ""
    steps = f"in {record.spec['steps']} steps " if "steps" in record.spec else ""
    told = (
        f"training without the scale {'fails' if fails else 'does not always fail'} at dₖ = "
        f"{', '.join(str(row['d_k']) for row in none)} ({steps}{shares['none', 'unit', 'unit']} of the runs learn, "
        f"with 1/√dₖ {shares['sqrt', 'unit', 'unit']}{tried})"
    )
    if both not in rows:
        return told
    mends = fails and all(row["solved_interval"][0] > 0.5 for row in rows[both])
    start = shares.get(("none", "absorbed", "unit"))
    return (
        f"{told}{', unless' if mends else '; where'} W_q and W_k have its start and its step in another way "
        f"({shares[both]}{f'; its start alone {start}' if start else ''})"
    )
