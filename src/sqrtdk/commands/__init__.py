"""Commands of `sqrtdk`, one module per purpose."""
