"""The first screen in Python: its numbers follow the variance formula, and its words come from the glossary."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from sqrtdk import softmax
from sqrtdk.report.cause import D_KS, KEYS, START, measure_cause, render_cause, say_cause
from sqrtdk.report.counter import sample_normal
from sqrtdk.report.shell import wrap_page
from sqrtdk.report.try_it import TryIt
from sqrtdk.wording.glossary import GLOSSARY, explain_terms, find_meaning

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("d_k", [1, 64, 256])
def test_numbers_are_those_of_sixteen_dot_products(d_k, divided):
    q = sample_normal(1, d_k, seed=START.seed)[0]
    dots = sample_normal(KEYS, d_k, seed=START.seed, first_row=2) @ q / (math.sqrt(d_k) if divided else 1.0)
    measured = measure_cause(TryIt(d_k=d_k, n=KEYS, seed=START.seed), divided)
    weights = softmax(dots)
    expected = {"spread": dots.std(), "max_weight": weights.max(), "effective_keys": 1 / (weights**2).sum()}
    assert measured == pytest.approx(expected, rel=1e-9)


def test_the_spread_grows_as_the_root_over_many_samples():
    seeds = range(200)
    spreads = {
        d_k: np.mean([measure_cause(TryIt(d_k=d_k, n=KEYS, seed=seed), divided=False)["spread"] ** 2 for seed in seeds])
        for d_k in (4, 64)
    }
    # The variance of 16 numbers is 15/16 of that of their distribution.
    for d_k, variance in spreads.items():
        assert variance == pytest.approx(d_k * 15 / 16, rel=0.15)


def test_the_start_is_typical():
    for d_k in (4, 16, 64):
        assert d_k in D_KS
        spread = measure_cause(TryIt(d_k=d_k, n=KEYS, seed=START.seed), divided=False)["spread"]
        assert spread == pytest.approx(math.sqrt(d_k), rel=0.1)


def test_sentences_and_numbers_stand_without_a_script():
    html = render_cause()
    assert html.count("<li>") == 3
    assert say_cause(START, divided=False) in html
    assert set(re.findall(r'class="term"[^>]*>([^<]+)<', html)) == {
        *("dot product", "query", "key", "dₖ", "spread", "Softmax"),
    }
    for word in ("dot product", "query", "softmax"):
        assert f'data-meaning="{find_meaning(word)}"' in html


def test_a_term_is_marked_once_and_never_inside_a_word():
    marked = explain_terms("a monkey and keyboards have keys; a key has weight", ["key", "weight", "gradient"])
    assert re.findall(r"data-meaning=[^>]*>([^<]+)<", marked) == ["keys", "weight"]


@pytest.mark.tree
def test_the_page_of_the_docs_is_the_glossary():
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = {term: re.sub(r" \(\[.*\]\(.*\)\)", "", meaning) for term, meaning in rows if term not in ("term", "---")}
    assert told == GLOSSARY


def test_scripts_stand_once_each_and_after_what_they_use():
    page = wrap_page("t", "", ["cause.js", "try_it.js"])
    heads = ["// Numbers as text", "// One query among n keys", "// Small charts", "// First screen", "// Sliders of"]
    places = [page.index(head) for head in heads]
    assert places == sorted(places)
    assert all(page.count(head) == 1 for head in heads)
    assert not re.search(r"^(import|export) ", page[places[0] :], re.MULTILINE)
