"""The zoo: a small model of every family of transformers, built here from its configuration, and the scale it uses."""

from sqrtdk.zoo.census import take_census

__all__ = ["take_census"]
