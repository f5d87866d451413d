"""One process of the zoo: reads a family per line from stdin, writes what was measured as a line of JSON to stdout."""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import suppress

_MOST_BYTES = 6 << 30


def main() -> None:
    """Measure families until stdin ends; what models print goes to stderr."""
    with suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    from sqrtdk.zoo.measure import measure

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), file=answers, flush=True)
        gc.collect()  # models hold on to themselves


if __name__ == "__main__":
    main()
