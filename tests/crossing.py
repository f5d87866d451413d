"""The kernel's own functions called without the package in between."""

from sqrtdk.call import FIELDS, OPEN_ABOVE, OPEN_BELOW


def cross(query, key, value, dtype=2, mask_kind=0, **given):
    """The arguments of the kernel's own functions behind level and threads, up to the results."""
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
