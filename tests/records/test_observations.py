"""Files of a training monitor, read and drawn."""

import json
import math

import pytest

from sqrtdk.commands.cli import main
from sqrtdk.errors import InvalidValueError
from sqrtdk.records.observations import read_observations
from sqrtdk.report.monitor_figures import show_monitor
from sqrtdk.report.panels import Heatmap, Points


def observation(step, alerts=(), **layers):
    numbers = {
        name: {"entropy_ratio": ratios, "score_spread": [10.0 * ratio for ratio in ratios], "max_logit": ratios}
        for name, ratios in layers.items()
    }
    return {"step": step, "layers": numbers, "alerts": list(alerts)}


def alert(step, state="raised", heads=(1,), layer="a"):
    return {
        "step": step,
        "state": state,
        "severity": "error",
        "rule": "r",
        "layer": layer,
        "heads": heads,
        "cause": "c",
    }


def write(path, *observations, tail=""):
    path.write_text("".join(json.dumps(one) + "\n" for one in observations) + tail, encoding="utf-8")
    return path


def test_heads_over_steps(tmp_path):
    path = write(
        tmp_path / "heads.jsonl",
        observation(0, a=[1.0, 0.5], b=[0.25]),
        observation(5, a=[0.75, 0.125]),
        observation(9, [alert(9), alert(9, heads=(), layer="b"), alert(9, "cleared", (0,))], a=[0.5, 0.0], b=[0.5]),
        tail='{"step": 10, "lay',
    )
    record = read_observations(path)
    assert record.curves["steps"] == [0, 5, 9]
    assert record.curves["layers"]["b"]["entropy_ratio"] == [[0.25], [None], [0.5]]
    assert record.reading == ["3 observations from step 0 to 9 of 2 layers with 3 heads: 2 alerts from step 9 on."]
    figure = show_monitor(record)
    heat, marks = figure.panels[0].series
    assert isinstance(heat, Heatmap)
    assert heat.z[0] == (1.0, 0.75, 0.5)
    assert math.isnan(heat.z[2][1])
    assert isinstance(marks, Points)
    assert set(zip(marks.x, marks.y, strict=True)) == {(2.0, 1.0), (2.0, 2.0)}
    spreads = figure.panels[1].series[0]
    assert spreads.z[0] == (1.0, math.log10(7.5), math.log10(5.0))
    assert spreads.z[1][2] == 0.0  # from 1 on


def test_steps_that_were_repeated_count_once(tmp_path):
    path = write(tmp_path / "x.jsonl", observation(4, a=[0.1]), observation(8, a=[0.2]), observation(4, a=[0.3]))
    record = read_observations(path)
    assert record.curves["layers"]["a"]["entropy_ratio"] == [[0.3], [0.2]]
    assert record.reading[0].endswith("of 1 layer with 1 head: no alert.")
    assert len(show_monitor(record).panels[0].series) == 1


@pytest.mark.parametrize(
    ("text", "says"), [("", "without observations"), ("[]\n{}\n", "line 1 is no"), ('{"a": 1}', "line 1 is no")]
)
def test_other_files_are_refused(tmp_path, text, says):
    path = tmp_path / "other.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidValueError, match=says):
        read_observations(path)


@pytest.mark.slow
def test_the_command_draws_it(tmp_path, capsys):
    path = write(tmp_path / "heads.jsonl", observation(0, a=[1.0, 0.5]), observation(5, [alert(5)], a=[0.75, 0.1]))
    with pytest.raises(SystemExit) as caught:
        main(["plot", str(path), str(tmp_path / "run.svg")])
    assert caught.value.code in (None, 0)
    assert "2 observations from step 0 to 5" in (tmp_path / "run.svg").read_text(encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text("no", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["plot", str(tmp_path / "bad.jsonl"), str(tmp_path / "run.svg")])
    assert caught.value.code == 2
    assert "SOURCE must be a file that Monitor wrote" in capsys.readouterr().err
