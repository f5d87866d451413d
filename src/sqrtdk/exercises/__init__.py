"""The exercises on the scale of attention: each a pure function of its arguments and a seed that returns a `Record`."""

from sqrtdk.exercises.condensation import condensation
from sqrtdk.exercises.explain import explain
from sqrtdk.exercises.gradients import gradients
from sqrtdk.exercises.saturation import saturation
from sqrtdk.exercises.spread import spread
from sqrtdk.exercises.temperature import temperature
from sqrtdk.exercises.variance import variance

__all__ = ["condensation", "explain", "gradients", "saturation", "spread", "temperature", "variance"]
