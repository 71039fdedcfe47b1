"""The runtime in coroutines, attached to a running proxy, and with arguments that cannot be."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_proxy import AsyncHybridMoERuntime, HybridMoERuntime, private_proxy, served
from moe_proxy.errors import (
    BuildError,
    ConfigError,
    NotRunningError,
    RequestError,
    UnauthorizedError,
    UsageError,
)
from moe_proxy.hardware import Gpu, probe
from moe_proxy.proxy.context import SecurityPolicy
from tests.fakes.fake_llama_state import REPLY
from tests.support.fake_engine import PATIENCE_S, gone
from tests.support.proxy_process import free_port
from tests.support.surface import eventually, surface

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"attach": "http://127.0.0.1:1", "model": "a.gguf"}, "model"),
        ({"attach": "http://127.0.0.1:1", "engine_args": ["-fa"]}, "engine_args"),
        ({"api_key": "k"}, "api_key"),
        ({"gpu_memory_budget_gb": -1}, "gpu_memory_budget_gb"),
        ({"ram_budget_gb": float("nan")}, "ram_budget_gb"),
    ],
)
def test_arguments_that_cannot_be(given: dict[str, Any], named: str) -> None:
    """Arguments that exclude each other, or are no amount, are named."""
    with pytest.raises(ConfigError, match=named):
        HybridMoERuntime(**given)


def test_a_vram_budget_is_of_the_gpu(runtime_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpu_memory_budget_gb` asks for the GPU; where there is none, that is said before anything starts."""
    monkeypatch.setattr(served, "probe", lambda: replace(probe(), gpus=()))
    with pytest.raises(ConfigError, match="no NVIDIA GPU was found"):
        HybridMoERuntime("planted-moe", gpu_memory_budget_gb=8).start()
    card = Gpu(0, "Card", 2**33, 2**32, "8.6")
    monkeypatch.setattr(served, "probe", lambda: replace(probe(), gpus=(card,)))
    with pytest.raises(ConfigError, match=r"8\.0 GiB of VRAM were asked for, 4\.0 GiB of Card are free"):
        HybridMoERuntime("planted-moe", gpu_memory_budget_gb=8).start()


def test_a_runtime_folder_that_cannot_be_made(runtime_arguments: dict[str, Any]) -> None:
    """A folder that may not be written is named, with what to set."""
    with pytest.raises(ConfigError, match=r"/proc/nowhere.*MOE_PROXY_RUNTIME_DIR"):
        HybridMoERuntime(**runtime_arguments, runtime_dir="/proc/nowhere").start()


def test_an_unknown_setting(runtime_arguments: dict[str, Any]) -> None:
    """A keyword that is no setting is named, when the settings are read."""
    with pytest.raises(ConfigError, match="'contxt'"):
        HybridMoERuntime(**runtime_arguments, contxt=1).start()


async def _active(moe: AsyncHybridMoERuntime, count: int) -> None:
    """Wait until so many requests are under way."""
    while (await moe.stats())["requests"]["active"] != count:  # noqa: ASYNC110 - the other side's event
        await asyncio.sleep(0.005)


async def test_the_asynchronous_twin(runtime_arguments: dict[str, Any]) -> None:
    """The same in coroutines; a cancelled answer stops, and the runtime goes on."""
    switches = ("--hang-after-chunks", "4")
    async with AsyncHybridMoERuntime(**runtime_arguments, engine_args=switches) as moe:
        pid = (await moe.stats())["engine"]["pid"]
        answer = asyncio.create_task(moe.chat(HELLO))
        await _active(moe, 1)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await _active(moe, 0)
        async with await moe.stream(HELLO) as pieces:
            assert await anext(pieces) == "Une"
            with pytest.raises(RequestError, match="not complete"):
                _ = pieces.completion
    assert gone(pid)
    with pytest.raises(UsageError):
        await moe.stats()


async def test_a_cancelled_start(runtime_arguments: dict[str, Any], tmp_path: Path) -> None:
    """A start that is cancelled while the model loads leaves no engine."""
    starts = tmp_path / "starts"
    switches = ("--never-ready", "--starts-file", str(starts))
    start = asyncio.create_task(AsyncHybridMoERuntime(**runtime_arguments, engine_args=switches).start())
    await eventually(lambda: starts.exists() and starts.read_text().endswith("\n"), PATIENCE_S)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert gone(int(starts.read_text()))


async def test_a_cancelled_build(runtime_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is cancelled while llama-server is built ends the build at its next sign of progress."""
    began, ended = threading.Event(), threading.Event()

    def builds(_request: object, progress: Any) -> None:
        began.set()
        try:
            while True:
                progress("compile", 0.5)
                time.sleep(0.001)
        finally:
            ended.set()

    monkeypatch.setattr(private_proxy, "engine_for", lambda _request: None)
    monkeypatch.setattr(private_proxy, "build_engine", builds)
    start = asyncio.create_task(AsyncHybridMoERuntime("planted-moe").start())
    await asyncio.to_thread(began.wait, PATIENCE_S)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert await asyncio.to_thread(ended.wait, PATIENCE_S)


async def test_a_build_that_fails(runtime_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start builds llama-server, and says so where it cannot."""

    def builds(_request: object, _progress: Any) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(private_proxy, "engine_for", lambda _request: None)
    monkeypatch.setattr(private_proxy, "build_engine", builds)
    with pytest.raises(BuildError):
        await AsyncHybridMoERuntime("planted-moe").start()


async def test_attached_to_a_running_proxy() -> None:
    """It attaches to a running proxy, and leaves it running."""
    async with surface() as proxy:
        async with AsyncHybridMoERuntime(attach=proxy.url) as moe:
            assert (await moe.chat(HELLO)).text == REPLY
            assert (await moe.generate("a", max_tokens=1)).completion_tokens == 1
        assert (await proxy.get("/health"))[0] == 200


async def test_attached_with_a_key() -> None:
    """A proxy that wants a key gets it; without it the error says what is missing."""
    guarded = SecurityPolicy(key_digests=(hashlib.sha256(b"sesame").digest(),))
    async with surface(security=guarded) as proxy:
        async with AsyncHybridMoERuntime(attach=proxy.url, api_key="sesame") as moe:
            assert (await moe.chat(HELLO)).text == REPLY
        with pytest.raises(UnauthorizedError):
            await AsyncHybridMoERuntime(attach=proxy.url).start()


def test_nobody_to_attach_to() -> None:
    """Where no proxy runs, the address is named."""
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(NotRunningError, match=url):
        HybridMoERuntime(attach=url).start()
