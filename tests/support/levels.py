"""Levels of the kernel that this machine can run, and those that tests use."""

from sqrtdk import backends

RUNNING = [backend.name for backend in backends.list() if backend.runs_here]
# avx512_bf16 differs from avx512 only for bfloat16, for which random calls (test_fuzz, make sanitize) use both.
TRIED = [name for name in RUNNING if not (name == "avx512" and "avx512_bf16" in RUNNING)]
NATIVE = [name for name in TRIED if name != backends.REFERENCE]
