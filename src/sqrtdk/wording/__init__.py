"""Vocabulary of everything that is printed: numbers, names of quantities, names of settings."""
