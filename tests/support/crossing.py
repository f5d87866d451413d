"""Arguments for calling the kernel's own functions directly, without the package."""

from sqrtdk.operation.call import FIELDS
from sqrtdk.operation.visibility import OPEN_ABOVE, OPEN_BELOW


def cross(query, key, value, dtype=2, mask_kind=0, **given):
    """Return the arguments of the kernel's functions that follow level and threads, up to the results."""
    usual = {
        "seed": 0,
        "factor": 0.5,
        "softcap": 0.0,
        "dropout": 0.0,
        "first": OPEN_BELOW,
        "last": OPEN_ABOVE,
        "offset": 0,
    }
    given = {**usual, "query": query, "key": key, "value": value, **given}
    return (0, dtype, mask_kind, *(given.get(name) for name in FIELDS))
