"""The answers of the pages: equal to what the Python interface gives, bounded, and errors in words."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sqrtdk
from scripts import run_script
from sqrtdk import theory
from sqrtdk.audits import read_shipped
from sqrtdk.audits.heat_map import map_heads
from sqrtdk.web import make_app
from sqrtdk.web.audit_view import view_audit
from sqrtdk.web.explore_query import POLICIES
from sqrtdk.web.presets import PRESETS
from web_client import Client

# Presented as data by the page and named in the options.
ROW_MEANS = (
    "saturation_index",
    "entropy_ratio",
    "effective_keys",
    "max_weight",
    "sum_p2",
    "jacobian_trace",
    "jacobian_norm",
)


@pytest.fixture(scope="module")
def client():
    return Client(make_app())


def assert_same_numbers(answer, names):
    """The chosen column holds the numbers of a result of the Python interface, to 1e-12."""
    column = answer["columns"][answer["chosen"]]
    rows, gradients = names["result"].statistics, np.linalg.norm(names["gradients"].query.astype(float), axis=-1)
    expected = {
        **{name: float(rows.mean(name)) for name in ROW_MEANS},
        "jacobian_trace_p5": np.quantile(rows.jacobian_trace, 0.05),
        "grad_q": gradients.mean(),
        "grad_q_median": np.median(gradients),
        "grad_q_p5": np.quantile(gradients, 0.05),
    }
    values = column["values"]
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert column["gradients"] == pytest.approx(gradients.tolist(), rel=1e-12)
    return column


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"d_k": 1, "n": 2},
        {"d_k": 512, "n": 16, "policy": "none"},
        {"d_k": 100, "n": 33, "policy": "inverse", "seed": 7},
        {"n": 64, "policy": "fixed", "parameter": 4, "t": 0.5},
        {"n": 64, "policy": "mup"},
        {"n": 64, "policy": "log_n", "t": 2},
        {"n": 64, "policy": "yarn", "dtype": "float32"},
        {"n": 64, "policy": "cosine", "t": 0.25, "mean_q": 1},
        {"n": 64, "policy": "qk_norm", "t": 3, "dtype": "bfloat16"},
        {"n": 100, "distribution": "uniform", "mean_q": -1.5, "mean_k": 0.5},
        {"n": 100, "distribution": "student", "dtype": "float16"},
        {"n": 100, "distribution": "laplace", "correlation": 0.5},
        {"n": 40, "distribution": "signs", "correlation": -1},
        {"source": "scores", "scores": "14,10,12"},
    ],
    ids=str,
)
def test_an_answer_has_the_numbers_of_the_script_beside_it(client, query):
    reply = client.get("/api/explore", query)
    assert reply.status == 200, reply.json
    names = run_script(reply.json["python"])
    column = assert_same_numbers(reply.json, names)
    q, k = names["q"], names["k"]
    assert (reply.json["n"], reply.json["d_k"]) == (k.shape[0], q.shape[1])
    mean, variance = names["result"].statistics.logit_mean, names["result"].statistics.logit_variance
    pooled = math.sqrt(variance.mean() + mean.var())
    assert column["values"]["logit_std"] == pytest.approx(pooled, rel=1e-12 if q.dtype == np.float64 else 1e-5)


@pytest.mark.parametrize("policy", ["none", "sqrt", "inverse"])
def test_the_three_scalings_stand_beside_any_choice(client, policy):
    beside = client.get("/api/explore", {"n": 50, "policy": "qk_norm"}).json["columns"]
    alone = client.get("/api/explore", {"n": 50, "policy": policy}).json
    assert alone["chosen"] == policy
    assert beside[policy] == alone["columns"][policy]
    assert set(beside) == {"chosen", "none", "sqrt", "inverse"}


@pytest.mark.parametrize(("n", "last"), [(1024, 0.5), (16, None)])
def test_the_many_key_limit_stands_where_its_error_is_known(client, n, last):
    """The error of H/ln n is known up to ρ = ½ for 64 keys or more, and nowhere else."""
    limit = client.get("/api/explore", {"n": n}).json["limit"]
    stated = [rho for rho, ratio in zip(limit["rho"], limit["entropy_ratio"], strict=True) if ratio is not None]
    assert stated == [rho for rho in limit["rho"] if last is not None and rho <= last]


def test_the_variance_formula_stands_beside_the_measurement(client):
    query = {"d_k": 64, "n": 256, "mean_q": 0.5, "mean_k": -1, "policy": "none"}
    column = client.get("/api/explore", query).json["columns"]["none"]
    std = math.sqrt(theory.dot_product_variance(64, mean_q=0.5, mean_k=-1.0))
    assert column["predicted"]["logit_std"] == pytest.approx(std, rel=1e-12)
    assert column["values"]["logit_std"] == pytest.approx(std, rel=0.1)
    histogram = column["histogram"]
    widths = np.diff(histogram["edges"])
    assert (np.array(histogram["density"]) * widths).sum() == pytest.approx(1.0)
    assert np.trapezoid(histogram["predicted"], histogram["at"]) == pytest.approx(1.0, abs=0.02)


def test_the_own_key_is_in_the_prediction_and_in_the_table(client):
    columns = client.get("/api/explore", {"d_k": 256, "n": 8, "correlation": 0.9}).json["columns"]
    sqrt = columns["sqrt"]
    share, own = 1 / 8, math.sqrt(256) * 0.9
    mixed = math.sqrt(1.0 + share * 0.81 + share * (1 - share) * own**2)
    assert sqrt["predicted"]["logit_std"] == pytest.approx(mixed, rel=1e-12)
    assert sqrt["values"]["logit_std"] == pytest.approx(mixed, rel=0.05)
    assert sqrt["values"]["own_weight"] > 0.99 > columns["inverse"]["values"]["own_weight"]


def test_the_exact_averages_are_those_of_the_expectation(client):
    answer = client.get("/api/expected", {"d_k": 4, "n": 16, "policy": "fixed"}).json
    for name, factor in (("chosen", 0.1), ("none", 1.0), ("sqrt", 0.5), ("inverse", 0.25)):
        exact = theory.expected_rows(factor, 4, 16)
        assert answer["columns"][name]["entropy_ratio"] == pytest.approx(exact.entropy_ratio, rel=1e-12)
        assert answer["columns"][name]["jacobian_trace"] == pytest.approx(1.0 - exact.sum_p2, rel=1e-12)
    at = answer["rho"].index(1.0)
    exact = theory.expected_softmax(math.sqrt(2 * math.log(16)), 16)
    assert answer["entropy_ratio"][at] == pytest.approx(exact.entropy_ratio, abs=1e-5)
    assert client.get("/api/expected", {"d_k": 4, "n": 16, "mean_q": 1}).json["columns"] == {}


@pytest.mark.parametrize(
    ("d_k", "n", "sentence"),
    [
        (
            16,
            16,
            "from dₖ = 12 on: one or two keys hold most of the weight. The many-key limit (n → ∞) is 8 ln n = 22.2.",
        ),
        (8, 16, "dₖ = 8 lies below dₖ = 12."),
        (64, 2, "Two keys have Σp² ≥ ½ at every dₖ and every scale."),
    ],
)
def test_the_exact_crossing_and_its_limit_are_said(client, d_k, n, sentence):
    answer = client.get("/api/explore", {"d_k": d_k, "n": n}).json
    assert sentence in answer["reading"][1]
    assert answer["crossover"]["concentrated_from"] == theory.concentration_crossing(n)
    assert "one-hot" not in " ".join(answer["reading"])


def test_the_default_answer_is_quick(client):
    client.get("/api/explore")
    times = [float(re.search(r"dur=([\d.]+)", client.get("/api/explore").header("server-timing"))[1]) for _ in range(5)]
    assert min(times) < 1000.0  # 60 on an idle machine; ten times that is another algorithm, and not a busy core


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.title)
def test_presets_are_settings(client, preset):
    assert client.get("/api/explore", preset.query).status == 200


@pytest.mark.parametrize(
    ("title", "unscaled", "scaled"),
    [
        ("three scores [14, 10, 12]", [0.867, 0.016, 0.117], [0.419, 0.254, 0.326]),
        ("[50, 10, 5] over 10", [1.0, 0.0, 0.0], [0.971, 0.018, 0.011]),
        ("[8.5, −2.1, 7.9]", [0.646, 0.0, 0.354], None),
        ("five scores", [0.599, 0.0, 0.401, 0.0, 0.0], [0.371, 0.080, 0.353, 0.060, 0.136]),
    ],
)
def test_worked_numbers_come_out_as_softmax_has_them(client, title, unscaled, scaled):
    (preset,) = (one for one in PRESETS if one.title == title)
    answer = client.get("/api/explore", preset.query).json
    weights = {name: column["weights"]["by_key"] for name, column in answer["columns"].items()}
    assert np.round(weights["none"], 3).tolist() == unscaled
    if scaled:
        assert np.round(weights["sqrt"], 3).tolist() == scaled
    scores = [float(score) for score in preset.query["scores"].split(",")]
    assert weights["none"] == pytest.approx(sqrtdk.softmax(np.array(scores)).tolist(), rel=1e-12)
    assert ", ".join(f"{weight:.3f}" for weight in weights["none"]) in answer["reading"][1]


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"d_k": 0}, "d_k must be a whole number from 1 to 1024, got 0"),
        ({"d_k": 1025}, "d_k must be a whole number from 1 to 1024, got 1025"),
        ({"d_k": "1e3"}, "d_k must be a whole number from 1 to 1024, got '1e3'"),
        ({"n": 1}, "n must be a whole number from 2 to 8192, got 1"),
        ({"n": 10**30}, "n must be a whole number from 2 to 8192"),
        ({"n": "9" * 5000}, "n must be a whole number from 2 to 8192, got 5000 characters"),
        ({"n": "1_000"}, "n must be a whole number from 2 to 8192, got '1_000'"),
        ({"n": "٣"}, "n must be a whole number from 2 to 8192, got '٣'"),
        ({"t": "nan"}, "t must be a number from 0.1 to 10, got 'nan'"),
        ({"t": "inf"}, "t must be a number from 0.1 to 10, got 'inf'"),
        ({"t": "1e400"}, "t must be a number from 0.1 to 10, got 1e400"),
        ({"correlation": 1.5}, "correlation must be a number from -1 to 1, got 1.5"),
        ({"policy": "sqr"}, "unknown policy 'sqr'; known: cosine, fixed"),
        ({"policy": "fixed", "parameter": 0}, "parameter must be a number from 0.01 to 1000, got 0"),
        ({"distribution": "cauchy"}, "unknown distribution 'cauchy'"),
        ({"dtype": "object"}, "unknown dtype 'object'"),
        ({"source": "scores", "scores": "1"}, "scores must be 2 to 64 numbers separated by commas, got 1"),
        ({"source": "scores", "scores": "1,x"}, "each of scores must be a number from -1000 to 1000, got 'x'"),
        (
            {"source": "scores", "scores": ",".join("1" * 65)},
            "scores must be 2 to 64 numbers separated by commas, got 65",
        ),
        ({"source": "file"}, "unknown source 'file'; known: random, scores"),
        ({"d_kk": 3}, "unknown parameter 'd_kk'; known: claimed, correlation, d_k"),
        ("n=3&n=4", "each parameter must be given once"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_in_words(client, query, told):
    reply = client.get("/api/explore", query)
    assert reply.status == 400
    assert told in reply.json["error"]
    assert reply.header("content-type") == "application/json"


def test_other_paths_and_methods_are_refused_as_json(client):
    for method, path, status in (
        ("GET", "/api/nothing", 404),
        ("GET", "/static/../app.py", 404),
        ("GET", "/static/app.py", 404),
        ("GET", "/audit/", 404),
        ("DELETE", "/api/explore", 405),
        ("POST", "/api/audit", 405),
        ("POST", "/api/explore", 405),
        ("TRACE", "/", 405),
    ):
        reply = client.ask(method, path)
        assert reply.status == status, path
        assert set(reply.json) == {"error"}


def test_a_body_is_not_read(client):
    assert client.ask("POST", "/api/explore", "", bytes(16 * 2**20 + 1)).status == 405
    assert client.ask("GET", "/api/explore", "", b"PK").json == client.get("/api/explore").json


def test_pages_refer_to_files_that_are_there_and_have_no_inline_code(client):
    for path in ("/", "/audit", "/runs"):
        page = client.get(path)
        text = page.body.decode()
        assert page.header("content-type") == "text/html; charset=utf-8"
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", text)
        for target in re.findall(r'(?:src|href)="(/static/[^"]+)"', text):
            assert client.get(target).status == 200, target
        labelled = set(re.findall(r'for="([^"]+)"', text))
        fields = re.findall(r"<(?:input|select)[^>]*\sid=\"([^\"]+)\"", text)
        wrapped = re.findall(r"<label><input[^>]*\sid=\"([^\"]+)\"", text)
        assert set(fields) <= labelled | set(wrapped)


def test_scripts_write_text_and_never_markup():
    folder = Path(sqrtdk.__file__).parent / "web" / "static"
    shared = [*(folder.parent.parent / "report").glob("*.js"), folder.parent.parent / "wording" / "numbers.js"]
    scripts = [*folder.glob("*.js"), *shared]
    assert len(scripts) >= 5
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            script
        )
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (folder / name).exists() or name in [file.name for file in shared]


def test_files_are_asked_for_again_and_not_sent_again(client):
    first = client.get("/static/plotly.min.js")
    again = client.get("/static/plotly.min.js", if_none_match=first.header("etag"))
    assert (first.status, again.status, again.body) == (200, 304, b"")
    assert first.header("cache-control") == "private, no-cache"


def test_options_name_what_can_be_asked(client):
    options = client.get("/api/options").json
    assert [one["name"] for one in options["policies"]] == list(POLICIES)
    assert set(POLICIES) == set(sqrtdk.scales.names()) - {"temperature", "llama4"}
    known = {quantity["key"] for quantity in options["quantities"]}
    answer = client.get("/api/explore", {"n": 8, "correlation": 0.5}).json
    assert set(answer["columns"]["none"]["values"]) == known
    assert all(quantity["formula"] and quantity["meaning"] for quantity in options["quantities"])


def test_the_audit_page_has_the_shipped_audit(client):
    answer = client.get("/api/audit").json
    shipped = read_shipped("minilm")
    assert {name: answer[name] for name in shipped.as_json()} == shipped.as_json()
    assert answer["reading"] == shipped.reading
    assert answer["pattern_counts"] == dict(shipped.pattern_counts)


def test_an_audit_of_ones_own_is_read_again_for_each_visit(tmp_path):
    file = tmp_path / "audit.json"
    content = read_shipped("minilm").as_json()
    file.write_text(json.dumps(content))
    client = Client(make_app(audit=file))
    content["about"]["source"] = "another"
    file.write_text(json.dumps(content))
    assert client.get("/api/audit").json["about"]["source"] == "another"
    file.write_text("{}")
    reply = client.get("/api/audit")
    assert (reply.status, "got one without heads" in reply.json["error"]) == (400, True)


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"heads": 3}', "\x00", '{"about": []}', "[" * 10**5])
def test_a_file_that_is_no_audit_is_refused_at_the_start(tmp_path, content):
    file = tmp_path / "audit.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(sqrtdk.SqrtdkError, match=r"audit must be what `sqrtdk audit --json` prints, got .*audit\.json"):
        make_app(audit=file)


def test_the_map_of_heads_is_that_of_every_other_medium():
    shipped = read_shipped("minilm")
    # A layer with one head less than the others, and a model that is itself a layer.
    heads = [replace(head, layer="") if head.layer_index == 0 else head for head in shipped.heads[:-1]]
    audit = replace(shipped, heads=heads)
    rows = view_audit(audit)["map"]
    for row, expected in zip(rows, map_heads(audit), strict=True):
        assert row["name"] == expected.name
        assert [cell and audit.heads[cell["head"]] for cell in row["cells"]] == [
            cell and cell.head for cell in expected.cells
        ]
        assert [cell and cell["pattern"] for cell in row["cells"]] == [cell and cell.pattern for cell in expected.cells]
    assert rows[-1]["cells"][-1] is None
