"""Words: module headers begin with a noun or a verb, and words that were renamed stay away."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for folder in ("src", "benchmarks", "tests", "docs") for path in (ROOT / folder).rglob("*.py"))
HEADERS = sorted(path for folder in ("kernel", "bindings") for path in (ROOT / folder).rglob("*.h"))
RIDDLES = ("What", "Who", "Which", "Where", "How")

GUIDES = ("README.md", "docs/*.md")
# Rooms whose texts are free of the renamed words. Add a room here when its texts are.
ROOMS = (
    *(f"src/sqrtdk/{room}/**/*.py" for room in ("audits", "claims", "commands", "exercises", "records", "show")),
    *(f"src/sqrtdk/{room}/**/*.py" for room in ("lab", "report", "theory", "web", "wording", "zoo")),
    "src/sqrtdk/scales.py",
)


class Renamed(NamedTuple):
    """A pattern of words that no text may contain, the words to use instead, and the files for which this holds."""

    pattern: str
    use: str
    places: tuple[str, ...] = (*GUIDES, *ROOMS)
    except_for: tuple[str, ...] = ()

    def find(self) -> list[str]:
        """Return the places of the pattern, each as path:line."""
        paths = {path for place in self.places for path in ROOT.glob(place)}
        paths -= {path for place in self.except_for for path in ROOT.glob(place)}
        return [
            f"{path.relative_to(ROOT)}:{number}"
            for path in sorted(paths)
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if re.search(self.pattern, line, re.IGNORECASE)
        ]


RENAMED = (
    Renamed(r"\bthe texts\b", "the four sources"),
    Renamed(r"sqrtdk draw\b", "sqrtdk plot"),
    Renamed(r"sqrtdk condensation\b", "sqrtdk concentration"),
    Renamed(r"\btold apart\b", "distinguishable"),
    # The random energy model's own word stays in the theory, and in the name of its function.
    Renamed(r"(?<!theory\.)\bcondens", "concentrate", except_for=("docs/theory.md", "src/sqrtdk/theory/*.py")),
    Renamed(r"\blaws?\b", "variance formula, or many-key limit"),
    Renamed(r"\bunscaled\b|\bwithout an? scale\b", "no scaling, without scaling"),
    Renamed(r"\bno scale\b", "no scaling", except_for=("docs/scale-bugs.md",)),
    Renamed(r"\bsmaller start\b|\bstart of 1/√dₖ", "rescaled init"),
    # One claim quotes these words.
    Renamed(r"(?<!makes the weights )\bnearly[ _-]one[ _-]hot", "one or two keys hold most of the weight"),
    Renamed(r"\b(a|each|every|first|independent|of|one|over|per|random) draws?\b", "sample", ROOMS),
    Renamed(r"\b(a|each|every|one|per|three) looks?\b", "observation"),
    Renamed(r"\bsoftmax('s)? slope\b", "Jacobian trace"),
)


def test_headers_say_what_modules_do():
    headers = {path: path.read_text(encoding="utf-8").removeprefix('"""') for path in MODULES}
    assert [str(path) for path, header in headers.items() if header.startswith(RIDDLES)] == []


def test_headers_of_the_kernel_do_too():
    headers = {path: path.read_text(encoding="utf-8").removeprefix("// ") for path in HEADERS}
    assert [str(path) for path, header in headers.items() if header.startswith(RIDDLES)] == []


def test_renamed_words_stay_away_from_the_kernel():
    sources = [*HEADERS, *sorted((ROOT / "kernel").rglob("*.cpp")), ROOT / "kernel/README.md"]
    words = re.compile(r"careful|\bodd rows?\b|\bodd\b [|=]", re.IGNORECASE)
    assert [str(path) for path in sources if words.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("word", RENAMED, ids=lambda word: word.use)
def test_renamed_words_stay_away(word):
    assert word.find() == [], f"say: {word.use}"


@pytest.mark.parametrize(
    "path", sorted(path for place in GUIDES for path in ROOT.glob(place)), ids=lambda path: path.name
)
def test_headings_of_guides_begin_with_a_noun_or_a_verb(path):
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [heading for heading in headings if heading.startswith(RIDDLES)] == []


def test_every_place_exists():
    places = {place for word in RENAMED for place in (*word.places, *word.except_for)}
    assert [place for place in sorted(places) if not any(ROOT.glob(place))] == []


# Numbers that are no part of a sentence, or whose digits are those of another text.
NOT_SENTENCES = {
    "src/sqrtdk/audits/audit.py": "a number of JSON, rounded",
    "src/sqrtdk/claims/softmax_claims.py": "the seven digits that the source has",
    "src/sqrtdk/records/json.py": "numbers of JSON, rounded",
    "src/sqrtdk/report/try_it.py": "numbers for the page's script",
    "src/sqrtdk/torch/models/head_effects.py": "a change with its sign",
    "src/sqrtdk/torch/nn/learnable.py": "settings, as they would be typed",
    "src/sqrtdk/torch/training/monitor.py": "numbers of JSON, rounded",
    "src/sqrtdk/web/explore_query.py": "settings, as they would be typed",
    "src/sqrtdk/zoo/census.py": "notes and numbers of zoo.json",
    "src/sqrtdk/zoo/measure.py": "notes of zoo.json",
}


def test_numbers_in_sentences_are_written_by_one_function():
    """`.3g` writes 1.23e+03 and 9.81e-11 into a sentence; `write_number` knows how numbers are written by hand."""
    formats = {}
    for path in sorted((ROOT / "src" / "sqrtdk").rglob("*.py")):
        if path.parent.name != "wording":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            specs = [ast.unparse(node.format_spec) for node in nodes if getattr(node, "format_spec", None)]
            if any(re.search(r"[ge]['\"]$", spec) and "." in spec for spec in specs):
                formats[str(path.relative_to(ROOT))] = specs
    assert sorted(formats) == sorted(NOT_SENTENCES), "use sqrtdk.wording.numbers.write_number"
