"""Tools for models in training: the monitor, QK-Clip, process groups, and destinations for observations."""
