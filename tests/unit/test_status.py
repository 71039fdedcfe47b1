"""What the proxy says of itself to browsers and to Prometheus."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from moe_proxy.access import key_digest
from moe_proxy.metrics import engine_lines
from moe_proxy.proxy.context import SecurityPolicy
from tests.support.surface import PAGE, BackendState, card, surface

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_front_page() -> None:
    """Browsers get a status page that contains Ollama's word; everybody else gets the word alone."""
    async with surface(ready=False, model=card(name="<b>m</b>")) as proxy:
        status, headers, body = await proxy.get("/", headers=BROWSER)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b"Ollama is running" in body
        assert b"&lt;b&gt;m&lt;/b&gt; is ready." in body
        assert b"<b>" not in body
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        proxy.backend.status = BackendState("crashed", "signal 9 & more")
        assert b"is crashed: signal 9 &amp; more" in (await proxy.get("/", headers=BROWSER))[2]
        for accept in ("*/*", "application/json"):
            _, headers, body = await proxy.get("/", headers={"Accept": accept})
            assert (headers["Content-Type"], body) == ("text/plain; charset=utf-8", b"Ollama is running")
        async with proxy.http.head(proxy.url + "/", headers=BROWSER) as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_front_page_without_a_key() -> None:
    """Where keys are needed, the page that needs none does not name the model."""
    async with surface(security=SecurityPolicy(key_digests=(key_digest("k"),))) as proxy:
        status, _, body = await proxy.get("/", headers=BROWSER)
        assert (status, b"The model is ready." in body, b"planted" in body) == (200, True, False)


async def test_page_of_the_engine() -> None:
    """/ui/ is llama-server's own page when it was built in; what it asks for below /ui/ is answered by us."""
    async with surface("--page") as proxy:
        async with proxy.http.get(proxy.url + "/ui", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, "/ui/")
        browser = {**BROWSER, "Accept-Encoding": "gzip, br"}
        for path, (kind, data) in PAGE.items():
            status, headers, body = await proxy.get(f"/ui{path}", headers=browser)
            assert (status, gzip.decompress(body)) == (200, data)
            assert (headers["Content-Type"], headers["Content-Encoding"]) == (kind, "gzip")
            assert headers["ETag"] == '"1"'
        assert (await proxy.get("/ui/", headers={"Accept-Encoding": "identity"}))[0] == 415
        _, _, body = await proxy.get("/ui/v1/models")
        assert json.loads(body)["data"][0]["owned_by"] == "moe-proxy"
        chat: Any = {"messages": [{"role": "user", "content": "x"}]}
        assert (await proxy.post("/ui/v1/chat/completions", chat))[0] == 200
        assert (await proxy.get("/ui/props"))[0] == 200
        assert [seen.path for seen in proxy.fake.requests] == [*PAGE, "/", "/v1/chat/completions", "/props"]


@pytest.mark.parametrize("switch", ["--page", "--no-page"])
async def test_the_page_opens_nothing_else(switch: str) -> None:
    """What is closed stays closed below /ui/ as well, and without a page there is a 404 that says why."""
    async with surface(switch) as proxy:
        for path in ("/experts", "/experts/prior", "/experts/stats", "/moe-set-domain", "/lora-adapters"):
            assert (await proxy.get(f"/ui{path}"))[0] == 404
            assert (await proxy.post(f"/ui{path}", {}))[0] in (404, 405)
        assert (await proxy.post("/ui/props", {}))[0] == 405
        assert (await proxy.get("/_app/start.js"))[0] == 404
        assert proxy.fake.requests == []
        status, _, body = await proxy.get("/ui/_app/other.js")
        assert (status, b"built without its page" in body) == (404, True)
        if switch == "--no-page":
            assert (await proxy.get("/ui/", headers=BROWSER))[0] == 404


async def test_metrics_of_the_engine() -> None:
    """/metrics has llama-server's metrics under a prefix, and does not wake an engine for them."""
    async with surface() as proxy:
        chat: Any = {"model": "planted-moe", "messages": [{"role": "user", "content": "x"}], "stream": False}
        await proxy.post("/api/chat", chat)
        lines = (await proxy.get("/metrics"))[2].decode().splitlines()
        assert "# TYPE llama_server_tokens_predicted_total counter" in lines
        assert f"llama_server_tokens_predicted_total {proxy.fake.counters['tokens']}" in lines
        assert "moe_proxy_requests_in_flight 0.0" in lines
        asked = len(proxy.fake.requests)
        proxy.backend.status = BackendState("asleep")
        assert b"llama_server" not in (await proxy.get("/metrics"))[2]
        assert len(proxy.fake.requests) == asked


async def test_metrics_of_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the proxy counts is told whatever the engine does; that it did not answer is counted."""
    monkeypatch.setattr("moe_proxy.proxy.status._ENGINE_METRICS_S", 0.02)
    async with surface(ready=False) as proxy:
        status, _, body = await proxy.get("/metrics")
        assert (status, b"moe_proxy_requests" in body, b"llama_server" in body) == (200, True, False)
        assert proxy.context.metrics.requests()["step_failures"] == {"engine metrics": 1}


def test_lines_of_the_engine() -> None:
    """Nothing but llama-server's metrics gets through, and no second prefix."""
    text = (
        b'# HELP llamacpp:a A\n# TYPE llamacpp:a gauge\nllamacpp:a{x="llamacpp:y"} 1\nother 2\n\n<>llamacpp:z'
    )
    assert engine_lines(text) == (
        b'# HELP llama_server_a A\n# TYPE llama_server_a gauge\nllama_server_a{x="llamacpp:y"} 1\n'
    )
    assert engine_lines(b"") == b""
