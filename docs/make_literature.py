"""Computes all reproductions that a store lacks, writes the shipped record, the pictures and the table of the page.

A store keeps what is finished, so that an interrupted computation can continue:
python docs/make_literature.py runs.sqlite
"""

import datetime
import json
import sys
from pathlib import Path

from sqrtdk.lab import Lab
from sqrtdk.report.files import save_figure, write_whole
from sqrtdk.report.reproduction_figures import count_verdicts, select_result
from sqrtdk.reproductions import REPRODUCTIONS, reproduce
from sqrtdk.reproductions.shipped import COMMAND, compact, load_reproductions
from sqrtdk.show.progress import follow, progress_bar
from sqrtdk.wording.numbers import write_number

DOCS = Path(__file__).parent
RECORD = DOCS.parent / "src" / "sqrtdk" / "records" / "data" / "reproductions.json"
PAGE = DOCS / "literature.md"
PICTURES = DOCS / "images"

HEAD = """# The literature on attention's scale, reproduced

`sqrtdk reproduce` computes published results about the scale of attention again. Each result states a quantity and a
bound before it runs (`--list` shows them). The verdict is `pass` if the whole 95 % interval keeps the bound, `fail` if
none of it does, and `unclear` otherwise. Models here are small, and each result says how it is scaled down: a result
that fails here may hold at the size of its source. `docs/make_literature.py` writes this page from the shipped record.

```console
$ {command}
```
"""


def write_page(record):
    """Return the page of a record: a section per result with its picture and the table of its expectations."""
    parts = [
        HEAD.format(command=COMMAND),
        f"{count_verdicts(record.tables['reproductions'])} Date: {record.spec['date']}.",
    ]
    for name in record.spec["names"]:
        rows = [row for row in record.tables["reproductions"] if row["name"] == name]
        title = record.curves[name]["title"]
        scaled_down = f" Scaled down: {rows[0]['scaled_down']}." if rows[0]["scaled_down"] else ""
        parts += [
            f"\n## {name}\n",
            f"{title}: **{record.curves[name]['outcome']}**.\n",
            f"Source: {rows[0]['source']}.{scaled_down}\n",
            f"![{title}](images/literature-{name}.png)\n",
            "| expected | measured | 95 % interval | verdict |\n|---|---|---|---|",
            *(
                f"| {row['expected']} | {_write(row['measured'])} | {_interval(row)} | {row['verdict']} |"
                for row in rows
            ),
        ]
    missing = [name for name in REPRODUCTIONS if name not in record.spec["names"]]
    if missing:
        parts.append(f"\nNot in the shipped record yet: {', '.join(missing)}.")
    parts.append(
        "\nThe log keeps results that fail or stay unclear: [reproductions](log/2026-11-18-reproductions.md).\n"
    )
    return "\n".join(parts)


def _interval(row):
    low, high = row["low"], row["high"]
    return "–" if low is not None and low == high else f"{'−∞' if low is None else _write(low)} to {_write(high)}"


def _write(value):
    return "∞" if value is None else write_number(value)


def main(store):
    """Compute what the store lacks, then write record, page and pictures."""
    with progress_bar() as bar, Lab(store, progress=follow(bar, "training")) as lab:
        record = reproduce(list(REPRODUCTIONS), lab=lab)
    record = compact(record, datetime.datetime.now(datetime.UTC).date().isoformat())
    content = json.dumps(record.as_json(), ensure_ascii=False, separators=(",", ":"))
    write_whole(RECORD, f"{content}\n".encode())
    load_reproductions.cache_clear()
    write_whole(PAGE, write_page(record).encode())
    for name in record.spec["names"]:
        save_figure(select_result(record, name), PICTURES / f"literature-{name}.png")


if __name__ == "__main__":
    main(sys.argv[1])
