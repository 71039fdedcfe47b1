"""What clients and the operator see when a process dies or is told to end."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.proxy_process import ProxyProcess, wait_until
from tests.support.text import STORY

pytestmark = pytest.mark.engine

Start = Callable[..., ProxyProcess]
# Long enough to be in the middle of when the test acts, bounded so that a fault ends it.
LONG = 1500


def _stream(proxy: ProxyProcess, path: str, body: dict[str, Any]) -> Iterator[str]:
    """Lines of a streamed answer that are not empty."""
    request = urllib.request.Request(
        proxy.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.strip():
                yield line.decode().strip()


def _chat(**more: Any) -> dict[str, Any]:
    return {"model": "planted-moe", "messages": [{"role": "user", "content": STORY}], "stream": True, **more}


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("family", ["openai", "ollama"])
def test_engine_killed_during_a_stream(start_proxy: Start, family: str) -> None:
    """kill -9 of llama-server in a stream: an error in the client's format; the next request is served."""
    # Ollama's API cannot ask for a text that does not end, llama-server can be told to.
    proxy = start_proxy(engine_args=("--ignore-eos",))
    if family == "openai":
        lines = _stream(proxy, "/v1/chat/completions", _chat(max_tokens=LONG))
    else:
        lines = _stream(proxy, "/api/chat", _chat(options={"num_predict": LONG}))
    first = next(lines)
    os.kill(proxy.engine_pid(), signal.SIGKILL)
    rest = list(lines)
    assert first
    if family == "openai":
        assert rest[-1].startswith("data: ")
        assert "message" in json.loads(rest[-1].removeprefix("data: "))["error"]
    else:
        last = json.loads(rest[-1])
        assert isinstance(last["error"], str)
        assert not any(json.loads(line).get("done") for line in rest)
    answer = proxy.post("/v1/chat/completions", _chat(max_tokens=4, stream=False))
    assert answer["choices"][0]["message"]["content"]
    assert proxy.get("/stats")["engine"]["restarts"] == 1


def test_proxy_killed(start_proxy: Start) -> None:
    """kill -9 of the proxy: llama-server is gone within 2 s."""
    proxy = start_proxy()
    pid = proxy.engine_pid()
    assert _alive(pid)
    proxy.process.kill()
    proxy.process.wait()
    wait_until(lambda: not _alive(pid), "llama-server is gone", 2.0)


def test_sigterm_lets_a_stream_finish(start_proxy: Start) -> None:
    """SIGTERM during a stream: the stream finishes, then both processes are gone and the exit code is 0."""
    proxy = start_proxy()
    pid = proxy.engine_pid()
    lines = _stream(proxy, "/v1/chat/completions", _chat(max_tokens=300, ignore_eos=True))
    next(lines)
    proxy.process.send_signal(signal.SIGTERM)
    rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    finished = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
    reasons = [c["finish_reason"] for chunk in finished for c in chunk["choices"] if c.get("finish_reason")]
    assert reasons == ["length"]
    assert proxy.process.wait(30) == 0
    assert not _alive(pid)


def test_nothing_is_left_after_the_end(start_proxy: Start) -> None:
    """After an end by SIGTERM neither socket nor record of the instance is left."""
    proxy = start_proxy()
    runtime = Path(proxy.socket).parent
    proxy.end()
    assert [path.name for path in runtime.iterdir()] == []
