"""The commands of `sqrtdk`, a module per thing that a user wants."""
