"""Writes docs/api.md, the API reference, from the docstrings of the public names."""

import importlib
import inspect
import re
from pathlib import Path

PAGE = Path(__file__).parent / "api.md"

# In the order of the page: what each module is for, in its own first line.
MODULES = (
    "sqrtdk",
    "sqrtdk.scales",
    "sqrtdk.theory",
    "sqrtdk.statistics",
    "sqrtdk.summary",
    "sqrtdk.diagnosis",
    "sqrtdk.audits",
    "sqrtdk.backends",
    "sqrtdk.exercises",
    "sqrtdk.report",
    "sqrtdk.errors",
    "sqrtdk.torch",
    "sqrtdk.torch.nn",
)
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$")


def write_reference():
    """The whole page as Markdown."""
    parts = [
        "# API reference",
        "Made from the docstrings by `make docs`; the examples in it run as doctests. "
        "Axes: H query heads, G key/value heads, L queries, S keys, D = dₖ, V = dᵥ.",
    ]
    parts.append(" · ".join(f"[{name}](#{name.replace('.', '')})" for name in MODULES))
    told = set()
    for name in MODULES:
        module = importlib.import_module(name)
        parts += [f"## {name}", _summarise(module)]
        for public in module.__all__:
            value = getattr(module, public)
            if inspect.ismodule(value) or public == "__version__":
                continue
            if id(value) in told:  # a name of several modules stands where it comes first
                continue
            told.add(id(value))
            parts += _describe(public, value)
    return "\n\n".join(part for part in parts if part) + "\n"


def _describe(name, value):
    if not callable(value):
        shown = repr(value) if isinstance(value, str | int | tuple) else type(value).__name__
        return [f"### {name}", f"A constant: `{shown}`"]
    parts = [f"### {name}"]
    if not _is_record(value):
        parts.append(f"```python\n{name}{_sign(value)}\n```")
    parts += _render(inspect.getdoc(value) or "")
    if inspect.isclass(value) and not issubclass(value, Exception):
        members = [_describe_member(*member) for member in _members(value)]
        parts.append("\n".join(members))
    return parts


def _is_record(value):
    return inspect.isclass(value) and issubclass(value, Exception | Warning)


def _sign(value):
    try:
        signature = str(inspect.signature(value))
    except ValueError:
        return "(…)"
    # Names of modules say nothing here, and addresses of defaults change from run to run.
    signature = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", signature.replace("'", ""))
    signature = re.sub(r"ForwardRef\(([^()]*)\)", r"\1", signature)
    return re.sub(r"<(?:function )?([\w.]+?)(?: at 0x[0-9a-f]+)?>", r"\1", re.sub(r"<lambda>", "lambda", signature))


def _members(kind):
    for name, member in vars(kind).items():
        if not name.startswith("_") and (isinstance(member, property | staticmethod | classmethod) or callable(member)):
            yield name, getattr(kind, name) if not isinstance(member, property) else member


def _describe_member(name, member):
    shown = name if isinstance(member, property) else f"{name}{_sign(member)}"
    return f"- `{shown}`: {_summarise(member)}"


def _summarise(value):
    text = (inspect.getdoc(value) or "").split("\n\n")[0]
    return " ".join(text.split())


def _render(text):
    """A docstring as Markdown: paragraphs, sections as lists, examples as code."""
    parts, paragraph, entries = [], [], []

    def finish():
        if paragraph:
            parts.append("\n".join(paragraph))
            paragraph.clear()
        if entries:
            parts.append("\n".join(f"- {_name_entry(entry)}" for entry in entries))
            entries.clear()

    section, example = None, []
    for line in [*text.splitlines(), ""]:
        if example or line.startswith(">>>"):
            if line.strip():
                example.append(line)
                continue
            parts.append("```pycon\n" + "\n".join(example) + "\n```")
            example = []
        elif _SECTION.match(line):
            finish()
            section = line.rstrip(":")
            parts.append(f"**{section}**")
        elif not line.strip():
            finish()
            section = None
        elif section and line.startswith("    ") and not line.startswith("     "):
            entries.append(line.strip())
        elif section:
            entries[-1] += " " + line.strip()
        else:
            paragraph.append(line)
        if line.startswith(">>>") and paragraph:
            finish()
    finish()
    return parts


def _name_entry(entry):
    name, colon, rest = entry.partition(":")
    return f"`{name}`:{rest}" if colon and re.fullmatch(r"[\w., ]+", name) and len(name) < 40 else entry


if __name__ == "__main__":
    PAGE.write_text(write_reference(), encoding="utf-8")
    print(f"reference written to {PAGE}")
