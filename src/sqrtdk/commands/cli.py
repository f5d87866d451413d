"""Command line: collects the groups of commands and prints errors as one line."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from sqrtdk.commands import diagnose, experiment, machine, pages_and_figures, runs, understand
from sqrtdk.commands.interrupts import INTERRUPTED
from sqrtdk.commands.options import name_options
from sqrtdk.commands.results import fail
from sqrtdk.errors import SqrtdkError, SqrtdkWarning
from sqrtdk.records.record import versions
from sqrtdk.wording.encoding import never_fail

# Purposes in the order of the help, each with its commands.
GROUPS = {
    "Understand": understand.commands,
    "Diagnose a model": diagnose.commands,
    "Experiment": experiment.commands,
    "Show results": pages_and_figures.commands,
    "This machine": machine.commands,
}

app = typer.Typer(
    name="sqrtdk",
    help="Explain, measure and diagnose the scale of attention, 1/√dₖ.\n\n"
    "Exercises 1 to 5 are those of the textbook section “Scaled Attention: Why √d Matters”.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_versions(wanted: bool) -> None:
    if wanted:
        print(", ".join(f"{package} {version}" for package, version in versions().items()))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", callback=_print_versions, is_eager=True)
    ] = False,
) -> None:
    pass


for _panel, _group in GROUPS.items():
    for _command in _group.registered_commands:
        _command.rich_help_panel = _panel
        # The help is read as markup: brackets as in softmax([x, 0, 0, 0]) are escaped to stay visible.
        _command.help = inspect.getdoc(_command.callback).replace("[", "\\[")  # type: ignore[union-attr]
        app.registered_commands.append(_command)

app.add_typer(runs.commands, name="runs", rich_help_panel="Experiment")


def _list_options(program: typer.Typer) -> set[str]:
    """Return every long option of every command."""
    whole = typer.main.get_command(program)
    commands = getattr(whole, "commands", {"": whole}).values()
    return {name for command in commands for option in command.params for name in option.opts if name[:2] == "--"}


def _show_warnings_as_lines() -> None:
    """Print sqrtdk's own warnings as one line on stderr, without the line of code that raised them."""
    show = warnings.showwarning

    def show_line(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, SqrtdkWarning):
            print(f"sqrtdk: {message}", file=sys.stderr)
        else:
            show(message, category, *rest, **more)

    warnings.showwarning = show_line


# The option parser's kinds of wrong values in plain words; {ge} and {le} are its limits.
_EXPECTED = {
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


def _say_usage(error: Exception) -> str | None:
    """Return a message with the option, the expected and the given value; None where the parser's message will do."""
    list_errors, option = getattr(error.__cause__, "errors", None), getattr(error, "param", None)
    first = list_errors()[0] if callable(list_errors) and option is not None else {}
    expected = _EXPECTED.get(first.get("type", ""))
    if expected is None or option is None:
        return None
    return f"{option.opts[0]} must be {expected.format(**first.get('ctx', {}))}, got {first['input']!r}"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Wrong input ends with one line on stderr and exit code 2."""
    run_app(app, "sqrtdk", arguments)


def run_app(program: typer.Typer, name: str, arguments: list[str] | None) -> NoReturn:
    """Run a program of commands. Errors are one line on stderr: exit code 2 for wrong input, 1 for the system."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        fail("standard output must be open, got a closed one; give > /dev/null if nothing is wanted", 1)
    never_fail(sys.stdout, sys.stderr)
    _show_warnings_as_lines()
    try:
        code = program(args=arguments, standalone_mode=False, prog_name=name)
    except SqrtdkError as error:
        fail(name_options(error, _list_options(program)), 2)
    except OSError as error:  # a full disk, a missing file: a traceback would not help
        fail(str(error), 1)
    except Exception as error:
        # Usage errors of the option parser bring message and exit code; anything else is a bug and keeps its traceback.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        fail(_say_usage(error) or " ".join(str(format_message()).split()), int(getattr(error, "exit_code", 2)))
    else:
        # The option parser turns Ctrl-C into this exit code.
        if code == INTERRUPTED:
            fail("interrupted; finished runs are in the store if one was given", INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)
