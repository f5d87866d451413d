"""Trains the ablation that comes with sqrtdk (half an hour on two cores), writes its record and plots its figure.

A store keeps finished runs, so that an interrupted training can continue: python docs/make_ablation.py runs.sqlite
"""

import datetime
import json
import sys
from pathlib import Path

from sqrtdk.lab import Lab, ablate
from sqrtdk.lab.shipped import SHIPPED, compact
from sqrtdk.report.files import save_figure, write_whole
from sqrtdk.show.progress import follow, progress_bar

DOCS = Path(__file__).parent
RECORD = DOCS.parent / "src" / "sqrtdk" / "records" / "data" / "ablation.json"
PICTURE = DOCS / "images" / "ablation.png"


def main(store):
    """Train the runs that the store lacks, then write the record and the figure."""
    with progress_bar() as bar, Lab(store, progress=follow(bar, "training")) as lab:
        record = compact(ablate(SHIPPED, lab), datetime.datetime.now(datetime.UTC).date().isoformat())
    content = json.dumps(record.as_json(), ensure_ascii=False, separators=(",", ":"))
    write_whole(RECORD, f"{content}\n".encode())
    save_figure(record, PICTURE)


if __name__ == "__main__":
    main(sys.argv[1])
