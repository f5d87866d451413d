"""Evidence for claims beyond a formula: a seed, and experiments that are made once, when one is first asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from sqrtdk.lab import AblationSpec, Lab, ablate, swap_scale
from sqrtdk.lab.shipped import chosen_rates, load_ablation
from sqrtdk.records import Record

_D_K = 64


class Evidence:
    """The seed of every random draw, and the training experiments; each runs once, whoever asks and how often.

    Args:
        seed: seeds every random draw that is no training run.
        seeds: training runs per setting.
        steps: training steps per run.
        lab: where models are trained; None: a lab of its own that forgets them in the end.

    >>> Evidence(seeds=3).steps
    600
    """

    def __init__(self, seed: int = 0, seeds: int = 8, steps: int = 600, lab: Lab | None = None) -> None:
        self.seed, self.seeds, self.steps = seed, seeds, steps
        self._lab = lab

    @cached_property
    def lab(self) -> Lab:
        """Where models are trained."""
        return Lab() if self._lab is None else self._lab

    @cached_property
    def learning(self) -> Record:
        """Ablation of none, √dₖ and dₖ beside none with the start of √dₖ, without and with its step.

        Each has the learning rate that the shipped ablation chose for it, on seeds other than these.
        """
        spec = AblationSpec(
            scales=("none", "sqrt", "inverse"),
            d_ks=(_D_K,),
            seeds=self.seeds,
            steps=self.steps,
            also=(("none", "absorbed"), ("none", "absorbed", "absorbed")),
        )
        known = chosen_rates(_D_K)
        return ablate(replace(spec, rates={choice: known[choice] for choice in spec.choices()}), self.lab)

    @property
    def widths(self) -> Record:
        """The ablation at three widths that comes with sqrtdk."""
        return load_ablation()

    @cached_property
    def temperatures(self) -> Record:
        """Ablation of √dₖ beside a temperature learned per head and one learned from the query, all else equal."""
        spec = AblationSpec(scales=("sqrt", "learned", "query"), seeds=self.seeds, steps=self.steps)
        return ablate(spec, self.lab)

    @cached_property
    def swap(self) -> Record:
        """Trained with √dₖ, then without the scale; beside training without it from a random start."""
        return swap_scale(seeds=self.seeds, start_steps=self.steps, steps=self.steps, lab=self.lab)
