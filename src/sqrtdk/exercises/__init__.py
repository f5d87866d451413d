"""The exercises on the scale of attention: each a pure function of its arguments and a seed that returns a `Record`."""

from sqrtdk.exercises.explanation import explain
from sqrtdk.exercises.gradient_sizes import gradients
from sqrtdk.exercises.saturation_point import saturation
from sqrtdk.exercises.temperature_sweep import temperature
from sqrtdk.exercises.variance_law import variance

__all__ = ["explain", "gradients", "saturation", "temperature", "variance"]
