"""Exercises on the scale of attention. Each is a pure function of its arguments and a seed, and returns a `Record`."""

from sqrtdk.exercises.concentration import concentration
from sqrtdk.exercises.explain import explain
from sqrtdk.exercises.gradients import gradients
from sqrtdk.exercises.saturation import saturation
from sqrtdk.exercises.spread import spread
from sqrtdk.exercises.temperature import temperature
from sqrtdk.exercises.variance import variance

__all__ = ["concentration", "explain", "gradients", "saturation", "spread", "temperature", "variance"]
