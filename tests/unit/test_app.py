"""The wiring: how a proxy ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from moe_proxy.app import _end
from moe_proxy.engine.supervisor import State
from moe_proxy.proxy.listening import Listening
from tests.support.fake_engine import LIMITS, PATIENCE_S, gone, supervisor


class Streams:
    """A surface whose streams end when they are cut, or at once."""

    def __init__(self, running: bool) -> None:
        self.ended = asyncio.Event()
        if not running:
            self.ended.set()

    async def stop(self) -> None:
        """Wait for them."""
        await self.ended.wait()

    async def cut(self) -> None:
        """End them."""
        self.ended.set()


@pytest.mark.parametrize("running", [True, False])
async def test_a_second_signal_waits_for_nobody(tmp_path: Path, running: bool) -> None:
    """Second SIGTERM: now. Neither a stream nor an engine that ignores SIGTERM is waited for."""
    limits = replace(LIMITS, term_grace_s=600.0)
    hurrying = asyncio.Event()
    async with supervisor(tmp_path, "--ignore-sigterm", limits=limits) as engine:
        await engine.ready(PATIENCE_S)
        pid = engine.status.pid
        assert pid is not None
        surface: Any = Streams(running)
        end = asyncio.create_task(_end(cast(Listening, surface), engine, hurrying))
        await asyncio.sleep(0)
        assert not end.done()
        hurrying.set()
        await asyncio.wait_for(end, PATIENCE_S)
        assert engine.status.state is State.STOPPED
        assert gone(pid)
