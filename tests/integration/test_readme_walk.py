"""README as a newcomer reads it: its very commands, in order, in an empty home with a fresh environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from moe_proxy.engine.build import EngineBuild
from moe_proxy.loop_thread import LoopThread
from tests.fakes.fake_hub import FakeHub
from tests.support.proxy_process import free_port

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What a test machine lacks, and what stands for it. Each must be in README, or this list is wrong.
IN_PLACE_OF = {
    "--gpu --vram-budget 8G": "--cpu",
    "http://127.0.0.1:11435": "http://127.0.0.1:$MOE_PROXY_PORT",
}
# Gigabytes of another project: its first calls are made in its place, below.
NOT_RUN = (
    "python3 -m venv ~/open-webui && ~/open-webui/bin/pip install open-webui",
    "OLLAMA_BASE_URL=http://127.0.0.1:11435 ~/open-webui/bin/open-webui serve",
)
HUB_MODEL = ("Qwen/Qwen3-30B-A3B-GGUF", "Qwen3-30B-A3B-Q4_K_M.gguf")
TIMEOUT_S = 900


@dataclass
class Walk:
    """What came of it."""

    home: Path
    env: dict[str, str]
    said: str
    """All that was printed, each command before its output."""


@pytest.fixture
def hub(planted_model: Path) -> Iterator[str]:
    """A hub that has the model which README names: the planted one under its name."""
    loop = LoopThread("hub")
    repo, file = HUB_MODEL
    runner, url = loop.run(_serve(FakeHub({repo: {file: planted_model.read_bytes()}})))
    yield url
    loop.run(runner.cleanup())
    loop.close()


async def _serve(hub: FakeHub) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(hub.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def _commands() -> list[str]:
    """Every line of README's shell blocks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [line for block in BLOCK.findall(text) for line in block.splitlines() if line]


def _script() -> str:
    """README's commands with what stands for a test machine's lacks."""
    commands = _commands()
    for absent in NOT_RUN:
        assert absent in commands, f"README has changed: {absent}"
        commands.remove(absent)
    text = "\n".join(commands)
    for wording, stand_in in IN_PLACE_OF.items():
        assert wording in text, f"README has changed: {wording}"
        text = text.replace(wording, stand_in)
    return f"set -euxo pipefail\n{text}\n"


@pytest.fixture
def walk(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, engine: EngineBuild, hub: str
) -> Iterator[Walk]:
    """Walk through README; whatever happens, nothing runs afterwards."""
    home = tmp_path_factory.mktemp("h")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOE_PROXY_", "XDG_"))}
    env = kept | {
        "HOME": str(home),
        "MOE_PROXY_CACHE_DIR": str(cache_dir),
        "MOE_PROXY_PORT": str(free_port()),
        "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip"),
        "HF_ENDPOINT": hub,
        "NO_PROXY": "127.0.0.1",
        "NO_COLOR": "1",
    }
    try:
        done = subprocess.run(
            ["bash"],
            input=_script(),
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        yield Walk(home, env, done.stdout)
    finally:
        command = home / ".local/bin/moe-proxy"
        if command.exists():
            subprocess.run([command, "stop"], env=env, capture_output=True, check=False)


def _ask(walk: Walk, path: str, body: object = None) -> bytes:
    url = f"http://127.0.0.1:{walk.env['MOE_PROXY_PORT']}{path}"
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        content: bytes = response.read()
        return content


def test_a_newcomer_gets_to_an_answer(walk: Walk) -> None:
    """From nothing to an answer by README's own commands: install, doctor, start, ask, stats, stop; and a
    model from a hub, which then answers the calls that Open WebUI makes first.
    """
    assert "Installed moe-proxy" in walk.said
    assert not re.search(r"^fail ", walk.said, re.MULTILINE)
    answer, _ = json.JSONDecoder().raw_decode(walk.said, walk.said.index('{"choices"'))
    assert answer["choices"][0]["message"]["content"]
    assert re.search(r"^hit rate +\d+(\.\d+)? ?%", walk.said, re.MULTILINE)
    assert f"Stopped the proxy on port {walk.env['MOE_PROXY_PORT']}." in walk.said
    # Now the model from the hub is served, as Open WebUI finds it.
    assert [int(part) for part in json.loads(_ask(walk, "/api/version"))["version"].split(".")]
    (model,) = json.loads(_ask(walk, "/api/tags"))["models"]
    assert model["model"].startswith("Qwen3-30B-A3B-Q4_K_M")
    assert json.loads(_ask(walk, "/api/ps"))["models"][0]["model"] == model["model"]
    chat = {
        "model": model["model"],
        "messages": [{"role": "user", "content": "hello"}],
        "options": {"num_predict": 4},
    }
    lines = [json.loads(line) for line in _ask(walk, "/api/chat", chat).splitlines()]
    assert lines[-1]["done"] is True
    assert "".join(line["message"]["content"] for line in lines)

    # And away again.
    command = walk.home / ".local/bin/moe-proxy"
    subprocess.run([command, "stop"], env=walk.env, capture_output=True, check=True)
    subprocess.run(
        [ROOT / "scripts/install.sh", "--uninstall"], env=walk.env, capture_output=True, check=True
    )
    assert not command.is_symlink()
    assert not (walk.home / ".local/share/moe-proxy/venv").exists()
