"""Checks host, origin and token of every request, and sets the safety headers of every response."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import socket
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from sqrtdk.errors import InvalidValueError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_SHORTEST_TOKEN, _LONGEST_TOKEN = 16, 256
_WILDCARDS = ("0.0.0.0", "::")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a server there.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_token(host: str, token: str | None) -> None:
    """Refuse a host that others can reach without a token, and tokens that can be guessed or do not fit a header.

    Raises:
        InvalidValueError: naming what to give.
    """
    if token is None:
        if not is_loopback(host):
            raise InvalidValueError(
                "token",
                f"must be given for host {host}, which other machines can reach; "
                "give one of 16 characters or more, or leave the host at 127.0.0.1",
            )
        return
    if not _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN or not re.fullmatch(r"[A-Za-z0-9._~-]+", token):
        raise InvalidValueError(
            "token",
            f"must be {_SHORTEST_TOKEN} to {_LONGEST_TOKEN} letters, digits, '.', '_', '~' or '-', "
            f"got {len(token)} characters",
        )


class Gate:
    """Gate that passes a request on to the app if its host, its origin and its token are right.

    Args:
        app: what answers.
        host: where the server listens; decides which names it goes by.
        token: what every request must bring, in a header `Authorization: Bearer …`, in a cookie, or once as `?token=`,
            which is answered with that cookie; None: nothing.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None = None) -> None:
        require_token(host, token)
        self._app = app
        self._token = token
        self._any_address = host in _WILDCARDS
        bound = f"[{host}]" if ":" in host else host.lower()
        self._names = {bound, "localhost"}
        if is_loopback(host):
            self._names |= {"127.0.0.1", "[::1]"}
        if self._any_address:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        headers = _Headers(scope)
        refusal = self._refuse_foreign(scope, headers)
        if refusal is not None:
            await _answer(send_guarded, 403, refusal)
        elif self._token is None or self._is_known(scope, headers):
            await self._app(scope, receive, send_guarded)
        else:
            await self._admit(scope, send_guarded)

    def _refuse_foreign(self, scope: Scope, headers: _Headers) -> str | None:
        host = headers.only("host")
        match = None if host is None else _HOST.fullmatch(host)
        if host is None or match is None or not self._goes_by(match[1].lower()):
            return "the Host of the request is not this server's: open it by the address that it printed"
        origin = headers.get("origin")
        if origin and origin not in ([f"http://{host}"], [f"https://{host}"]):
            return "the request comes from another site's page"
        # Browsers say where a request without an Origin comes from; a link from elsewhere to a page is fine.
        site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
        is_visit = mode == ["navigate"] and not scope["path"].startswith("/api/")
        if site and site[-1] in ("cross-site", "same-site") and not is_visit:
            return "the request comes from another site's page"
        return None

    def _goes_by(self, name: str) -> bool:
        if name in self._names:
            return True
        if not self._any_address:
            return False
        # No name server can make an address mean another machine.
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _is_known(self, scope: Scope, headers: _Headers) -> bool:
        bearer = headers.only("authorization") or ""
        if bearer.startswith("Bearer ") and self._is_token(bearer.removeprefix("Bearer ")):
            return not any(name == "token" for name, _ in _read_query(scope))
        # Cookies of other programs on this machine come along, in whatever form: only ours is searched for.
        cookies = [part.strip().partition("=") for part in (headers.only("cookie") or "").split(";")]
        given = [value for name, _, value in cookies if name == _cookie_name(scope)]
        if not any(hmac.compare_digest(value.encode(), self._seal().encode()) for value in given):
            return False
        return not any(name == "token" for name, _ in _read_query(scope))

    async def _admit(self, scope: Scope, send: Send) -> None:
        """Turn a right `?token=` into a cookie and an address without it."""
        query = _read_query(scope)
        given = [value for name, value in query if name == "token"]
        if scope["method"] != "GET" or len(given) != 1 or not self._is_token(given[0]):
            await _answer(send, 401, "this server asks for its token: open the address with ?token=… that it printed")
            return
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        # A path of two slashes would lead to another host, and browsers take a backslash for a slash.
        target = "/" + scope["path"].lstrip("/") + (f"?{rest}" if rest else "")
        if "\\" in target or not re.fullmatch(r"[\x21-\x7e]+", target):
            target = "/"
        cookie = f"{_cookie_name(scope)}={self._seal()}; Path=/; HttpOnly; SameSite=Strict"
        await _answer(send, 303, "", {"location": target, "set-cookie": cookie})

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _seal(self) -> str:
        # The cookie proves the token and does not hold it.
        assert self._token is not None
        return hmac.new(self._token.encode(), b"sqrtdk serve", hashlib.sha256).hexdigest()


def _cookie_name(scope: Scope) -> str:
    # Cookies do not know ports: two servers of one machine must not overwrite each other's.
    return f"sqrtdk_{(scope.get('server') or ('', 0))[1]}"


def _read_query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


class _Headers:
    def __init__(self, scope: Scope) -> None:
        self._pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]

    def get(self, name: str) -> list[str]:
        return [value for own, value in self._pairs if own == name]

    def only(self, name: str) -> str | None:
        """Return the value of a header that stands there once."""
        values = self.get(name)
        return values[0] if len(values) == 1 else None


async def _answer(send: Send, status: int, error: str, headers: dict[str, str] | None = None) -> None:
    body = json.dumps({"error": error}).encode() if error else b""
    own = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in own.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
