"""Engines for tensors, and the function that chooses one for a call."""
