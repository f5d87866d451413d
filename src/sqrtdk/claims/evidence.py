"""Evidence for claims that no formula decides: a seed, and training experiments that run once, when first needed."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from sqrtdk.lab import AblationSpec, Lab, ablate, swap_scale
from sqrtdk.lab.shipped import chosen_rates, load_ablation
from sqrtdk.records.record import Record

_D_K = 64


class Evidence:
    """The seed of all random samples, and the training experiments. Each experiment runs at most once.

    Args:
        seed: seed of all random samples except training runs.
        seeds: training runs per setting.
        steps: training steps per run.
        lab: the lab that trains models. None means a new lab that keeps nothing.

    >>> Evidence(seeds=3).steps
    600
    """

    def __init__(self, seed: int = 0, seeds: int = 8, steps: int = 600, lab: Lab | None = None) -> None:
        self.seed, self.seeds, self.steps = seed, seeds, steps
        self._lab = lab

    @cached_property
    def lab(self) -> Lab:
        """The lab that trains models."""
        return Lab() if self._lab is None else self._lab

    @cached_property
    def learning(self) -> Record:
        """Ablation of no scaling, 1/√dₖ and 1/dₖ, and of no scaling with rescaled init, without and with rescaled step.

        Each setting uses the learning rate that the shipped ablation chose for it on other seeds.
        """
        spec = AblationSpec(
            scales=("none", "sqrt", "inverse"),
            d_ks=(_D_K,),
            seeds=self.seeds,
            steps=self.steps,
            also=(("none", "rescaled"), ("none", "rescaled", "rescaled")),
        )
        known = chosen_rates(_D_K)
        return ablate(replace(spec, rates={choice: known[choice] for choice in spec.choices()}), self.lab)

    @property
    def widths(self) -> Record:
        """The ablation at three widths that comes with sqrtdk."""
        return load_ablation()

    @cached_property
    def temperatures(self) -> Record:
        """Ablation of 1/√dₖ, of a temperature learned per head and of one learned from the query, all else equal."""
        spec = AblationSpec(scales=("sqrt", "learned", "query"), seeds=self.seeds, steps=self.steps)
        return ablate(spec, self.lab)

    @cached_property
    def swap(self) -> Record:
        """Training with 1/√dₖ and then with no scaling, compared with no scaling from a random start."""
        return swap_scale(seeds=self.seeds, start_steps=self.steps, steps=self.steps, lab=self.lab)
