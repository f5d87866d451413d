"""Fill the tables of Markdown documents from benchmarks that `python -m benchmarks --output` wrote.

    python -m benchmarks.fill_tables benchmarks/peers.json benchmarks/growth.json docs/performance.md

Files that end in .json are read, the others are written. `benchmarks/markdown.py` explains the names of the tables in a
document.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.markdown import fill_tables
from sqrtdk.errors import SqrtdkError
from sqrtdk.records.record import Record


def main(names: list[str]) -> None:
    """Fill the documents in this list of files from the benchmark results in the list."""
    paths = [Path(name) for name in names]
    records = [Record.from_json(json.loads(path.read_text())) for path in paths if path.suffix == ".json"]
    documents = [path for path in paths if path.suffix != ".json"]
    if not records or not documents:
        sys.exit((__doc__ or "").strip())
    for path in documents:
        try:
            path.write_text(fill_tables(path.read_text(), records))
        except SqrtdkError as error:
            sys.exit(f"{path}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
