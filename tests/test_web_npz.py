"""Files that nobody vouches for: each fault is named, nothing is unpickled, nothing unpacks without bound."""

import io
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.web.npz import MOST_BYTES, read_npz

Q, K = np.arange(8.0).reshape(2, 4), np.arange(12.0).reshape(3, 4)


def save(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def pack(members, method=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(text, version=1, length=None):
    """The beginning of an array's file with a header of one's own."""
    raw = text.encode("latin-1")
    size = len(raw) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + raw


def test_arrays_come_as_they_were_saved():
    given = read_npz(save(q=Q, k=K))
    assert np.array_equal(given.q, Q)
    assert np.array_equal(given.k, K)
    assert (given.v, given.not_finite) == (None, 0)


@pytest.mark.parametrize(
    "change",
    [
        np.asfortranarray,
        lambda array: array[::-1, ::-1],
        lambda array: np.repeat(array, 2, axis=1)[:, ::2],
        lambda array: array.astype(">f8"),
        lambda array: array.astype(np.float16),
        lambda array: array.astype(np.int64),
        lambda array: array.astype(np.uint8),
    ],
    ids=["fortran", "negative strides", "strided", "big endian", "float16", "int64", "uint8"],
)
def test_any_order_and_number_type_is_read(change):
    given = read_npz(save(q=change(Q), k=change(K), v=change(K)))
    assert np.array_equal(given.q, change(Q))
    assert np.array_equal(given.v, change(K))
    assert given.k.flags.c_contiguous
    assert given.k.dtype == np.float64


class Bomb:
    """What would tell if it were unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


HUGE = "{'descr': '<f8', 'fortran_order': False, 'shape': (8192, 1024), }\n"
ENDLESS = "{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999, 9999999999), }\n"
NEGATIVE = "{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 4), }\n"
NESTED = "{'descr': '<f8', 'fortran_order': False, 'shape': " + "(" * 900 + ")" * 900 + ", }\n"
CODE = "{'descr': __import__('os').abort(), 'fortran_order': False, 'shape': (3, 4), }\n"
OPEN = "{'descr': '<f8', 'fortran_order': False, 'shape': (3, 4), '\n"
TRUE = "{'descr': '<f8', 'fortran_order': False, 'shape': (True, 4), }\n"
ZEROS = "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "0" * 40 + "L, 4), \\\n"
SUBARRAY = "{'descr': ('<f8', (1000, 1000)), 'fortran_order': False, 'shape': (3, 4), }\n"

FAULTS = {
    "empty": (b"", "must be an .npz of NumPy"),
    "text": (b"hello", "must be an .npz of NumPy"),
    "bare npy": (npy(Q), "must be an .npz of NumPy"),
    "pickle": (pickle.dumps(Bomb()), "must be an .npz of NumPy"),
    "truncated": (save(q=Q, k=K)[:-30], "must be an .npz of NumPy"),
    "objects": (pack([("q.npy", npy(np.array([[Bomb()]], dtype=object))), ("k.npy", npy(K))]), "got dtype object"),
    "a pickle inside": (pack([("q.npy", pickle.dumps(Bomb())), ("k.npy", npy(K))]), "q must be an array in NumPy"),
    "other names": (save(queries=Q, keys=K), "must hold arrays named q and k, got 'queries.npy', 'keys.npy'"),
    "no k": (save(q=Q), "must hold arrays named q and k, got 'q.npy'"),
    "nothing": (pack([]), "must hold arrays named q and k, got nothing"),
    "path": (pack([("../q.npy", npy(Q)), ("k.npy", npy(K))]), "must hold arrays named q and k"),
    "many": (pack([(f"{i}.npy", b"") for i in range(17)]), "at most 16 arrays, each once, got 17"),
    "complex": (save(q=Q + 1j, k=K), "q must hold float16, float32, float64 or integers, got dtype complex128"),
    "text array": (save(q=Q.astype(str), k=K), "q must hold float16"),
    "booleans": (save(q=Q > 1, k=K), "q must hold float16"),
    "records": (save(q=np.zeros((2, 4), dtype=[("a", "f8")]), k=K), "q must hold float16"),
    "subarray": (pack([("q.npy", header(SUBARRAY)), ("k.npy", npy(K))]), "q must hold float16"),
    "long double": (save(q=Q.astype(np.longdouble), k=K), "q must hold float16"),
    "three axes": (save(q=Q[None], k=K), r"q must have the shape \[vectors, length\] of one head, got \[1, 2, 4\]"),
    "one axis": (save(q=Q[0], k=K), "q must have the shape"),
    "no rows": (save(q=Q[:0], k=K), "q must have the shape"),
    "lengths differ": (save(q=Q, k=K[:, :3]), "q and k must have vectors of one length, got 4 and 3"),
    "one key": (save(q=Q, k=K[:1]), "k must have 2 to 8192 keys, got 1"),
    "many keys": (save(q=Q[:, :1], k=np.zeros((8193, 1), np.uint8)), "k must have 2 to 8192 keys, got 8193"),
    "long vectors": (save(q=np.zeros((2, 1025)), k=np.zeros((2, 1025))), "a length of at most 1024, got 1025"),
    "values": (save(q=Q, k=K, v=K[:2]), r"v must have one vector per key, 3, .*got \[2, 4\]"),
    "many queries": (save(q=np.zeros((4096, 1), np.uint8), k=np.zeros((8192, 1), np.uint8)), "take fewer queries"),
    "no bytes": (pack([("q.npy", header(HUGE)), ("k.npy", npy(K))]), "q must have 67108864 bytes"),
    "endless": (pack([("q.npy", header(ENDLESS)), ("k.npy", npy(K))]), "at most 8388608 numbers together"),
    "negative": (pack([("q.npy", header(NEGATIVE)), ("k.npy", npy(K))]), "q must have the shape"),
    "nested": (pack([("q.npy", header(NESTED)), ("k.npy", npy(K))]), "q must be an array in NumPy's format"),
    "open": (pack([("q.npy", header(OPEN)), ("k.npy", npy(K))]), "q must be an array in NumPy's format"),
    "true": (pack([("q.npy", header(TRUE)), ("k.npy", npy(K))]), "q must have the shape"),
    "zeros": (pack([("q.npy", header(ZEROS)), ("k.npy", npy(K))]), "q must be an array in NumPy's format"),
    "code": (pack([("q.npy", header(CODE)), ("k.npy", npy(K))]), "q must be an array in NumPy's format"),
    "huge header": (pack([("q.npy", header(" " * 60000)), ("k.npy", npy(K))]), "q must be an array in NumPy's format"),
    "lying header": (pack([("q.npy", header("{}", 2, 2**32 - 1)), ("k.npy", npy(K))]), "q must be an array in NumPy"),
    "version": (pack([("q.npy", header("{}", 3)), ("k.npy", npy(K))]), "q must be an array in NumPy's format"),
    "bzip2": (pack([("q.npy", npy(Q)), ("k.npy", npy(K))], zipfile.ZIP_BZIP2), "q must be stored or deflated"),
    "too large": (bytes(MOST_BYTES + 1), "must be at most 16777216 bytes, got 16777217"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name):
    content, told = FAULTS[name]
    with pytest.raises(InvalidValueError, match=told):
        read_npz(content)


def test_duplicates_are_refused():
    with pytest.warns(UserWarning, match="Duplicate name"):
        content = pack([("q.npy", npy(Q)), ("q.npy", npy(K)), ("k.npy", npy(K))])
    with pytest.raises(InvalidValueError, match="each once, got 3"):
        read_npz(content)


def test_encrypted_members_are_refused():
    content = bytearray(pack([("q.npy", npy(Q)), ("k.npy", npy(K))], zipfile.ZIP_STORED))
    at = content.index(b"PK\x01\x02")
    content[at + 8] |= 1  # the flag in the directory
    with pytest.raises(InvalidValueError, match=r"must be an \.npz of NumPy, got .*encrypted"):
        read_npz(bytes(content))


def test_a_bomb_does_not_unpack():
    """A hundred mebibytes of zeros in a tenth of one: refused before much of it is there."""
    text = "{'descr': '|u1', 'fortran_order': False, 'shape': (1048576, 1000), }\n"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("q.npy", "w") as member:
        member.write(header(text))
        for _ in range(100):
            member.write(bytes(2**20))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("k.npy", npy(K))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidValueError, match="at most 8388608 numbers together"):
            read_npz(file.getvalue())
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_bytes_at_random_are_refused_or_read():
    rng = np.random.default_rng(0)
    good = save(q=Q, k=K)
    refused = 0
    for _ in range(400):
        content = bytearray(good)
        for at in rng.integers(0, len(content), 1 + rng.integers(0, 8)):
            content[at] = rng.integers(0, 256)
        try:
            read_npz(bytes(content))
        except InvalidValueError:
            refused += 1
    assert 100 < refused < 400
