"""Reads the JSON Lines file of a training monitor, with one observation per line, as one record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.records.files import read_bounded
from sqrtdk.records.record import Record
from sqrtdk.show.table import count

_MOST_BYTES = 512 * 2**20
_NUMBERS = ("entropy_ratio", "score_spread", "max_logit")


def read_observations(path: str | Path) -> Record:
    """Return the record of kind `monitor` from a file that `sqrtdk.torch.Monitor` wrote.

    The table `alerts` has the alerts that were raised or cleared. `curves` has `steps`, and by layer the numbers of
    each head at each step (None if a head was not observed). If a step was observed again after a restart, the last
    observation counts. An incomplete last line is left out.

    Raises:
        InvalidValueError: if the file has no observations, or a line that is not an observation.
    """
    lines = read_bounded(Path(path), _MOST_BYTES).decode(errors="replace").splitlines()
    observations: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            one = json.loads(line)
            observations[int(one["step"])] = {"layers": dict(one["layers"]), "alerts": list(one["alerts"])}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines) and number > 1:
                break  # the run ended while it wrote this line
            raise InvalidValueError(
                "path",
                f"must be a file that Monitor wrote, got {path}, whose line {number} is no observation ({error!r})",
            ) from None
    if not observations:
        raise InvalidValueError("path", f"must be a file that Monitor wrote, got {path} without observations")
    steps = sorted(observations)
    heads: dict[str, int] = {}
    for step in steps:
        for layer, numbers in observations[step]["layers"].items():
            heads[layer] = max(heads.get(layer, 0), len(numbers.get("entropy_ratio", ())))
    layers = {
        layer: {
            name: [_pad(observations[step]["layers"].get(layer, {}).get(name, ()), size) for step in steps]
            for name in _NUMBERS
        }
        for layer, size in heads.items()
    }
    alerts = [alert for step in steps for alert in observations[step]["alerts"]]
    raised = [alert for alert in alerts if alert["state"] == "raised"]
    told = f"{count(len(raised), 'alert')} from step {raised[0]['step']} on" if raised else "no alert"
    return Record(
        "monitor",
        {"steps": [steps[0], steps[-1]]},
        {
            "alerts": [
                {name: alert[name] for name in ("step", "state", "severity", "rule", "layer", "heads", "cause")}
                for alert in alerts
            ]
        },
        {"steps": steps, "layers": layers},
        reading=[
            f"{count(len(steps), 'observation')} from step {steps[0]} to {steps[-1]} of {count(len(heads), 'layer')} "
            f"with {count(sum(heads.values()), 'head')}: {told}."
        ],
    )


def _pad(numbers: list[Any] | tuple[()], size: int) -> list[Any]:
    return [*numbers, *[None] * (size - len(numbers))]
