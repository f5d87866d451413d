"""Engines for arrays, and the function that chooses one for a call."""
