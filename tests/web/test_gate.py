"""Gate of the server: hosts, origins, tokens and the headers of every response."""

import re

import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.web import make_app
from sqrtdk.web.gate import HEADERS, Gate
from web_client import Client

TOKEN = "0123456789abcdefghij"


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"passed"})


def gate(host="127.0.0.1", token=None):
    return Client(Gate(answer, host, token))


def test_every_answer_has_the_headers_of_safety():
    client = Client(make_app())
    for path in ("/", "/api/options", "/api/nothing", "/static/style.css", "/api/explore?n=0"):
        reply = client.get(*path.split("?"))
        for name, value in HEADERS.items():
            values = [own for header, own in reply.headers if header == name]
            assert len(values) == 1, (path, name)
            assert name == "cache-control" or values == [value]
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "script-src 'self';" in policy
    assert client.get("/", host="evil.example").header("x-content-type-options") == "nosniff"
    assert client.get("/api/options").header("cache-control") == "no-store"


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "localhost:9999"])
def test_names_of_this_machine_are_answered(host):
    assert gate().get("/", host=host).body == b"passed"


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:8000",
            "evil.example:8000",
            "10.0.0.1:8000",
        ),
        *(
            "localhost@evil.example",
            "127.0.0.1:8000:8000",
            "127.0.0.1:",
            "localhost.",
            "0.0.0.0",
            "[::1",
            "",
            " ",
            "%00",
        ),
        *("127.0.0.1,evil.example", "127.0.0.1:80x", "2130706433", "[::2]", "loc\xe4lhost"),
    ],
)
def test_foreign_hosts_are_refused(host):
    reply = gate().get("/", host=host)
    assert reply.status == 403
    assert "Host" in reply.json["error"]


def test_two_hosts_are_refused():
    scope_headers = [(b"host", b"localhost"), (b"host", b"evil.example")]
    client = gate()
    app = client.app

    async def doubled(scope, receive, send):
        await app({**scope, "headers": scope_headers}, receive, send)

    client.app = doubled
    assert client.get("/").status == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"origin": "http://127.0.0.1:8001"}, 403),
        ({"origin": "http://localhost:8000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "same-origin", "sec_fetch_mode": "cors"}, 200),
        ({"sec_fetch_site": "none", "sec_fetch_mode": "navigate"}, 200),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}, 200),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}, 403),
        ({"sec_fetch_site": "same-site", "sec_fetch_mode": "cors"}, 403),
    ],
)
def test_pages_of_other_sites_may_link_here_and_nothing_else(headers, status):
    assert gate().get("/", **headers).status == status
    if headers.get("sec_fetch_mode") == "navigate" and headers["sec_fetch_site"] == "cross-site":
        assert gate().get("/api/explore", **headers).status == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "10.0.0.1"])
def test_a_host_that_others_reach_needs_a_token(host):
    with pytest.raises(
        InvalidValueError, match=f"token must be given for host {re.escape(host)}, which other machines"
    ):
        make_app(host)
    assert make_app(host, TOKEN)


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "x" * 257, "with space in it 16", "semi;colon;in;it;16", "ümlautümlautümlaut"]
)
def test_tokens_that_can_be_guessed_or_do_not_fit_are_refused(token):
    with pytest.raises(InvalidValueError, match="token must be 16 to 256 letters, digits"):
        make_app(token=token)


def test_without_its_token_nothing_is_answered():
    client = Client(make_app(token=TOKEN))
    for path in ("/", "/static/style.css", "/static/plotly.min.js", "/api/options", "/api/nothing", "/audit"):
        assert client.get(path).status == 401, path
    for given in ("", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\xff" * 20):
        assert client.get("/api/options", authorization=f"Bearer {given}").status == 401
        assert client.get("/", {"token": given}).status == 401
    assert client.get("/", f"token={TOKEN}&token={TOKEN}").status == 401
    assert client.ask("POST", "/api/explore", {"token": TOKEN}).status == 401


def test_a_token_opens_by_header_or_once_by_the_address():
    client = Client(make_app(token=TOKEN))
    assert client.get("/api/options", authorization=f"Bearer {TOKEN}").status == 200
    first = client.get("/audit", {"token": TOKEN, "a": "1 2"})
    assert (first.status, first.header("location")) == (303, "/audit?a=1+2")
    assert first.header("cache-control") == "no-store"
    name_and_value, *attributes = first.header("set-cookie").split("; ")
    assert set(attributes) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert TOKEN not in name_and_value
    assert client.get("/api/options", cookie=f"other=1; {name_and_value}").status == 200
    # Cookies of other programs on the same host, in whatever form.
    for foreign in ('a="b', "a=b=c", "{}", "=;;", 'x="\\', "a b=[1, 2]"):
        assert client.get("/api/options", cookie=f"{foreign}; {name_and_value}").status == 200, foreign
    assert client.get("/api/options", cookie=name_and_value[:-1]).status == 401
    assert client.get("/api/options", cookie="sqrtdk_8000=\xff").status == 401
    # An address that still holds the token is cleaned, cookie or not.
    assert client.get("/", {"token": TOKEN}, cookie=name_and_value).status == 303


@pytest.mark.parametrize("path", ["//evil.example/x", "/\\evil.example", "/a\r\nset-cookie: x"])
def test_the_way_back_never_leads_elsewhere(path):
    location = gate(token=TOKEN).get(path, {"token": TOKEN}).header("location")
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))
    assert "\r" not in location


def test_behind_an_open_address_numbers_pass_and_names_do_not():
    client = gate("0.0.0.0", TOKEN)
    bearer = f"Bearer {TOKEN}"
    assert client.get("/", host="192.168.7.7:8000", authorization=bearer).status == 200
    assert client.get("/", host="[fe80::1]:8000", authorization=bearer).status == 200
    assert client.get("/", host="evil.example", authorization=bearer).status == 403


def test_sockets_of_the_web_are_closed():
    import asyncio

    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Gate(answer, "127.0.0.1")({"type": "websocket", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
