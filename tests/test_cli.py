"""The command line as a user meets it: tables, JSON, figures, one-line errors, exit codes."""

import json
import subprocess
import sys

import pytest

from sqrtdk.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "table", "columns"),
    [
        (["variance", "--d-k", "4,64", "--samples", "2000"], "variance", {"d_k", "scale"}),
        (["saturation"], "points", {"x"}),
        (["temperature", "--d-k", "16"], "temperature", {"relative", "entropy_ratio"}),
        (["gradients", "--d-k", "64", "--n", "16"], "vanish", {"d_k", "n", "scale", "grad_q_median"}),
        (["explain", "--d-k", "16", "--n", "64"], "explain", {"scale"}),
        (["claims", "soft.5", "op.stable"], "claims", {"id", "source", "claimed", "computed", "verdict", "why"}),
        (["scales"], "scales", {"name", "formula", "source"}),
    ],
)
def test_json_and_tables(capsys, arguments, table, columns):
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    content = json.loads(out)
    assert columns <= content[table][0].keys()
    assert content["schema_version"] == 1
    code, out, err = run(capsys, *arguments)
    assert code == 0
    assert not err
    assert len(out.splitlines()) > 3


def test_ablate_prints_the_agreed_json(capsys, tmp_path):
    line = (
        "ablate --task recall --scale none,sqrt --d-k 16 --seeds 2 --steps 4 --lr 1e-3 --init unit --workers 1 --json"
    )
    arguments = [*line.split(), "--store", str(tmp_path / "runs.sqlite")]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    content = json.loads(out)
    assert len(content["runs"]) == 4
    wanted = {"scale", "d_k", "seed", "init", "lr", "status", "final_loss"}
    assert all(wanted <= run.keys() for run in content["runs"])
    assert {row["scale"] for row in content["summary"]} == {"none", "sqrt"}
    assert {"final_loss_median", "final_loss_iqr", "solved_fraction"} <= content["summary"][0].keys()
    assert "curves" not in content
    _, again, _ = run(capsys, *arguments, "--curves")
    again = json.loads(again)
    assert again["runs"] == content["runs"]
    assert len(again["curves"]["runs"]) == 4


def test_ablate_control_adds_the_absorbed_runs(capsys):
    line = "ablate --scale sqrt --d-k 8 --seeds 1 --steps 2 --workers 1 --control --json"
    code, out, _ = run(capsys, *line.split())
    assert code == 0
    assert {(row["scale"], row["init"]) for row in json.loads(out)["runs"]} == {("sqrt", "unit"), ("none", "absorbed")}


def test_plot_writes_each_format(capsys, tmp_path):
    for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".html", b"<!DOCTYPE html>")):
        path = tmp_path / f"figure{suffix}"
        code, _, err = run(capsys, "saturation", "--plot", str(path))
        assert code == 0
        assert str(path) in err
        assert path.read_bytes().lower().startswith(begin.lower())


def test_markdown(capsys):
    code, out, _ = run(capsys, "claims", "soft.peak", "--markdown")
    assert code == 0
    assert out.splitlines()[0] == "| id | source | claimed | computed | verdict | why |"
    assert "| wrong |" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["claims", "nonsense"], "unknown claim 'nonsense'; known: "),
        (["variance", "--d-k", "4,x"], "--d-k must be whole numbers separated by commas, got '4,x'"),
        (["variance", "--d-k", "0"], "must be at least 1, got 0"),
        (["variance", "--plot", "figure.pdf"], "path must end in .png, .svg, .html, got 'figure.pdf'"),
        (["ablate", "--plot", "no/such/place/a.png"], "path must lie in an existing directory"),
        (["ablate", "--scale", "sqrtt"], "unknown scaling policy 'sqrtt'; known: "),
        (["ablate", "--task", "recal"], "unknown task 'recal'; known: recall, text"),
        (["ablate", "--init", "zeros"], "unknown init 'zeros'; known: "),
        (["ablate", "--lr", "-1"], "lr must be positive and finite"),
        (["ablate", "--seeds", "0"], "--seeds"),
        (["explain", "--n", "1"], "n must be at least 2, got 1"),
        (["report", "--output", "no/such/place/r.html"], "path must lie in an existing directory"),
        (["nosuchcommand"], "nosuchcommand"),
        (["variance", "--nosuchoption"], "--nosuchoption"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert not out
    assert err.startswith("sqrtdk: ")
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_store_that_is_none_of_ours_is_left_alone(capsys, tmp_path):
    store = tmp_path / "notes.txt"
    store.write_text("not a database, but dear to somebody")
    code, _, err = run(capsys, "ablate", "--steps", "1", "--seeds", "1", "--store", str(store))
    assert code == 2
    assert str(store) in err
    assert store.read_text() == "not a database, but dear to somebody"


@pytest.mark.parametrize(
    "command", ["claims", "variance", "saturation", "ablate", "temperature", "gradients", "explain", "report", "scales"]
)
def test_help_has_an_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"sqrtdk {command}" in " ".join(out.split())
    assert "Example" in out


def test_no_arguments_show_the_help(capsys):
    _, out, err = run(capsys)
    assert "ablate" in out + err


@pytest.mark.slow
def test_report_in_a_process_of_its_own(tmp_path):
    page = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "sqrtdk", "report", "--output", str(page), "--seeds", "1", "--steps", "30"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert 5 <= len(done.stdout.splitlines()) <= 16
    assert str(page) in done.stdout
    text = page.read_text()
    assert "soft.peak" in text
    assert "grad.learning" in text


def test_command_starts_without_torch_or_plotly():
    code = (
        "import sys, sqrtdk.cli\n"
        "try: sqrtdk.cli.main(['saturation', '--json'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'plotly', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
