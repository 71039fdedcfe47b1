"""A whole proxy process with keys: where they can be seen, and what SIGHUP changes."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.proxy_process import ProxyProcess, free_port, run_cli, wait_until

FILE_KEY, VARIABLE_KEY = "sk-of-the-file-1", "sk-of-the-variable"
CHAT = {"model": "planted-moe", "messages": [{"role": "user", "content": "a purple giraffe"}]}


@pytest.fixture
def env(proxy_env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment with one key of its own and one in a file that the configuration names."""
    keys = tmp_path / "keys"
    keys.write_text(FILE_KEY + "\n")
    Path(proxy_env["MOE_PROXY_CONFIG"]).write_text(f'api_key_file = "{keys}"\naccess_log = "json"\n')
    return proxy_env | {"MOE_PROXY_API_KEY": VARIABLE_KEY}


@pytest.fixture
def proxy(env: dict[str, str], fake_server: Path) -> Iterator[ProxyProcess]:
    """A proxy over the fake engine."""
    started = ProxyProcess.start(env, ("--engine", str(fake_server)), ())
    try:
        started.wait_ready()
        yield started
    finally:
        started.end()


def _ask(proxy: ProxyProcess, path: str, key: str, body: Any = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(proxy.url + path, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_keys_are_seen_nowhere(proxy: ProxyProcess, env: dict[str, str]) -> None:
    """The key is never visible in argv, logs or errors, and the engine is not told it."""
    port = str(proxy.port)
    assert _ask(proxy, "/api/chat", "sk-wrong", CHAT) == 401
    assert _ask(proxy, "/api/chat", FILE_KEY, CHAT) == 200
    assert _ask(proxy, "/v1/chat/completions", VARIABLE_KEY, CHAT) == 200
    stats = run_cli(env, "stats", "--port", port, "--json")
    assert json.loads(stats.stdout)["requests"]["total"] == 2
    strange = run_cli(env | {"MOE_PROXY_API_KEY": "sk-wrong"}, "stats", "--port", port)
    assert (strange.returncode, "wants an API key" in strange.stderr) == (2, True)
    engine = psutil.Process(proxy.process.pid).children(recursive=True)
    assert engine
    for process in (psutil.Process(proxy.process.pid), *engine):
        assert "sk-" not in " ".join(process.cmdline())
    for process in engine:
        assert not [name for name in process.environ() if name.startswith("MOE_PROXY_")]
    logs = [path.read_text(errors="replace") for path in Path(env["MOE_PROXY_STATE_DIR"]).rglob("*.log")]
    printed = proxy.printed()
    assert printed.count('"path":"/api/chat"') == 2
    for text in (*logs, printed, strange.stderr, stats.stdout):
        assert "sk-" not in text
        assert "giraffe" not in text


def test_sighup(proxy: ProxyProcess, env: dict[str, str], tmp_path: Path) -> None:
    """SIGHUP: reload config; a key that was taken out stops working, and a wrong file changes nothing."""
    config = Path(env["MOE_PROXY_CONFIG"])
    assert _ask(proxy, "/api/tags", FILE_KEY) == 200
    (tmp_path / "keys").write_text("sk-new-one\n")
    config.write_text(config.read_text() + 'threads = 3\naliases = ["nick"]\n')
    proxy.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "reloaded" in proxy.printed(), "the reload is announced")
    assert "Settings reloaded; needing a restart: threads." in proxy.printed()
    assert [_ask(proxy, "/api/tags", key) for key in (FILE_KEY, "sk-new-one")] == [401, 200]
    assert _ask(proxy, "/api/chat", "sk-new-one", {**CHAT, "model": "nick"}) == 200
    config.write_text("slots = 'many'\n")
    proxy.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the old ones hold" in proxy.printed(), "the wrong file is announced")
    assert _ask(proxy, "/api/tags", "sk-new-one") == 200
    assert proxy.process.poll() is None


def test_a_detached_proxy_reloads_the_same_file(env: dict[str, str], fake_server: Path) -> None:
    """A proxy in the background reads on SIGHUP what it would have read at its start."""
    port = str(free_port())
    env = {name: value for name, value in env.items() if name != "MOE_PROXY_API_KEY"}
    started = run_cli(env, "start", "--detach", "--port", port, "--engine", str(fake_server))
    try:
        assert started.returncode == 0, started.stderr
        pid = json.loads(run_cli(env, "status", "--port", port, "--json").stdout)["pid"]
        log = next(Path(env["MOE_PROXY_STATE_DIR"]).rglob("proxy.log"))
        assert run_cli(env, "stats", "--port", port).returncode == 0
        Path(env["MOE_PROXY_CONFIG"]).write_text("aliases = ['nick']\n")
        psutil.Process(pid).send_signal(signal.SIGHUP)
        wait_until(lambda: "Settings reloaded." in log.read_text(), "the reload is announced")
        assert run_cli(env, "stats", "--port", port).returncode == 0
    finally:
        assert run_cli(env, "stop", "--port", port).returncode == 0
