"""Client that calls an ASGI application directly, as a server would, and keeps its replies."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode


@dataclass(frozen=True)
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for own, value in self.headers if own == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, app: Any, **headers: str) -> None:
        self.app = app
        self.headers = {"host": "127.0.0.1:8000", **headers}

    def get(self, path: str, query: dict[str, Any] | str = "", **headers: str) -> Reply:
        return self.ask("GET", path, query, **headers)

    def ask(self, method: str, path: str, query: dict[str, Any] | str = "", body: bytes = b"", **headers: str) -> Reply:
        text = query if isinstance(query, str) else urlencode(query)
        given = {name.replace("_", "-"): value for name, value in {**self.headers, **headers}.items() if value}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": text.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8000),
        }
        return asyncio.run(self._call(scope, body))

    async def _call(self, scope: dict[str, Any], body: bytes) -> Reply:
        parts = [body[at : at + 65536] for at in range(0, max(len(body), 1), 65536)]
        messages: list[Any] = []

        async def receive() -> Any:
            if not parts:
                await asyncio.Event().wait()  # the client stays connected
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: Any) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        start, *rest = messages
        headers = [(name.decode().lower(), value.decode("latin-1")) for name, value in start["headers"]]
        return Reply(start["status"], headers, b"".join(part.get("body", b"") for part in rest))
