"""Application of the local pages: files as they are, and answers as JSON from a bounded number of threads."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sqrtdk import scales
from sqrtdk.audits import read_audit
from sqrtdk.errors import InvalidValueError, SqrtdkError, unknown_name
from sqrtdk.records.json import plain
from sqrtdk.report.shell import read_shared
from sqrtdk.report.words import read_sentences
from sqrtdk.web.audit_view import view_audit
from sqrtdk.web.explore_query import BOUNDS, DISTRIBUTIONS, DTYPES, MOST_SCORES, POLICIES, QUERIES, Experiment
from sqrtdk.web.gate import Gate
from sqrtdk.web.measurement import expect, measure
from sqrtdk.web.pages import PAGES, read_plotly, render_page
from sqrtdk.web.presets import PRESETS
from sqrtdk.web.runs import compare, delete, export, list_runs, read_curves, read_maps
from sqrtdk.web.vectors import sample
from sqrtdk.web.words_query import HOW_TO_GET_A_MODEL, Reader, read_place, read_text, require_reader
from sqrtdk.wording.quantities import AUDITED, EXPLORED

__all__ = ["make_app"]

_JSON = "application/json"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_SHARED = (
    "numbers.js",
    "sampled_row.js",
    "svg_chart.js",
    "cause.js",
    "words.js",
    "replay.js",
    "guess.js",
    "teach.js",
    "teaching.css",
)
_WAITING_SECONDS = 15.0
# Sizes that take some ten milliseconds, the usual setting of the page among them.
_SMALL_PRODUCTS = QUERIES * 1024 * 64
_MOST_BYTES = 1 << 17
"""Bytes of a body: a thousand keys of runs take 19 thousand."""


def make_app(
    host: str = "127.0.0.1",
    token: str | None = None,
    store: Path | None = None,
    audit: Path | None = None,
    reader: Reader | None = None,
) -> ASGIApp:
    """Return the application behind its gate; it reads only its own files and the given ones.

    It changes one thing: `POST /api/delete` deletes runs of the store, for requests of its own pages.

    Args:
        host: where it will listen, which decides the Host headers that it answers to.
        token: see `Gate`.
        store: the SQLite file of runs, or a file that a monitor writes, which need not exist yet.
        audit: an audit as JSON; None for the shipped one.
        reader: the model of the Words page; None shows recorded sentences alone.

    Raises:
        InvalidValueError: the audit cannot be read, or a token is missing or unfit.
    """
    read_audit(audit)
    site = _Site(store, audit, reader)
    routes = [Route(page.path, _serve(render_page(page), "text/html"), methods=["GET"]) for page in PAGES]
    routes += [Route(f"/static/{name}", _serve_file(name), methods=["GET"]) for name in _list_static()]
    routes += [
        Route("/api/options", site.options, methods=["GET"]),
        Route("/api/explore", site.explore, methods=["GET"]),
        Route("/api/expected", site.expected, methods=["GET"]),
        Route("/api/audit", site.audit, methods=["GET"]),
        Route("/api/sentences", site.sentences, methods=["GET"]),
        Route("/api/words", site.words, methods=["GET"]),
        Route("/api/head", site.head, methods=["GET"]),
        Route("/api/runs", site.runs, methods=["GET"]),
        Route("/api/curves", site.curves, methods=["GET"]),
        Route("/api/maps", site.maps, methods=["GET"]),
        Route("/api/compare", site.compare, methods=["GET"]),
        Route("/api/export", site.export, methods=["GET"]),
        Route("/api/delete", site.delete, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {SqrtdkError: _explain, HTTPException: _explain_http, Exception: _apologise}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Gate(app, host, token)


class _Site:
    """Endpoints with the files that they may read and the threads that compute answers."""

    def __init__(self, store: Path | None, audit: Path | None, reader: Reader | None) -> None:
        self._store, self._audit, self._reader = store, audit, reader
        # Large answers, slow expectations and files never hold up the small answers.
        self._small, self._large, self._slow, self._files, self._words = (
            _Worker(name) for name in ("small", "large", "expected", "files", "words")
        )

    async def options(self, request: Request) -> Response:
        _read_query(request, ())
        return _json(_list_options())

    async def explore(self, request: Request) -> Response:
        asked = Experiment.read(_read_query(request))
        products = QUERIES * asked.n * asked.d_k
        worker = self._small if products <= _SMALL_PRODUCTS else self._large
        return await self._compute(request, worker, partial(_explore, asked))

    async def expected(self, request: Request) -> Response:
        asked = Experiment.read(_read_query(request))
        return await self._compute(request, self._slow, partial(expect, asked))

    async def audit(self, request: Request) -> Response:
        _read_query(request, ())
        return await self._compute(request, self._files, lambda: _show_audit(self._audit))

    async def sentences(self, request: Request) -> Response:
        _read_query(request, ())
        model = None if self._reader is None else self._reader.name
        return _json({**read_sentences(), "model": model, "how": HOW_TO_GET_A_MODEL})

    async def words(self, request: Request) -> Response:
        text = read_text(_read_query(request, ("text",)))
        return await self._compute(request, self._words, lambda: require_reader(self._reader).read(text))

    async def head(self, request: Request) -> Response:
        query = _read_query(request, ("text", "layer", "head"))
        text, layer, head = read_text(query), *(read_place(query, name) for name in ("layer", "head"))
        work = partial(_read_head, self._reader, text, layer, head)
        return await self._compute(request, self._words, work)

    async def runs(self, request: Request) -> Response:
        query = _read_query(request, ("version",))
        return await self._compute(request, self._files, partial(list_runs, self._store, query.get("version")))

    async def curves(self, request: Request) -> Response:
        keys = _read_keys(request)
        return await self._compute(request, self._files, lambda: {"curves": read_curves(self._store, keys)})

    async def maps(self, request: Request) -> Response:
        keys = _read_keys(request)
        return await self._compute(request, self._files, lambda: {"maps": read_maps(self._store, keys)})

    async def compare(self, request: Request) -> Response:
        return await self._compute(request, self._files, partial(compare, self._store, _read_keys(request)))

    async def export(self, request: Request) -> Response:
        what = _read_query(request, ("what",)).get("what", "runs")
        if what not in ("runs", "curves"):
            raise unknown_name("export", what[:40], ["runs", "curves"], "what")
        work = partial(export, self._store, curves=what == "curves")
        response = await self._compute(request, self._files, work)
        response.headers["content-disposition"] = f'attachment; filename="{what}.csv"'
        return response

    async def delete(self, request: Request) -> Response:
        _read_query(request, ())
        # Other sites' pages cannot send this type without being asked first, and browsers add an Origin that the gate
        # has compared: without one the request is not from a page.
        if request.headers.get("content-type") != _JSON:
            raise HTTPException(415, "the body must be of type application/json")
        if "origin" not in request.headers:
            raise HTTPException(
                403, "runs are deleted by the page Runs, whose requests have an Origin, or by the command"
            )
        keys = _parse_keys(await _read_body(request))
        return await self._compute(request, self._files, partial(delete, self._store, keys))

    async def _compute(self, request: Request, worker: _Worker, work: Callable[[], dict[str, Any] | bytes]) -> Response:
        try:
            async with asyncio.timeout(_WAITING_SECONDS):
                await worker.free.acquire()
        except TimeoutError:
            raise HTTPException(503, "the server is busy; ask again") from None
        try:
            if await request.is_disconnected():  # a newer question has taken this one's place
                return Response(status_code=499)
            began = time.perf_counter()
            body, kind = await asyncio.get_running_loop().run_in_executor(worker.thread, lambda: _encode(work()))
            took = 1000.0 * (time.perf_counter() - began)
        finally:
            worker.free.release()
        return Response(body, headers={"server-timing": f"compute;dur={took:.1f}"}, media_type=kind)


class _Worker:
    """One lasting thread and a queue for it; threads that come and go would leave their memory behind."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, f"sqrtdk-{name}")
        self.free = asyncio.Lock()


def _read_head(reader: Reader | None, text: str, layer: int, head: int) -> dict[str, Any]:
    return {"nats": require_reader(reader).read_head(text, layer, head)}


def _explore(asked: Experiment) -> dict[str, Any]:
    return measure(asked, sample(asked))


def _show_audit(path: Path | None) -> dict[str, Any]:
    return view_audit(read_audit(path)) | {
        "source": "the audit of all-MiniLM-L6-v2 that comes with sqrtdk" if path is None else path.name,
        "quantities": [quantity._asdict() for quantity in AUDITED],
    }


def _list_options() -> dict[str, Any]:
    dtypes = [name for name in DTYPES if name != "bfloat16" or importlib.util.find_spec("ml_dtypes")]
    policies = []
    for name, bounds in POLICIES.items():
        kind = scales.policy_type(name)
        policies.append(
            {
                "name": name,
                "formula": kind.formula,
                "source": kind.source,
                "about": (kind.__doc__ or "").strip().split("\n")[0],
                "parameter": None if bounds is None else bounds._asdict(),
            }
        )
    return {
        "bounds": {name: bounds._asdict() for name, bounds in BOUNDS.items()},
        "usual": {"policy": "sqrt", "distribution": "normal", "dtype": "float64", "source": "random"},
        "policies": policies,
        "distributions": list(DISTRIBUTIONS),
        "dtypes": dtypes,
        "queries": QUERIES,
        "most_scores": MOST_SCORES,
        "presets": [preset._asdict() for preset in PRESETS],
        "quantities": [quantity._asdict() for quantity in EXPLORED],
        "version": version("sqrtdk"),
    }


def _read_query(request: Request, names: tuple[str, ...] | None = None) -> dict[str, str]:
    """Return the query, each name once; restricted to the given names, if any are given."""
    pairs = request.query_params.multi_items()
    query = dict(pairs)
    if len(query) < len(pairs):
        raise InvalidValueError("each parameter must be given once, got one of them several times")
    unknown = [name for name in query if names is not None and name not in names]
    if unknown:
        raise InvalidValueError(f"unknown parameter {unknown[0][:40]!r}")
    return query


def _read_keys(request: Request) -> list[str]:
    return [key for key in _read_query(request, ("keys",)).get("keys", "").split(",") if key]


async def _read_body(request: Request) -> bytes:
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise HTTPException(413, f"the body must have at most {_MOST_BYTES} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the body is not complete") from None
    return body


def _parse_keys(body: bytes) -> list[str]:
    """Return the keys of a body `{"keys": ["…", …]}`."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    keys = content.get("keys") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise InvalidValueError('the body must be {"keys": [...]} with keys of runs as strings, got something else')
    return keys


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(plain(content), allow_nan=False, separators=(",", ":")).encode()


def _encode(content: dict[str, Any] | bytes) -> tuple[bytes, str]:
    return (content, "text/csv") if isinstance(content, bytes) else (_dump(content), _JSON)


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(_dump(content), status, media_type=_JSON)


# Not plain functions: Starlette would run those in threads of their own.
async def _explain(request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 400)


async def _explain_http(request: Request, error: HTTPException) -> Response:
    response = _json({"error": str(error.detail)}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _apologise(request: Request, error: Exception) -> Response:
    return _json({"error": "the server failed on this request; its terminal has the details"}, 500)


def _list_static() -> list[str]:
    own = [file.name for file in (resources.files("sqrtdk.web") / "static").iterdir()]
    return [name for name in [*own, *_SHARED, "plotly.min.js"] if not name.endswith(".html")]


def _serve_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint for one file, read now: a request never names a path."""
    if name == "plotly.min.js":
        content = read_plotly()
    elif name in _SHARED:
        content = read_shared(name).encode()
    else:
        content = (resources.files("sqrtdk.web") / "static" / name).read_bytes()
    return _serve(content, _TYPES[Path(name).suffix])


def _serve(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def answer(request: Request) -> Response:
        # Asked for again each time, and answered with "not modified": a new version is never mixed with an old one.
        headers = {"etag": tag, "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return answer
