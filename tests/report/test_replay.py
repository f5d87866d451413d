"""The replay in Python: runs of one seed, sentences from their maps, and a picture where no script runs."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from example_records import make_ablation, make_maps
from sqrtdk.records.maps import pack, unpack
from sqrtdk.report import render_report
from sqrtdk.report.replay import choose_runs, draw_map, read_replay, render_replay, say_run


@pytest.fixture(scope="module")
def runs():
    return choose_runs(make_ablation())


def change(run, **changes):
    return {**run, "maps": {**run["maps"], **changes}}


def test_runs_are_the_first_seeds_of_the_three_scalings_at_their_learning_rates(runs):
    assert [run["policy"] for run in runs] == ["no scaling", "1/√dₖ", "1/dₖ"]
    record = make_ablation(lrs=(1e-4, 1e-3), inits=("unit", "rescaled"), d_ks=(16, 64))
    chosen = choose_runs(record)
    assert [run["name"] for run in chosen] == [
        f"{name}, learning rate 0.001" for name in ("no scaling", "1/√dₖ", "1/dₖ")
    ]
    for run, scale in zip(chosen, ("none", "sqrt", "inverse"), strict=True):
        own = [
            one
            for one in record.curves["runs"]
            if (one["scale"], one["seed"], one["init"], one["d_k"]) == (scale, 0, "unit", 64)
        ]
        assert run["loss"] == pytest.approx(own[0]["loss"], rel=1e-3)


def test_sentences_say_when_all_queries_are_right_or_what_they_look_at(runs):
    assert read_replay(runs) == (
        "With no scaling 1 of 4 queries looks at the right value at step 60, and 3 of 4 look at one and the same key. "
        "With 1/√dₖ all 4 queries look at the right value from step 30 on. "
        "With 1/dₖ 0 of 4 queries look at the right value at step 60."
    )


def test_sentences_follow_the_maps_and_not_the_policy(runs):
    none, sqrt, _ = runs
    learned = change(none, weights=sqrt["maps"]["weights"])
    assert read_replay([learned]) == "With no scaling all 4 queries look at the right value from step 30 on."
    lost = change(sqrt, weights=[*sqrt["maps"]["weights"][:-1], none["maps"]["weights"][0]])
    assert "from step" not in read_replay([lost]), "what is lost in the end was not learned"
    spread = change(none, weights=[pack(np.eye(12)[[2, 5, 4, 2]])] * 7)
    assert read_replay([spread]) == "With no scaling 0 of 4 queries look at the right value at step 60."


@pytest.mark.parametrize(("step", "right"), [(0, 0), (29, 0), (30, 4), (60, 4), (99, 4)])
def test_the_line_below_a_map_is_of_the_last_point_and_the_last_map(runs, step, right):
    run = runs[1]
    last = max(at for at in run["step"] if at <= step)
    assert say_run(run, step).endswith(f", right value: {right} of 4 queries")
    assert float(re.search(r"loss (\S+),", say_run(run, step))[1]) == pytest.approx(
        run["loss"][run["step"].index(last)], rel=5e-3
    )
    assert say_run(change(run, right=[]), step).count("queries") == 0


def test_a_drawn_map_has_a_cell_per_weight_and_marks_the_right_key(runs):
    maps = runs[1]["maps"]
    svg = draw_map(maps, -1, "#123456", "<label>")
    drawn = [float(value) for value in re.findall(r'fill="#123456" fill-opacity="([\d.]+)"', svg)]
    weights = unpack(maps, -1)
    np.testing.assert_allclose(drawn, weights[weights > 0] / 255, atol=5e-4)
    assert svg.count('class="mark"') == 4
    assert "D→N" in svg
    assert "<label>" not in svg


def test_the_still_picture_and_the_data_are_in_the_page(runs):
    page = render_replay(runs)
    assert page.count("<figure>") == len(runs) + 1, "and one in the template"
    assert page.count('class="mark"') == 3 * 4
    assert all(say_run(run, 60) in page for run in runs)
    data = re.search(r'id="recorded-replay">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data) == json.loads(json.dumps(runs))


def test_without_maps_the_section_is_left_out():
    record = make_ablation()
    bare = replace(record, curves={"runs": record.curves["runs"]})
    assert choose_runs(bare) == []
    assert 'id="learning"' in render_report([record])
    page = render_report([bare])
    assert 'id="learning"' not in page
    assert "showReplay" not in page
    assert 'href="#learning"' not in page


def test_symbols_are_text_and_never_markup():
    record = make_ablation()
    maps = {**make_maps("sqrt"), "tokens": ["</script><b>"] * 12}
    named = [{**one, **maps} for one in record.curves["maps"]]
    page = render_report([replace(record, curves={**record.curves, "maps": named})], only=["learning"])
    section = page[page.index('<section id="learning">') : page.index('<section id="making">')]
    assert "<b>" not in section
    assert section.count("</script>") == 1
