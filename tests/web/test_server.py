"""The server itself: it says where it is, refuses what it must, and ends when it is told to."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest

import sqrtdk.web
from sqrtdk.commands.cli import main
from sqrtdk.errors import InvalidValueError, MissingExtraError
from sqrtdk.web.server import serve
from web_server import serving


def test_a_taken_port_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidValueError, match=f"port must be free, got {port}, which another program uses"):
            serve(port=port)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0"], "--token must be given for host 0.0.0.0"),
        (["--host", "no.such.host.invalid", "--token", "x" * 16], "--host must be"),
        (["--host", "192.0.2.1", "--token", "x" * 16], "--host must be an address of this machine, got '192.0.2.1'"),
        (["--port", "99999"], "--port must be from 0 to 65535, got 99999"),
        (["--token", "short"], "--token must be 16 to 256"),
        (["--audit", "nowhere.json"], "--audit must be what `sqrtdk audit --json` prints, got nowhere.json"),
    ],
)
def test_the_command_line_refuses_in_its_own_words(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"sqrtdk: {told}")


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "plotly"])
def test_a_missing_extra_is_named(package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    with pytest.raises(
        MissingExtraError, match=rf'{package} is not installed; it comes with: pip install "sqrtdk\[web\]"'
    ):
        sqrtdk.web.serve  # noqa: B018


def test_the_pages_load_with_the_server_alone():
    script = (
        "import sys, sqrtdk.web; print([name for name in ('starlette', 'uvicorn', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_bad_chunk_after_the_answer_ends_the_connection_without_a_traceback():
    head = b"GET /api/options HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"
    with serving() as running:  # which checks that nothing was told on stderr
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
            connection.sendall(head)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.sendall(b"ZZZ\r\n")
            with contextlib.suppress(ConnectionError):
                while connection.recv(65536):
                    pass
        assert running.read("api/options")


@pytest.mark.long
def test_large_answers_do_not_hold_up_a_small_one():
    with serving() as running, ThreadPoolExecutor(12) as pool:
        running.read("api/explore?n=16&d_k=4")
        large = [pool.submit(running.read, f"api/explore?n=8192&d_k=1024&seed={seed}", 60.0) for seed in range(12)]
        time.sleep(0.3)
        waits = []
        for seed in range(3):
            began = time.monotonic()
            running.read(f"api/explore?n=16&d_k=4&seed={seed}")
            waits.append(time.monotonic() - began)
        assert not all(answer.done() for answer in large), "the large ones must still be under way"
        assert min(waits) < 2.0
        for answer in large:
            try:
                answer.result()
            except HTTPError as refused:  # the server is busy
                refused.close()


@pytest.mark.slow
def test_it_answers_and_ends_within_two_seconds_of_ctrl_c():
    token = "a-token-for-the-test"
    with serving("--token", token) as running:
        assert running.address.startswith("http://127.0.0.1:")
        assert running.address.endswith(f"/?token={token}")
        with pytest.raises(HTTPError, match="401"):
            running._replace(address=running.address.split("?")[0]).read("api/options")
        lines = ("GET /api/explore HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}", "Connection: close")
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"\r\nserver:" not in head.lower()
        assert json.loads(body)["chosen"] == "sqrt"
        idle = socket.create_connection(("127.0.0.1", running.port))
        idle.sendall(b"GET / HTTP/1.1\r\n")
        began = time.monotonic()
    idle.close()
    assert time.monotonic() - began < 2.5


@pytest.mark.slow
def test_a_broken_body_is_answered_once():
    """The server must not complain on stderr, which `serving` looks at."""
    request = b"POST /api/explore HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n"
    with serving() as running, socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        connection.sendall(request)
        assert connection.recv(200).startswith(b"HTTP/1.1 400")
