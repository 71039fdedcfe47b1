"""The security set: what an attacker on the network, or a web page in the user's browser, would try first."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import ollama
import openai
import pytest

from moe_proxy.access import key_digest
from moe_proxy.config import OPENABLE_ROUTES, Settings
from moe_proxy.proxy.context import Limits, SecurityPolicy
from moe_proxy.proxy.server import NAMED_OPENABLE, OPENABLE
from tests.support.surface import surface

KEY = "sk-aaaaaaaaaaaaaaaa"
KEYS = SecurityPolicy(key_digests=(key_digest("sk-other"), key_digest(KEY)))
CHAT: Any = {"model": "planted-moe", "messages": [{"role": "user", "content": "write code"}], "stream": False}
BODY = json.dumps(CHAT).encode()


def _request(target: str, *headers: str, body: bytes = BODY, method: str = "POST") -> bytes:
    lines = [
        f"{method} {target} HTTP/1.1",
        *headers,
        f"Content-Length: {len(body)}",
        "Connection: close",
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:11435", "localhost.evil.com", "8.8.8.8", "[2606:4700::1111]:1"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/stats", "/"])
async def test_rebinding_host(host: str, path: str) -> None:
    """Host check against rebinding: a name that can come to mean this machine is 403, on every route."""
    async with surface() as proxy:
        answer = await proxy.raw(
            _request(path, f"Host: {host}", method="GET" if path in "/stats" else "POST")
        )
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert proxy.fake.requests == []


async def test_configured_host_and_origin() -> None:
    """An allowlist adds names and origins with wildcards, and no others."""
    policy = SecurityPolicy(allowed_hosts=("moe.example",), allowed_origins=("https://*.chat.example",))
    async with surface(security=policy) as proxy:
        for host, origin, status in (
            ("moe.example", "https://a.chat.example", 200),
            ("MOE.example:443", "http://localhost:3000", 200),
            ("moe.example", "https://chat.example.evil.com", 403),
            ("x.moe.example", "https://a.chat.example", 403),
        ):
            got, headers, _ = await proxy.get("/api/tags", headers={"Host": host, "Origin": origin})
            assert (got, headers.get("Access-Control-Allow-Origin")) == (
                status, origin if status == 200 or "evil" not in origin else None,
            )  # fmt: skip


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/messages"])
async def test_a_refusal_says_what_to_do(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A refused host or origin is named to the client in its form, and once to the operator."""
    async with surface() as proxy:
        for headers, value, setting in (
            ({"Host": "moe.example"}, "'moe.example'", "allowed_hosts"),
            ({"Origin": "https://chat.example"}, "'https://chat.example'", "allowed_origins"),
        ):
            caplog.clear()
            for _ in range(3):
                status, _, body = await proxy.post(path, CHAT, headers=headers)
                error = json.loads(body)["error"]
                message = error if path.startswith("/api/") else error["message"]
                assert (status, value in message, setting in message) == (403, True, True)
            (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert value in said
            assert setting in said


async def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Any web page can be refused under as many names as it likes; the log ends saying so."""
    async with surface() as proxy:
        for number in range(300):
            assert (await proxy.get("/api/tags", headers={"Host": f"{number}.example"}))[0] == 403
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 201
    assert "no more are logged" in said[-1]


@pytest.mark.parametrize("origin", ["https://evil.com", "null", "http://localhost.evil.com"])
async def test_foreign_origin_on_a_simple_post(origin: str) -> None:
    """Any disallowed Origin is 403 before the handler: a simple POST, which no preflight announces, too."""
    async with surface() as proxy:
        for path in ("/api/chat", "/v1/chat/completions", "/api/delete"):
            answer = await proxy.raw(
                _request(path, "Host: localhost", f"Origin: {origin}", "Content-Type: text/plain")
            )
            assert answer.startswith(b"HTTP/1.1 403 ")
            assert b"Access-Control-Allow-Origin" not in answer
        assert proxy.fake.requests == []
        assert proxy.observer.begun == []


async def test_absolute_form_target() -> None:
    """Request target in absolute form is judged by its authority, whatever Host says."""
    async with surface() as proxy:
        answer = await proxy.raw(_request("http://evil.com/v1/chat/completions", "Host: localhost"))
        assert answer.startswith(b"HTTP/1.1 403 ")
        answer = await proxy.raw(_request("http://user@evil.com/api/tags", "Host: localhost", method="GET"))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert proxy.fake.requests == []
        port = proxy.listening.port
        answer = await proxy.raw(_request(f"http://localhost:{port}/v1/chat/completions", "Host: localhost"))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert [seen.path for seen in proxy.fake.requests] == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    "target",
    ["/v1/%2e%2e/experts/prior", "/v1/.%2E/experts", "/%2e%2e/%2e%2e/experts", "/api/%2e%2e/moe-set-domain",
     "/v1/%252e%252e/experts", "/v1/..%2fexperts", "/v1/%2e%2e%2fexperts", "/v1/..\\experts",
     "/health/%2e%2e/experts"],
)  # fmt: skip
async def test_encoded_dots(target: str) -> None:
    """Paths are judged after normalising: no spelling of `..` reaches what is closed."""
    async with surface() as proxy:
        answer = await proxy.raw(_request(target, "Host: localhost", body=b"{}"))
        assert answer.split(b" ", 2)[1] in (b"400", b"404", b"405")
        assert proxy.fake.requests == []
        assert proxy.fake.priors == []


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity",
    ],
)
async def test_length_with_transfer_encoding(head: str) -> None:
    """CL and TE together are refused with 400: two readers of one connection must not disagree on a body."""
    async with surface() as proxy:
        smuggled = b"0\r\n\r\nPOST /api/chat HTTP/1.1\r\nHost: localhost\r\n\r\n"
        start = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode()
        answer = await proxy.raw(start + smuggled)
        assert answer.split(b" ", 2)[1] == b"400"
        assert answer.count(b"HTTP/1.") == 1
        assert proxy.fake.requests == []


async def test_oversized_headers() -> None:
    """Headers that no client needs are refused, one that is too long as well as too many of them."""
    async with surface() as proxy:
        long = await proxy.raw(_request("/api/chat", "Host: localhost", "X-Long: " + "x" * 20_000))
        assert long.split(b" ", 2)[1] == b"400"
        many = await proxy.raw(_request("/api/chat", "Host: localhost", *(f"X-{n}: y" for n in range(1000))))
        assert many.split(b" ", 2)[1] == b"400"
        assert proxy.fake.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages", "/tokenize"])
async def test_oversized_bodies(path: str) -> None:
    """A body over the limit is 413, in the form of its route, without being taken in first."""
    async with surface(limits=Limits(max_body_bytes=1000)) as proxy:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.listening.port)
        writer.write(head)
        answer = await reader.readuntil(b"}")
        writer.close()
        assert answer.startswith(b"HTTP/1.1 413 ")
        chunks = b"200\r\n" + b"x" * 512 + b"\r\n"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.listening.port)
        writer.write(head + chunks * 3)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 413 ")
        writer.close()
        assert proxy.fake.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
async def test_a_compressed_body_is_measured_as_it_is(path: str) -> None:
    """A small body that unpacks to more than the limit is 413 like any other."""
    body = gzip.compress(b" " * 50_000_000)
    async with surface(limits=Limits(max_body_bytes=1_000_000)) as proxy:
        assert len(body) < 1_000_000
        answer = await proxy.raw(_request(path, "Host: localhost", "Content-Encoding: gzip", body=body))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert proxy.fake.requests == []


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "https://example.org/a.png", "file:///etc/passwd"]
)
async def test_remote_image_url(url: str) -> None:
    """Remote image URLs are refused before the engine, which would fetch them, hears of them."""
    openai = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    source = {"type": "url", "url": url}
    anthropic = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    responses = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    async with surface() as proxy:
        for path, body in (
            ("/v1/chat/completions", {"messages": openai}),
            ("/v1/messages", {"messages": anthropic}),
            ("/v1/messages/count_tokens", {"messages": anthropic}),
            ("/v1/responses", {"input": responses}),
            ("/api/chat", {"model": "planted-moe", "messages": openai}),
            ("/api/chat", {"model": "planted-moe", "messages": [{"role": "user", "images": [url]}]}),
            ("/api/generate", {"model": "planted-moe", "prompt": "x", "images": [url]}),
        ):
            status, _, _ = await proxy.post(path, body)
            assert (path, status) == (path, 400)
        assert proxy.fake.requests == []


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": f"Bearer {KEY}x"},
     {"X-Api-Key": KEY[:-1]}, {"Authorization": "Bearer \xff"}, {"Cookie": f"key={KEY}"}],
)  # fmt: skip
async def test_no_or_a_wrong_key(headers: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """With keys, a request without one of them is 401 in its family's form, which repeats no key."""
    caplog.set_level(logging.DEBUG)
    async with surface(security=KEYS) as proxy:
        for path in ("/v1/chat/completions", "/api/chat", "/v1/messages", "/nothing"):
            status, got, body = await proxy.post(path, CHAT, headers=headers)
            assert (status, got["WWW-Authenticate"]) == (401, "Bearer")
            value = json.loads(body)["error"]
            assert isinstance(value, str) == path.startswith("/api")
            assert b"sk-" not in body
        for path in ("/api/tags", "/v1/models", "/stats", "/metrics", "/props", f"/api/tags?key={KEY}"):
            assert (await proxy.get(path, headers=headers))[0] == 401
        assert proxy.fake.requests == []
        for path in ("/", "/health", "/livez"):
            assert (await proxy.get(path))[0] == 200
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(
    "headers", [{"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"X-Api-Key": KEY}]
)
async def test_the_right_key(headers: dict[str, str]) -> None:
    """Any of several keys opens every family, as each family's clients send it, and stops at the proxy."""
    async with surface(security=KEYS) as proxy:
        assert (await proxy.post("/v1/chat/completions", CHAT, headers=headers))[0] == 200
        assert (await proxy.post("/api/chat", CHAT, headers=headers))[0] == 200
        assert (await proxy.get("/stats", headers=headers))[0] == 200
        assert KEY not in str([seen.headers for seen in proxy.fake.requests])


async def test_a_preflight_needs_no_key() -> None:
    """A browser's preflight never has the key; only an allowed origin gets an answer to it."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with surface(security=KEYS) as proxy:
        for origin, status in (("http://localhost:3000", 204), ("https://evil.com", 403)):
            headers = {"Origin": origin, **asked}
            async with proxy.http.options(proxy.url + "/v1/chat/completions", headers=headers) as response:
                assert response.status == status
                assert ("authorization" in response.headers.get("Access-Control-Allow-Headers", "")) == (
                    status == 204
                )
        assert proxy.fake.requests == []


@pytest.mark.parametrize("target", ["/props", "/slots/0?action=erase", "/lora-adapters"])
async def test_what_writes_the_engine_is_closed_unless_opened(target: str) -> None:
    """Anything that writes server state is closed unless the operator opens it, each for itself."""
    path = target.partition("?")[0]
    name = path.removesuffix("/0")
    async with surface() as proxy:
        assert (await proxy.post(target, {}))[0] in (404, 405)
        assert proxy.fake.requests == []
    async with surface(open_routes=frozenset({name})) as proxy:
        await proxy.post(target, [1])
        assert [(seen.path, seen.body) for seen in proxy.fake.requests] == [(path, [1])]
        assert (await proxy.get("/props"))[0] == 200
        for other in {"/props", "/slots/0", "/lora-adapters", "/experts/prior", "/slots/0/x"} - {path}:
            if not (name == "/slots" and other == "/slots/0/x"):
                assert (await proxy.post(other, {}))[0] in (404, 405)


def test_what_can_be_opened_is_what_is_configured() -> None:
    """The setting takes exactly the routes that can be opened."""
    assert {*OPENABLE, *NAMED_OPENABLE} == OPENABLE_ROUTES
    with pytest.raises(ValueError, match="/experts cannot be opened"):
        Settings(open_routes="/props,/experts")


async def test_official_clients_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's and Ollama's own clients send their key as they always do, and understand the refusal."""
    async with surface(security=KEYS) as proxy:
        for key in (KEY, "sk-wrong"):
            monkeypatch.setenv("OLLAMA_API_KEY", key)
            local = ollama.AsyncClient(host=proxy.url)
            base = f"{proxy.url}/v1"
            async with local._client, openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
                if key == KEY:
                    assert (await client.models.list()).data[0].id == "planted-moe:latest"
                    assert (await local.list()).models[0].model == "planted-moe:latest"
                    continue
                with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
                    await client.models.list()
                with pytest.raises(ollama.ResponseError, match="the API key is wrong"):
                    await local.list()
