"""The help of the command line: commands in groups of what a user wants, with examples that can be typed."""

import re
import shlex

import pytest
import typer

from sqrtdk.commands.cli import GROUPS, app, main

COMMANDS = typer.main.get_command(app).commands
EXAMPLES = [
    pytest.param(line, id=line)
    for command in COMMANDS.values()
    for line in command.epilog.removeprefix("Examples:").split("\n\n")
    if line
]
# These train models, measure for minutes, or take a file that has to be there.
SLOW = ("claims", "ablate", "report", "audit", "plot", "runs", "zoo --family")


def show_help(capsys, *arguments):
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    return capsys.readouterr().out


def test_the_help_groups_commands_by_what_a_user_wants(capsys):
    text = show_help(capsys)
    panels = re.findall(r"╭─ (.+?) ─+╮\n(.*?)╰", text, re.DOTALL)
    shown = {title: re.findall(r"^│ (\w+)", body, re.MULTILINE) for title, body in panels}
    assert shown.pop("Options") == []
    assert list(shown) == ["Understand", "Diagnose a model", "Experiment", "Show results", "This machine"]
    assert shown["Understand"][:2] == ["explain", "claims"]
    assert shown["Diagnose a model"] == ["audit", "zoo"]
    assert shown["Experiment"] == ["ablate", "scales", "runs"]
    assert {"report", "plot"} <= set(shown["Show results"])
    assert shown["This machine"] == ["info"]
    assert {name for names in shown.values() for name in names} == set(COMMANDS)


def test_a_command_is_in_one_group():
    assert sum(len(group.registered_commands) for group in GROUPS.values()) == len(COMMANDS) - len(["runs"])


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_stand_on_lines_of_their_own(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in show_help(capsys, name).splitlines() if line.strip()]
    examples = COMMANDS[name].epilog.split("\n\n")[1:]
    assert examples
    assert all(example.startswith(f"sqrtdk {name}") for example in examples)
    at = lines.index("Examples:")
    assert lines[at + 1 : at + 1 + len(examples)] == examples


@pytest.mark.parametrize("line", EXAMPLES)
def test_options_of_examples_exist(line):
    _, name, *arguments = shlex.split(line)
    COMMANDS[name].make_context(name, arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    "line",
    [p for p in EXAMPLES if not p.values[0].removeprefix("sqrtdk ").startswith(SLOW) and "--plot" in p.values[0]],
)
def test_examples_with_a_figure_draw_it(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(line)[1:]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
    assert (tmp_path / arguments[-1]).stat().st_size > 1000
