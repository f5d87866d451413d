"""The command line as a user meets it: tables, JSON, figures, one-line errors, exit codes."""

import io
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import typer
from rich.console import Console

import sqrtdk
from sqrtdk import attention, exercises, scales
from sqrtdk.audits import read_shipped
from sqrtdk.commands import terminal
from sqrtdk.commands.cli import app, main
from sqrtdk.commands.options import name_options
from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.lab import CONTROLS, RunSpec, Store
from sqrtdk.records.record import Record
from sqrtdk.show import progress


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


@pytest.mark.slow
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
        (["info"], "backends", {"name", "runs_here", "in_use", "about"}),
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
    assert not [line for line in err.splitlines() if " s)" not in line]  # a slow machine sees progress
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


@pytest.mark.slow
def test_a_figure_is_drawn_again_without_computing(capsys, tmp_path, monkeypatch):
    store, printed = tmp_path / "runs.sqlite", tmp_path / "saturation.json"
    line = "ablate --d-k 8 --seeds 2 --steps 4 --workers 1 --json"
    code, out, _ = run(capsys, *line.split(), "--store", str(store), "--plot", str(tmp_path / "first.png"))
    assert code == 0
    printed.write_text(run(capsys, "saturation", "--json")[1], encoding="utf-8")
    monkeypatch.setattr("sqrtdk.lab.laboratory.Lab.run", lambda *_: pytest.fail("nothing may be trained"))
    code, _, err = run(capsys, "plot", str(store), str(tmp_path / "again.png"))
    assert (code, err.strip()) == (0, f"figure written to {tmp_path / 'again.png'}")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "first.png").read_bytes()
    assert run(capsys, "plot", str(printed), str(tmp_path / "saturation.svg"))[0] == 0
    with Store(store) as opened:
        (record,) = opened.records()
    content = json.loads(out)
    assert record == replace(Record.from_json(content), curves=record.curves)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (None, None, "SOURCE must be a file"),
        ("{}", None, "SOURCE must be what --json prints"),
        ("{ not json", None, "SOURCE must be what --json prints"),
        ("notes", None, "SOURCE must be a SQLite file made by sqrtdk"),
        ("", "swap", "SOURCE must hold a record of kind 'swap', got none"),
    ],
)
def test_a_source_without_a_figure_is_refused_in_one_line(capsys, tmp_path, source, kind, message):
    path = tmp_path / "source"
    if source is not None:
        path.write_text(source)
    options = [] if kind is None else ["--kind", kind]
    code, _, err = run(capsys, "plot", str(path), str(tmp_path / "a.svg"), *options)
    assert code == 2
    assert err.startswith(f"sqrtdk: {message}")


@pytest.mark.slow
def test_ablate_shows_what_was_learned(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    line = "ablate --scale sqrt,learned,query,qk_norm --d-k 8 --seeds 1 --steps 3 --workers 1"
    code, out, _ = run(capsys, *line.split())
    assert code == 0
    words = " ".join(out.split())
    assert "τ/√dₖ by layer" in words
    assert "query (dₖ = 8, lr 0.001): τ/√dₖ went from 1 to" in words
    code, out, _ = run(capsys, *line.split(), "--json")
    rows = json.loads(out)["runs"]
    assert [len(row["temperatures"]) for row in rows if row["scale"] != "sqrt"] == [2, 2, 2]
    code, out, _ = run(capsys, *line.replace(",learned,query,qk_norm", "").split())
    assert "τ" not in out


def test_scales_lists_those_that_learn_with_their_module(capsys):
    _, out, _ = run(capsys, "scales", "--json")
    modules = {row["name"]: row["module"] for row in json.loads(out)["scales"] if row["module"]}
    assert modules == {
        "learned": "LearnedTemperature",
        "query": "QueryTemperature",
        "position": "QueryTemperature",
        "qk_norm": "QKNorm",
    }


@pytest.mark.slow
def test_ablate_control_adds_the_controls(capsys):
    line = "ablate --scale sqrt --d-k 8 --seeds 1 --steps 2 --workers 1 --control --json"
    code, out, _ = run(capsys, *line.split())
    assert code == 0
    trained = {(row["scale"], row["init"], row["qk_step"]) for row in json.loads(out)["runs"]}
    assert trained == {("sqrt", "unit", "unit"), *CONTROLS}


@pytest.mark.slow
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
    assert "S3 “Section 5.3: Scaled Attention: Why √d Matters”" in out


END = "-- end of command --"
RUN_COMMANDS = f"""
import sys
from sqrtdk.commands.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as ended:
        print(ended.code or 0, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        print({END!r}, file=stream, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_any_encoding_is_written(encoding):
    lines = ["scales", "claims soft.exp var.dot", "claims soft.peak --markdown", "--help", "variance --d-k √"]
    done = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, *lines],
        capture_output=True,
        check=True,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    outputs, errors = (stream.decode(encoding).split(END)[:-1] for stream in (done.stdout, done.stderr))
    for line, out, err in zip(lines, outputs, errors, strict=True):
        *told, code = err.strip().splitlines()
        assert code == ("2" if "√" in line else "0"), (line, told)
        assert "Traceback" not in err
        text = out + "\n".join(told)
        assert "sqrt" in text, line
        assert text.count("?") <= 1, line  # every letter has a spelling; one stands in the title of a text


@pytest.mark.slow
def test_json_is_the_same_in_any_encoding():
    result = []
    for encoding in ("utf-8", "ascii", "latin-1"):
        done = subprocess.run(
            [sys.executable, "-m", "sqrtdk", "saturation", "--json"],
            capture_output=True,
            check=True,
            timeout=60,
            env=os.environ | {"PYTHONIOENCODING": encoding},
        )
        result.append(json.loads(done.stdout.decode(encoding)))
    assert result[0] == result[1] == result[2]


@pytest.mark.parametrize("columns", [None, 80, 200])
def test_a_pipe_is_as_wide_as_columns_says(capsys, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run(capsys, "claims", "soft", "--no-training")
    widest = max(map(len, out.splitlines()))
    assert 0.9 * (columns or 120) < widest <= (columns or 120)
    assert "source" in out.splitlines()[1]


def test_nothing_written_for_the_help_vanishes_from_it(capsys):
    for command in typer.main.get_command(app).commands.values():
        _, out, _ = run(capsys, command.name, "--help")
        words = " ".join(out.replace("│", " ").split())
        source = command.callback.__doc__.strip().splitlines()[0]
        assert source in words
        for option in command.params:
            assert " ".join((option.help or "").split()) in words


def test_claims_are_listed_without_being_checked(capsys):
    code, out, _ = run(capsys, "claims", "soft", "grad.vanish", "--list", "--json")
    ids = [row["id"] for row in json.loads(out)["claims"]]
    assert code == 0
    assert {"soft.peak", "grad.vanish"} <= set(ids)
    assert all(one.startswith(("soft.", "grad.vanish")) for one in ids)
    assert run(capsys, "claims", "nonsense", "--list")[0] == 2
    assert run(capsys, "claims", "op", "--list", "--markdown")[1].startswith("| id | source | claimed |")


@pytest.mark.slow
def test_an_audit_is_plotted_from_its_json(capsys, tmp_path):
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(read_shipped("minilm").as_json()))
    assert run(capsys, "plot", str(path), str(tmp_path / "heads.svg"))[0] == 0
    assert (tmp_path / "heads.svg").stat().st_size > 1000
    path.write_text('{"heads": 1}')
    code, _, err = run(capsys, "plot", str(path), str(tmp_path / "heads.svg"))
    assert (code, err.startswith("sqrtdk: SOURCE must be what `sqrtdk audit --json` prints")) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["variance", "temperature", "gradients", "explain", "concentration"])
def test_long_commands_say_so_without_a_terminal(capsys, monkeypatch, name):
    compute = getattr(exercises, name)

    def compute_slowly(*arguments, **options):
        time.sleep(0.1)
        return compute(*arguments, **options)

    monkeypatch.setattr(exercises, name, compute_slowly)
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.01)
    code, out, err = run(capsys, name, "--d-k", "4", "--json")
    assert code == 0
    json.loads(out)
    assert re.match(r"sqrtdk: (measuring|sampling) .*\d s\)\n", err)


def test_short_commands_say_nothing_without_a_terminal(capsys):
    assert run(capsys, "saturation")[2] == ""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a shell that closes streams")
def test_closed_streams_are_no_traceback():
    command = f"{shlex.quote(sys.executable)} -m sqrtdk scales"
    closed = subprocess.run(f"exec {command} >&-", shell=True, capture_output=True, text=True, check=False)
    assert closed.returncode == 1
    assert closed.stderr == (
        "sqrtdk: standard output must be open, got a closed one; give > /dev/null if nothing is wanted\n"
    )
    silent = subprocess.run(f"exec {command} --json 2>&-", shell=True, capture_output=True, text=True, check=False)
    assert silent.returncode == 0
    assert json.loads(silent.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["claims", "nonsense"], "unknown claim 'nonsense'; `sqrtdk claims --list` lists them"),
        (["claims", "soft.pek"], "; did you mean 'soft.peak'?"),
        (["variance", "--d-k", "4,x"], "--d-k must be whole numbers separated by commas, got '4,x'"),
        (["variance", "--d-k", "0"], ": each of --d-k must be at least 1, got 0"),
        (["variance", "--samples", "5"], ": --samples must be at least 1000, got 5"),
        (["variance", "--plot", "figure.pdf"], ": --plot must end in .png, .svg, .html, got 'figure.pdf'"),
        (["temperature", "--relative", "0"], ": each of --relative must be positive and finite, got 0.0"),
        (["gradients", "--n", "1"], ": each of --n must be at least 2, got 1"),
        (["ablate", "--plot", "no/such/place/a.png"], ": --plot must lie in an existing directory"),
        (["ablate", "--scale", "sqrtt"], ": --scale: unknown scaling policy 'sqrtt'; known: "),
        (
            ["ablate", "--task", "recal"],
            ": --task: unknown task 'recal'; known: digits, recall, text; did you mean 'recall'?",
        ),
        (["ablate", "--init", "zeros"], ": --init: unknown init 'zeros'; known: "),
        (["ablate", "--lr", "-1"], ": --lr must be positive and finite"),
        (["ablate", "--heads", "3"], ": --d-model must be a multiple of --heads (3), got 64"),
        (["ablate", "--store", "no/such/place/r.sqlite"], ": --store must lie in a folder that exists"),
        (["ablate", "--seeds", "0"], "--seeds"),
        (["explain", "--n", "1"], ": --n must be at least 2, got 1"),
        (["explain", "--n", "1000000000"], ": --n times --d-k must not exceed 67108864, got 64000000000"),
        (["report", "--output", "no/such/place/r.html"], ": --output must lie in an existing directory"),
        (["report", "--output", "report.png"], ": --output must end in .html, got 'report.png'"),
        (["claims", "op", "--json", "--markdown"], "--json and --markdown exclude each other"),
        (
            ["claims", "grad.learning", "--no-training"],
            ": IDS must name a claim that needs no training, got grad.learning",
        ),
        (["variance", "--d-k", "100000000000"], ": --d-k must not exceed 67108864, got 100000000000"),
        (["saturation", "--zeros", "100000000"], ": --zeros must be from 1 to 1000000, got 100000000"),
        (["audit", ".", "--text", "/dev/zero"], ": --text must be a file with text in UTF-8, got /dev/zero (the file"),
        (["serve", "--audit", "/dev/zero"], ": --audit must be what `sqrtdk audit --json` prints, got /dev/zero"),
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


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: exercises.variance(d_ks=(0,)), "d_ks"),
        (lambda: exercises.temperature(relatives=(-1.0,)), "relatives"),
        (lambda: exercises.explain(n=10**9), "n·d_k"),
        (lambda: scales.get("sqrtt"), "scale"),
        (lambda: RunSpec(heads=3), "d_model"),
        (lambda: RunSpec(task="recal"), "task"),
        (lambda: attention(*np.zeros((3, 2, 2)), softcap=-1.0), "softcap"),
    ],
)
def test_errors_carry_their_argument(call, argument):
    with pytest.raises(SqrtdkError) as raised:
        call()
    assert raised.value.argument == argument
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (type(copied), str(copied), copied.argument) == (type(raised.value), str(raised.value), argument)
    assert SqrtdkError("no argument").argument is None


def test_a_quoted_message_keeps_its_words():
    """Only the argument of an error is renamed, not a word of its message that happens to be an option's name."""
    error = InvalidValueError("steps of each run must be seeds, got n")
    assert name_options(error, ["--steps", "--seeds", "--n"]) == str(error)
    error = InvalidValueError("n", "must be at least 2, got n of steps")
    assert name_options(error, ["--steps", "--n"]) == "--n must be at least 2, got n of steps"


def test_a_foreign_sqlite_file_is_left_alone(capsys, tmp_path):
    store = tmp_path / "notes.txt"
    store.write_text("not a database, but dear to somebody")
    code, _, err = run(capsys, "ablate", "--steps", "1", "--seeds", "1", "--store", str(store))
    assert code == 2
    assert str(store) in err
    assert store.read_text() == "not a database, but dear to somebody"


@pytest.mark.parametrize(
    "command",
    ["claims", "variance", "saturation", "ablate", "temperature", "gradients", "explain", "report", "scales", "info"],
)
def test_help_has_an_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"sqrtdk {command}" in " ".join(out.split())
    assert "Example" in out


def test_no_arguments_show_the_help(capsys):
    _, out, err = run(capsys)
    assert "ablate" in out
    assert not err


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"python [\d.]+, sqrtdk [\d.]+, numpy [\d.]+.*\n", out)


def test_a_file_that_cannot_be_written_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    code, _, err = run(capsys, "saturation", "--plot", str(tmp_path / "a.png"))
    assert code == 2
    assert "--plot must lie in a directory that can be written" in err
    monkeypatch.setattr(terminal, "print_record", lambda *_: (tmp_path / "gone" / "file").read_bytes())
    code, _, err = run(capsys, "saturation")
    assert code == 1
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no such signal")
def test_ctrl_c_says_so_in_one_line(tmp_path):
    line = [sys.executable, "-m", "sqrtdk", "ablate", "--steps", "100000", "--workers", "1"]
    process = subprocess.Popen(
        [*line, "--store", str(tmp_path / "runs.sqlite")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "runs.sqlite").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = [line for line in err.splitlines() if "training" not in line]  # a slow machine sees progress
    assert lines == ["sqrtdk: interrupted; finished runs are in the store if one was given"]


def test_claims_without_torch_say_so_before_anything_is_computed(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sqrtdk.theory, "dot_product_variance", lambda *_, **__: pytest.fail("computed"))
    code, _, err = run(capsys, "claims")
    assert code == 2
    assert "only soft.trained, grad.learning, scale.temperature, scale.query need it (--no-training)" in err


def print_narrow(rows, width):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    terminal.print_table(rows, console=console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_numbers_stay_whole_in_narrow_terminals(width):
    numbers = [1 / (i + 3) for i in range(20)]
    rows = [{"scale": name, **{f"number_{i}": x for i, x in enumerate(numbers)}} for name in ("none", "sqrt")]
    out = print_narrow(rows, width)
    assert max(map(len, out.splitlines())) <= width
    words = out.split()
    assert all(words.count(f"{x:.4g}") == 2 for x in numbers)
    assert words.count("no") == words.count("1/√dₖ") > 1


def test_the_ends_of_an_interval_are_one_column():
    out = print_narrow([{"scale": "sqrt", "grad_q": 2.0, "grad_q_low": 1.5, "grad_q_high": 2.5}], 80)
    assert "1.5 to 2.5" in out
    assert "‖∂loss/∂q‖ 95% interval" in out


@pytest.mark.long
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


@pytest.mark.slow
def test_command_starts_without_torch_or_plotly():
    code = (
        "import sys, sqrtdk.commands.cli\n"
        "try: sqrtdk.commands.cli.main(['saturation', '--json'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'plotly', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
