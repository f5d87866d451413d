"""Server of the local pages: one socket, bounded connections and times, a clear error for a taken port, a quick end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sqrtdk import checks
from sqrtdk.errors import InvalidValueError
from sqrtdk.web.app import make_app
from sqrtdk.web.explore_query import Experiment
from sqrtdk.web.measurement import measure
from sqrtdk.web.vectors import sample
from sqrtdk.web.words_query import Reader

__all__ = ["serve"]

_MOST_CONNECTIONS = 64
_PATIENCE = 10.0
# Checks, at that interval, of an answer that a client does not read.
_MOST_LOOKS = 6
_GRACE_SECONDS = 1


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    store: Path | None = None,
    audit: Path | None = None,
    reader: Reader | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the pages until Ctrl-C.

    Args:
        host: where to listen; other than this machine alone needs a token.
        port: 0 takes any that is free.
        token: what every request must bring.
        store: SQLite file of runs, or file of a monitor (`.jsonl`), for the Runs page, which need not exist yet.
        audit: JSON of `sqrtdk audit --json` for the Audit page; the shipped one of MiniLM if None.
        reader: model that reads sentences for the Words page; recorded sentences alone if None.
        announce: called with the address, token included, once the server answers.

    Raises:
        InvalidValueError: the port is taken, the host is not this machine's, a token is missing, a file is unfit.
        MissingExtraError: the extra `web` is not installed.
    """
    app = make_app(host, token, store, audit, reader)
    measure(Experiment(), sample(Experiment()))  # the first answer would take three times as long as those that follow
    with _bind(host, port) as listening:
        # h11 also where a faster protocol is installed: it is the one that is tested.
        config = uvicorn.Config(
            app,
            http=_PunctualProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=int(_PATIENCE),
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        # A connection that came in the last moment is cut off; that is no error to tell of.
        logging.getLogger("uvicorn.error").addFilter(lambda record: "graceful shutdown exceeded" not in record.msg)
        server = _AnnouncedServer(config)
        address = f"http://{_write_host(host)}:{listening.getsockname()[1]}/"
        server.on_start = lambda: announce(address + (f"?token={token}" if token else ""))
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn has ended in order, and then raises it again
            return


def _bind(host: str, port: int) -> socket.socket:
    checks.integer("port", port, 0, 65535)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
    except PermissionError:
        raise InvalidValueError("port", f"must be one that this user may open, got {port}; try 8000") from None
    except socket.gaierror as error:
        raise InvalidValueError("host", f"must be a name or address of this machine, got {host!r} ({error})") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            says = f"must be free, got {port}, which another program uses; give another, or 0 for any"
            raise InvalidValueError("port", says) from None
        raise InvalidValueError(
            "host", f"must be an address of this machine, got {host!r} ({error.strerror})"
        ) from None


def _write_host(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return socket.gethostname()
    return f"[{host}]" if address.version == 6 else host


class _AnnouncedServer(uvicorn.Server):
    on_start: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()


class _PunctualProtocol(H11Protocol):
    """Closes connections that send no whole request, and those that do not read their answer."""

    _timer: asyncio.TimerHandle | None = None
    _answered = 0
    _answered_before = -1
    _looks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(_PATIENCE, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer is under way already: there is nothing left to say
            self.transport.abort()
        if self.cycle is not None:  # its body is broken and answered: the application has nothing left to say
            self.cycle.disconnected = True

    def on_response_complete(self) -> None:
        self._answered += 1
        self._looks = 0
        super().on_response_complete()

    def _look(self) -> None:
        is_busy = self.cycle is not None and not self.cycle.response_complete
        self._looks = self._looks + 1 if is_busy else 0
        is_idle = not is_busy and self._answered == self._answered_before
        if is_idle or self._looks > _MOST_LOOKS:
            self.transport.abort()
            return
        self._answered_before = self._answered
        self._timer = self.loop.call_later(_PATIENCE, self._look)
