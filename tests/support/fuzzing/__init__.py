"""Random calls over the whole argument space, compared with attention from its definition in extended precision."""
