"""Shows the examples of docstrings as code on the site: doctests stand there without a fence."""

import re

import griffe

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class FencedExamples(griffe.Extension):
    """Puts a fence around every doctest before the docstring is read as Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Fence the examples of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
