"""Questions of the report: the right guess follows from the numbers, and no question is asked without one."""

import json
import re
from dataclasses import replace
from html import unescape

import pytest

from example_records import every_kind, make_ablation, make_claims
from sqrtdk.exercises import concentration, gradients, temperature, variance
from sqrtdk.report import questions, render_report
from sqrtdk.report.cause import START, measure_cause
from sqrtdk.report.chapters import Material
from sqrtdk.report.guess import ask_choice, ask_number, list_sizes, render_question
from sqrtdk.report.story_figures import cells_of
from sqrtdk.wording.guesses import compare_number

SECTIONS = ("answer", "variance", "saturation", "training", "gradients", "inverse", "temperature", "models", "claims")


def change(record, table, wanted, **values):
    """The same record with other values in the rows that have the wanted ones."""
    rows = [{**row, **(values if wanted.items() <= row.items() else {})} for row in record.tables[table]]
    return replace(record, tables={**record.tables, table: rows})


def test_each_main_section_asks_one_question_before_its_text():
    page = render_report(every_kind())
    asked = re.findall(r'<div class="guess" id="guess-(\w+)"', page)
    assert asked == list(SECTIONS)
    for name in SECTIONS[1:]:
        section = page[page.index(f'<section id="{name}">') :]
        assert re.match(rf'<section id="{name}"><h2>[^<]*</h2><div class="guess" id="guess-{name}"', section)


def test_without_a_script_question_and_answer_are_there():
    html = render_question("x", ask_choice("Is 1/√dₖ less?", ("more", "less"), "less", "It is <less>."))
    assert "<details><summary>The computed answer</summary><p>It is &lt;less&gt;.</p></details>" in html
    assert "style=" not in html, "the local pages' policy refuses styles in the markup"
    assert render_question("x", None) == ""


@pytest.mark.parametrize("computed", [1.0, 37.0, 5000.0])
def test_every_place_of_a_slider_has_its_reply(computed):
    question = ask_number("How many?", "keys", list_sizes(1024), computed, "So many.")
    html = render_question("x", question)
    replies = json.loads(unescape(re.search(r'data-replies="([^"]*)"', html)[1]))
    values = [float(value) for value in re.search(r'data-values="([^"]*)"', html)[1].split(",")]
    assert replies == [compare_number(value, computed) for value in values]
    assert values[0] == 1
    assert values[-1] >= 1024


def test_the_first_question_asks_for_the_number_of_the_first_screen():
    question = questions.ask_about_cause()
    weight = measure_cause(START, divided=False)["max_weight"]
    assert question.replies[0.5] == compare_number(0.5, weight)


def test_numbers_are_those_of_the_records():
    record = concentration(d_ks=(1, 64), ns=(16,), budget=1024, seed=0)
    cells = cells_of(record)
    for ask, policy in ((questions.ask_about_keys, "none"), (questions.ask_about_inverse, "inverse")):
        assert ask(record).replies[4] == compare_number(4, cells[64, 16, policy]["effective_keys"])
        other = change(record, "concentration", {"d_k": 64, "n": 16, "scale": policy}, effective_keys=4.0)
        assert ask(other).replies[4] == "Your guess, 4, is close: 4 is computed."
    (row,) = record.tables["crossover"]
    assert questions.ask_about_saturation(record).replies[32] == compare_number(32, row["concentrated_from"])
    assert "With" not in questions.ask_about_saturation(record).answer


def test_two_keys_are_concentrated_at_every_size_so_nothing_is_asked():
    assert questions.ask_about_saturation(concentration(d_ks=(1, 64), ns=(2,), budget=1024, seed=0)) is None


def test_the_growth_of_the_spread_decides():
    record = variance(d_ks=(4, 64), samples=1000, seed=0)
    assert questions.ask_about_variance(record).right == "4 times as far"
    for measured, right in ((2.0, "as far as before"), (32.0, "16 times as far"), (500.0, "256 times as far")):
        other = change(record, "variance", {"d_k": 64, "scale": "none"}, measured=measured)
        other = change(other, "variance", {"d_k": 4, "scale": "none"}, measured=2.0)
        assert questions.ask_about_variance(other).right == right
    unclear = change(record, "variance", {"d_k": 64, "scale": "none"}, measured=14.0)
    assert questions.ask_about_variance(unclear) is None
    assert questions.ask_about_variance(variance(d_ks=(64,), samples=1000)) is None


def test_gradients_differ_only_if_their_intervals_do_not_overlap():
    record = gradients(d_ks=(16,), ns=(8,), budget=1024, seed=0)
    cell = {"d_k": 16, "n": 8, "scale": "none"}
    sqrt = cells_of(record)[16, 8, "sqrt"]
    for low, high, right in (
        (0.1, sqrt["grad_q_low"] / 2, "smaller"),
        (2 * sqrt["grad_q_high"], 99.0, "larger"),
        (0.1, sqrt["grad_q_low"] * 1.001, "no clear difference"),
    ):
        changed = change(record, "vanish", cell, grad_q_low=low, grad_q_high=high)
        assert questions.ask_about_gradients(changed).right == right


@pytest.mark.parametrize(("share", "right"), [(0.0, "none of them"), (1 / 3, "some of them"), (1.0, "all of them")])
def test_solved_runs_are_counted(share, right):
    record = change(make_ablation(), "best", {"scale": "none"}, solved_fraction=share)
    question = questions.ask_about_training(Material({"ablation": record}))
    assert question.right == right
    assert f"{round(3 * share)} of 3 runs solve" in question.answer


def test_training_without_a_comparison_asks_nothing():
    record = make_ablation()
    best = [row for row in record.tables["best"] if row["scale"] != "sqrt"]
    lonely = replace(record, tables={**record.tables, "best": best})
    assert questions.ask_about_training(Material({"ablation": lonely})) is None
    assert questions.ask_about_training(Material({})) is None


def test_the_sharpest_temperature_is_asked_for():
    record = temperature(samples=8, queries=4, n=8, seed=0)
    keys = {row["relative"]: row["effective_keys"] for row in record.tables["temperature"]}
    assert questions.ask_about_temperature(record).replies[4] == compare_number(4, keys[0.5])
    rows = [row for row in record.tables["temperature"] if row["relative"] != 1]
    assert questions.ask_about_temperature(replace(record, tables={"temperature": rows})) is None


@pytest.mark.parametrize(
    ("holds", "right"), [(0, "fewer than half"), (2, "half or more, but not all"), (3, "all of them")]
)
def test_claims_and_families_are_counted(holds, right):
    record = make_claims()
    rows = [{**record.tables["claims"][0], "verdict": "holds" if at < holds else "wrong"} for at in range(3)]
    question = questions.ask_about_claims(replace(record, tables={"claims": rows}))
    assert question.right == right
    assert question.answer.startswith(f"{holds} of 3 hold")
    families = [{"measured": 0.125 if at < holds else 1.0, "d_k": 64} for at in range(3)]
    families.append({"measured": None, "d_k": 64})
    zoo = replace(every_kind()["zoo"], tables={"families": families})
    assert questions.ask_about_models(zoo).right == right
    assert questions.ask_about_models(replace(zoo, tables={"families": families[3:]})) is None
