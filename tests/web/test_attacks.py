"""Ten thousand malformed requests: the server stays up, answers as before, and is no larger for it."""

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from web_server import serving

pytestmark = pytest.mark.long

REQUESTS = 10_000
ALLOWED_KIB = 6 * 1024
NAMES = (
    "d_k",
    "n",
    "t",
    "policy",
    "parameter",
    "dtype",
    "seed",
    "mean_q",
    "correlation",
    "source",
    "scores",
    "distribution",
)
VALUES = (
    *(
        "",
        "0",
        "-1",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "9" * 400,
        "0x10",
        "1_000",
        "٣",
        "%00",
        "%ff%fe",
        "None",
        "[]",
        "{}",
    ),
    *(
        "../../etc/passwd",
        "<script>",
        "' OR 1=1",
        "1,2,3",
        ",",
        "a" * 2000,
        "sqrt",
        "float128",
        "object",
        "%F0%9F%A7%AA",
    ),
)
PATHS = (
    "/",
    "/api/explore",
    "/api/expected",
    "/api/audit",
    "/api/runs",
    "/api/curves",
    "/api/options",
    "/static/dom.js",
)


def random_bytes(rng):
    return rng.randbytes(rng.randint(0, 400))


def broken_line(rng):
    return rng.choice(
        [
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /\r\n\r\n",
            b"\r\n\r\n\r\n",
            b"GET " + b"/" * rng.randint(1, 5000) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 70000 + b"\r\n\r\n",
            b"POST /api/explore HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
            b"POST /api/explore HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
            b"POST /api/explore HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
            b"POST /api/explore HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\nzz\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ]
    )


def extreme_query(rng):
    pairs = [f"{rng.choice(NAMES)}={rng.choice(VALUES)}" for _ in range(rng.randint(1, 5))]
    return (
        f"GET {rng.choice(PATHS)}?{'&'.join(pairs)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )


def broken_body(rng):
    body = rng.choice(
        [json.dumps({"d_k": 10**9}).encode(), b"PK\x03\x04" + rng.randbytes(200), rng.randbytes(500), b"{"]
    )
    declared = rng.choice([len(body), len(body) + 50, 2**40, 0])
    head = f"POST /api/explore HTTP/1.1\r\nHost: localhost\r\nContent-Length: {declared}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def cut_off(rng):
    whole = b"GET /api/explore?n=8 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    return whole[: rng.randint(0, len(whole) - 1)]


KINDS = (random_bytes, broken_line, extreme_query, broken_body, cut_off)


def send(port, seed):
    """Send one request, read what comes and hang up; what the server does to the connection is its own affair."""
    rng = random.Random(seed)
    request = KINDS[seed % len(KINDS)](rng)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(request)
            if KINDS[seed % len(KINDS)] in (random_bytes, cut_off):
                connection.shutdown(socket.SHUT_WR)
            # Who declared more than he sent gets no answer yet, and hangs up.
            connection.settimeout(5.0 if request.startswith(b"GET") else 0.1)
            return connection.recv(200)
    except (ConnectionError, TimeoutError, OSError):
        return b""


def settle(running, files, threads):
    """Wait until connections and threads are gone again."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if running.files() <= files and running.status("Threads") <= threads:
            return
        time.sleep(0.2)


def test_ten_thousand_malformed_requests_change_nothing():
    with serving() as running, ThreadPoolExecutor(4) as pool:
        right = running.read("api/explore?n=64")
        # Everything that is loaded, started or allocated once is there after these: each worker has its thread.
        for path in ("api/explore", "api/expected?d_k=4&n=16", "api/audit", "api/runs", "audit"):
            assert running.read(path)
        list(pool.map(lambda seed: send(running.port, seed), range(-1500, 0)))
        time.sleep(11)  # idle worker threads end
        files, threads, size = running.files(), running.status("Threads"), running.status("VmRSS")
        answers = list(pool.map(lambda seed: send(running.port, seed), range(REQUESTS)))
        time.sleep(11)
        settle(running, files, threads)
        assert running.process.poll() is None
        assert running.files() <= files + 1
        assert running.status("Threads") <= threads
        assert running.status("VmRSS") - size < ALLOWED_KIB
        assert running.read("api/explore?n=64") == right  # last: it starts a thread that stays for a while
        codes = {answer.split(b" ")[1] for answer in answers if answer.startswith(b"HTTP/1.1 ")}
        assert {b"400", b"403", b"404", b"405"} <= codes
        assert b"500" not in codes


def test_connections_that_say_nothing_are_closed():
    with serving() as running:
        silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(30)]
        for number, connection in enumerate(silent):
            connection.sendall([b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "][number % 3])
        assert running.read("api/options")
        for connection in silent:
            connection.settimeout(40)
            with suppress(ConnectionResetError):
                assert connection.recv(100) == b""
            connection.close()


def test_more_connections_than_there_may_be_are_turned_away():
    with serving() as running:
        held = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(80)]
        time.sleep(0.5)
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as one_more:
            one_more.sendall(b"GET /api/options HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one_more.recv(100).startswith(b"HTTP/1.1 503")
        for connection in held:
            connection.close()
        time.sleep(0.5)
        assert running.read("api/options")
