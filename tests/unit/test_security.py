"""Hosts, origins, targets, paths and remote media."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moe_proxy.errors import ForbiddenError, RequestError
from moe_proxy.proxy.context import SecurityPolicy
from moe_proxy.proxy.security import (
    Head,
    check_head,
    check_media,
    host_allowed,
    normal_path,
    origin_allowed,
)
from tests.support.surface import surface

POLICY = SecurityPolicy("box", ("proxy.example.org", "*.corp.example"), ("https://ui.example.org",))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True), ("LOCALHOST:11435", True), ("localhost.", True), ("a.localhost:1", True),
        ("nas.local", True), ("host.docker.internal:11435", True), ("box:80", True), ("127.0.0.1", True),
        ("127.9.9.9:1", True), ("[::1]:11435", True), ("192.168.1.4", True), ("[fd00::1]", True),
        ("proxy.example.org:443", True), ("a.corp.example", True),
        ("evil.com", False), ("8.8.8.8", False), ("localhost.evil.com", False), ("evil.com:localhost", False),
        ("user@localhost", False), ("", False), ("[::1", False), ("localhost/x", False), ("local", False),
    ],
)  # fmt: skip
def test_hosts(host: str, allowed: bool) -> None:
    """Localhost, *.localhost, *.local, *.internal, the host name, a loopback or private IP; else 403."""
    assert host_allowed(host, POLICY) is allowed


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost", True), ("https://localhost:3000", True), ("http://127.0.0.1:8080", True),
        ("http://[::1]:3000", True), ("app://obsidian.md", True), ("vscode-webview://abc", True),
        ("tauri://localhost", True), ("https://ui.example.org", True), ("http://me.lan:11435", True),
        ("https://evil.com", False), ("null", False), ("http://localhost.evil.com", False),
        ("http://me.lan:1", False), ("https://x.ui.example.org", False), ("chrome-extension://abc", False),
        ("http://[::1", False), ("", False),
    ],
)  # fmt: skip
def test_origins(origin: str, allowed: bool) -> None:
    """Loopback pages and local programs may ask, as with Ollama; the server's own page; and listed ones."""
    assert origin_allowed(origin, POLICY, "me.lan:11435") is allowed


@pytest.mark.parametrize(
    ("head", "allowed"),
    [
        (Head("/", (), None, None), True),
        (Head("/", ("localhost",), None, "same-origin"), True),
        (Head("/", ("localhost",), "http://localhost:3000", "cross-site"), True),
        (Head("/", ("localhost",), None, "cross-site"), False),
        (Head("/", ("localhost", "evil.com"), None, None), False),
        (Head("http://evil.com/api/tags", ("localhost",), None, None), False),
        (Head("http://localhost@evil.com/", ("localhost",), None, None), False),
        (Head("http://localhost:11435/api/tags", ("localhost",), None, None), True),
        (Head("evil.com:443", ("localhost",), None, None), False),
        (Head("*", ("localhost",), None, None), True),
    ],
)
def test_heads(head: Head, allowed: bool) -> None:
    """A target in absolute form is judged by its authority; cross-site needs an allowed origin."""
    if allowed:
        check_head(head, POLICY)
    else:
        with pytest.raises(ForbiddenError):
            check_head(head, POLICY)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/", "/"), ("", "/"), ("/api/tags?x=/../y", "/api/tags"), ("//api//chat/", "/api/chat"),
        ("/v1/../slots", "/slots"), ("/../../experts", "/experts"), ("/%65xperts", "/experts"),
        ("/v1/%2e%2E/experts", "/experts"), ("/v1/models/a%2fb", "/v1/models/a%2Fb"),
        ("/v1/./models/x:y", "/v1/models/x:y"), ("http://localhost:1/experts/prior", "/experts/prior"),
        ("/api/chat#x", "/api/chat"), ("/%C3%A9", "/%C3%A9"), ("/%", "/%"),
    ],
)  # fmt: skip
def test_paths(target: str, path: str) -> None:
    """Paths are judged after normalising; %2F is kept."""
    assert normal_path(target) == path


PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("content", "allowed"),
    [
        ([{"type": "image_url", "image_url": {"url": PNG}}], True),
        ([{"type": "text", "text": "see http://example.org"}], True),
        ([{"type": "tool_use", "input": {"url": "http://example.org"}}], True),
        ([{"type": "search_result", "source": "https://example.org", "content": []}], True),
        ("http://example.org", True),
        ([{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}], False),
        ([{"type": "image_url", "image_url": {"url": "HTTPS://10.0.0.1/"}}], False),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], False),
        ([{"type": "input_image", "image_url": "http://10.0.0.1/"}], False),
        ([{"type": "input_audio", "input_audio": {"data": "http://10.0.0.1/"}}], False),
        ([{"type": "video_url", "video_url": {"url": "http://10.0.0.1/"}}], False),
        ([{"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/"}}], False),
        (
            [
                {
                    "type": "tool_result",
                    "content": [{"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/"}}],
                }
            ],
            False,
        ),
    ],
)
def test_media(content: Any, allowed: bool) -> None:
    """Remote media is refused, file:// always; text and tools that mention an address are not media."""
    message = {"content": content}
    for body in ({"messages": [message]}, {"input": [message]}, message):
        if allowed:
            check_media(body)
        else:
            with pytest.raises(RequestError):
                check_media(body)


async def test_refused_before_anything_is_read() -> None:
    """Another host or origin is a 403 before anybody hears of it, with the reason in the family's form."""
    async with surface() as proxy:
        for name, value in (
            ("Host", "evil.com"),
            ("Origin", "https://evil.com"),
            ("Sec-Fetch-Site", "cross-site"),
        ):
            headers = {name: value}
            status, _, body = await proxy.post("/api/chat", {"model": "planted-moe"}, headers=headers)
            assert status == 403
            assert isinstance(json.loads(body)["error"], str)
            status, _, body = await proxy.post("/v1/chat/completions", {}, headers=headers)
            assert status == 403
            assert b'"permission_error"' in body
        assert proxy.fake.requests == []
        assert proxy.observer.begun == []


async def test_cors() -> None:
    """An allowed origin gets its CORS headers from us, exactly once, and an answer to its preflight."""
    async with surface() as proxy:
        origin = "http://localhost:3000"
        status, headers, _ = await proxy.get("/api/tags", headers={"Origin": origin})
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, origin)
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type,x-stainless-os",
        }
        async with proxy.http.options(proxy.url + "/v1/chat/completions", headers=asked) as response:
            assert response.status == 204
            assert response.headers.getall("Access-Control-Allow-Origin") == [origin]
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert "x-stainless-os" in response.headers["Access-Control-Allow-Headers"]


@pytest.mark.parametrize(
    "target",
    ["/experts", "/experts/prior", "/moe-set-domain", "/v1/../experts", "/%65xperts/stats", "//experts",
     "/api/../experts/usage", "/props/", "/lora-adapters", "/slots/0", "/cors-proxy", "/tools"],
)  # fmt: skip
async def test_closed_routes(target: str) -> None:
    """The pager's control routes and what writes the engine's state are closed, however they are spelled."""
    async with surface() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.listening.port)
        writer.write(f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        head = await reader.readuntil(b"\r\n")
        writer.close()
        await writer.wait_closed()
        assert head.split()[1] in (b"404", b"405")
        assert proxy.fake.requests == []
        assert proxy.fake.priors == []
