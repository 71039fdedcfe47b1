"""Routes of the real engine that go through unchanged, and what the proxy says beside them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from moe_proxy.engine.build import EngineBuild
from tests.support.proxy_process import ProxyProcess

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": "write code"}]


@pytest.fixture(scope="module")
def proxy(module_proxy_env: dict[str, str], engine: EngineBuild) -> Iterator[ProxyProcess]:
    """A proxy over the real engine that all tests here share."""
    started = ProxyProcess.start(module_proxy_env, ("--engine", str(engine.server)), ())
    try:
        started.wait_ready()
        yield started
    finally:
        started.end()


def _post(proxy: ProxyProcess, path: str, body: Any) -> tuple[int, str, bytes]:
    request = urllib.request.Request(proxy.url + path, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.headers["Content-Type"], response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def _events(body: bytes) -> list[str]:
    return [line[7:] for line in body.decode().splitlines() if line.startswith("event: ")]


def test_anthropic_messages(proxy: ProxyProcess) -> None:
    """Anthropic /v1/messages (+ count_tokens) passed through: whole, streamed to its end, and counted."""
    body = {"model": "claude", "max_tokens": 8, "messages": MESSAGES}
    status, _, answer = _post(proxy, "/v1/messages", body)
    value = json.loads(answer)
    assert (status, value["type"], value["role"]) == (200, "message", "assistant")
    status, kind, answer = _post(proxy, "/v1/messages", {**body, "stream": True})
    assert (status, kind.partition(";")[0]) == (200, "text/event-stream")
    events = _events(answer)
    assert (events[0], events[-1], "error" in events) == ("message_start", "message_stop", False)
    status, _, answer = _post(proxy, "/v1/messages/count_tokens", {"model": "claude", "messages": MESSAGES})
    assert status == 200
    assert json.loads(answer)["input_tokens"] == value["usage"]["input_tokens"]


def test_openai_responses(proxy: ProxyProcess) -> None:
    """/v1/responses passed through: whole, and streamed to its end without an error of ours."""
    body = {"model": "gpt", "max_output_tokens": 8, "input": "write code"}
    status, _, answer = _post(proxy, "/v1/responses", body)
    assert (status, json.loads(answer)["object"]) == (200, "response")
    status, _, answer = _post(proxy, "/v1/responses", {**body, "stream": True})
    events = _events(answer)
    assert (status, events[0], "error" in events) == (200, "response.created", False)
    assert events[-1] in ("response.completed", "response.incomplete")


def test_errors_of_the_engine(proxy: ProxyProcess) -> None:
    """The engine's refusal keeps its status, and is JSON with an error that each family's clients find."""
    for path, body in (
        ("/v1/messages", {}),
        ("/v1/responses", {"input": 3}),
        ("/v1/chat/completions", {"messages": 3}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        status, kind, answer = _post(proxy, path, body)
        assert (path, status >= 400, kind.partition(";")[0]) == (path, True, "application/json")
        assert json.loads(answer)["error"]["message"]


def test_metrics_of_the_engine(proxy: ProxyProcess) -> None:
    """/metrics: ours, and llama-server's under a prefix."""
    _post(proxy, "/v1/completions", {"prompt": "write", "max_tokens": 2})
    with urllib.request.urlopen(proxy.url + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    names = {line.partition(" ")[0].partition("{")[0] for line in lines if not line.startswith("#")}
    assert "llama_server_tokens_predicted_total" in names
    assert "moe_proxy_requests_total" in names
    assert not [name for name in names if ":" in name]
