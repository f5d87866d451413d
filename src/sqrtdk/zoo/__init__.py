"""The zoo: the scale that each family of transformers uses, measured in a small model of its default configuration."""

from sqrtdk.zoo.census import take_census

__all__ = ["take_census"]
