"""Reloading the settings: what changes at once, what is said of the rest, and what wrong ones do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from moe_proxy.access import key_digest
from moe_proxy.config import Settings
from moe_proxy.errors import ConfigError
from moe_proxy.live import LIVE, Reloading, needing_restart, with_settings
from moe_proxy.proxy.context import ProxyContext
from moe_proxy.proxy.server import LIVE as APP_LIVE
from moe_proxy.proxy.server import change
from tests.support.surface import Surface, eventually, surface

HELLO: Any = [{"role": "user", "content": "write code"}]


def _settings(**changes: Any) -> Settings:
    return Settings().model_copy(update=changes)


async def _reloaded(proxy: Surface, *asked: Settings | ConfigError) -> list[str]:
    """Ask for a reload with each of ``asked``; what was announced."""
    said: list[str] = []
    todo = iter(asked)

    def load() -> Settings:
        wanted = next(todo)
        if isinstance(wanted, ConfigError):
            raise wanted
        return wanted

    def changed(context: ProxyContext) -> None:
        change(proxy.listening.app, context)

    async with Reloading(_settings(), proxy.context, load, changed, said.append) as reloading:
        for number in range(len(asked)):
            reloading.ask()
            await eventually(lambda count=number: len(said) > count)
    return said


async def test_policy_changes_at_once_and_cuts_no_stream() -> None:
    """SIGHUP: reload config, no stream cut; requests that come after it meet the new policy."""
    async with surface("--slow-chunks", "0.02") as proxy:
        body = {"model": "planted-moe", "messages": HELLO}
        async with proxy.http.post(proxy.url + "/api/chat", json=body) as running:
            await running.content.readany()
            said = await _reloaded(
                proxy,
                _settings(
                    api_key=SecretStr("k"), aliases=("nick",), unknown_model_openai="strict", max_in_flight=1
                ),
            )
            assert said == ["Settings reloaded."]
            assert (await proxy.get("/api/tags"))[0] == 401
            key = {"Authorization": "Bearer k"}
            assert (await proxy.post("/v1/chat/completions", body, headers=key))[0] == 429
            last = json.loads((await running.read()).splitlines()[-1])
            assert last["done"] is True
        status, _, _ = await proxy.post("/api/show", {"model": "nick"}, headers=key)
        assert status == 200
        status, _, answer = await proxy.post("/v1/chat/completions", {**body, "model": "x"}, headers=key)
        assert (status, json.loads(answer)["error"]["type"]) == (404, "not_found_error")


async def test_what_needs_a_restart_is_named() -> None:
    """A setting that cannot change live is named, and the others change all the same."""
    async with surface() as proxy:
        said = await _reloaded(proxy, _settings(threads=3, model=Path("/m.gguf"), aliases=("nick",)))
        assert said == ["Settings reloaded; needing a restart: model, threads."]
        assert proxy.listening.app[APP_LIVE].context.model.aliases == ("nick",)
    assert not LIVE - set(Settings.model_fields)
    assert needing_restart(_settings(), _settings(drain_s=1.0)) == []


async def test_wrong_settings_change_nothing() -> None:
    """A wrong file is said, and the proxy goes on with what it had; the next reload works."""
    async with surface() as proxy:
        said = await _reloaded(
            proxy,
            ConfigError("setting port = 'many': wrong", "correct it"),
            _settings(api_key_file=Path("/nowhere/keys")),
            _settings(host="0.0.0.0"),
            _settings(api_key=SecretStr("k")),
        )
        assert [line.startswith("Settings not reloaded, the old ones hold: ") for line in said] == [
            True, True, True, False,
        ]  # fmt: skip
        assert "'many'" in said[0]
        assert "/nowhere/keys" in said[1]
        assert proxy.listening.app[APP_LIVE].context.security.key_digests == (key_digest("k"),)


async def test_a_reload_that_fails_as_nobody_foresaw(caplog: pytest.LogCaptureFixture) -> None:
    """The task outlives what goes wrong in one reload, which the log has."""
    async with surface() as proxy:
        said: list[str] = []
        tries = iter((True, False))

        def load() -> Settings:
            if next(tries):
                raise RuntimeError("nobody foresaw it")
            return _settings()

        async with Reloading(_settings(), proxy.context, load, lambda _: None, said.append) as reloading:
            reloading.ask()
            await eventually(lambda: "nobody foresaw it" in caplog.text)
            reloading.ask()
            await eventually(lambda: said == ["Settings reloaded."])


async def test_reloading_ends_with_its_owner() -> None:
    """The task has an owner: leaving the context ends it, even while the settings are being read."""
    async with surface() as proxy:
        began = asyncio.Event()
        loop = asyncio.get_running_loop()

        def load() -> Settings:
            loop.call_soon_threadsafe(began.set)
            return _settings()

        changed: list[ProxyContext] = []
        before = asyncio.all_tasks()
        async with Reloading(_settings(), proxy.context, load, changed.append, str) as reloading:
            reloading.ask()
            await began.wait()
        assert asyncio.all_tasks() <= before


def test_settings_become_policy() -> None:
    """Hosts, origins (OLLAMA_ORIGINS among them) and filters arrive where requests are judged."""
    settings = _settings(allowed_hosts=("moe.example",), strip_parameters=("seed",), ollama_defaults=True)
    context: Any = _context()
    made = with_settings(context, settings)
    assert made.security.allowed_hosts == ("moe.example",)
    assert made.parameters.strip == ("seed",)
    assert made.parameters.ollama_defaults
    assert made.limits.drain_s == settings.drain_s


def _context() -> ProxyContext:
    from tests.support.surface import FakeBackend, Recorder, card

    async def no_stats() -> dict[str, object]:
        return {}

    return ProxyContext(FakeBackend(Path("/s")), card(), Recorder(), no_stats)
