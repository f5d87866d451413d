"""Draws docs/architecture.md from the import contracts, and fills the file lists in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
RECIPES = ROOT / "CONTRIBUTING.md"
SOURCES = ("src/**/*.py", "src/**/*.js", "kernel/**/*.h", "kernel/**/*.cpp", "bindings/*")

_BLOCK = re.compile(r"^```text\n.*?^```$", re.MULTILINE | re.DOTALL)
_RECIPE = re.compile(r"^Example: `(?P<example>[^`]+)`.*?\n\nSources: (?P<sources>[^\n]*)$", re.MULTILINE | re.DOTALL)


def read_layers() -> dict[str, list[list[str]]]:
    """Return the layers of every package with an exhaustive contract, highest first, each as a list of its modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    return {
        contract["containers"][0]: [re.split(r" [|:] ", layer) for layer in contract["layers"]]
        for contract in contracts
        if contract.get("exhaustive")
    }


def draw_rooms(layers: list[list[str]]) -> str:
    """Return the packages with the first line of each, and an arrow from a layer to those that it may import."""
    width = max(len(name) for layer in layers for name in layer) + 2
    drawn = ["\n".join(f"{name:<{width}}{_describe(name)}" for name in layer) for layer in layers]
    return "\n  ↓\n".join(drawn) + "\n"


def draw_orders(layers: dict[str, list[list[str]]]) -> str:
    """Return one paragraph for each other package, with its modules in the order of their imports."""
    orders = [f"{package}\n  " + "\n  → ".join(" ∥ ".join(layer) for layer in own) for package, own in layers.items()]
    return "\n\n".join(orders) + "\n"


def draw_page(text: str) -> str:
    """Return the page with both drawings made anew."""
    layers = read_layers()
    rooms = draw_rooms(layers.pop("sqrtdk"))
    drawings = iter([rooms, draw_orders(layers)])
    return _BLOCK.sub(lambda _: f"```text\n{next(drawings)}```", text)


def list_sources(example: str) -> list[str]:
    """Return the product files that contain the example."""
    found = (path for pattern in SOURCES for path in ROOT.glob(pattern) if "tests" not in path.parts)
    return sorted(str(path.relative_to(ROOT)) for path in found if example in path.read_text(encoding="utf-8"))


def fill_recipes(text: str) -> str:
    """Return the recipes with their file lists made anew."""

    def fill(recipe: re.Match[str]) -> str:
        listed = ", ".join(f"`{name}`" for name in list_sources(recipe["example"]))
        return f"{recipe[0][: recipe.start('sources') - recipe.start()]}{listed}."

    return _RECIPE.sub(fill, text)


def read_recipes() -> Iterator[tuple[str, list[str]]]:
    """Yield the example of each recipe and the files that the recipe names."""
    for part in RECIPES.read_text(encoding="utf-8").split("\n### ")[1:]:
        example = re.search(r"^Example: `([^`]+)`", part, re.MULTILINE)
        if example:
            yield example[1], re.findall(r"`([\w/.-]+\.(?:py|js|h|cpp|md|toml))`", part)


def _describe(name: str) -> str:
    """Return the first line of a module's docstring."""
    path = ROOT / "src" / "sqrtdk" / name
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]


if __name__ == "__main__":
    PAGE.write_text(draw_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    RECIPES.write_text(fill_recipes(RECIPES.read_text(encoding="utf-8")), encoding="utf-8")
