"""Follows the tensors of a running model and recognises its attention calls."""
