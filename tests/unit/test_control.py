"""The control client against the fake engine, and the prior feed: latest wins, nobody waits."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moe_proxy.engine.control import EngineControl, PriorFeed
from moe_proxy.engine.supervisor import Launch, Supervisor
from moe_proxy.errors import ControlError, EngineGoneError

FAKE = Path(__file__).parents[1] / "fakes" / "fake_llama_server.py"
PATIENCE_S = 20.0


@pytest.fixture
async def engine_socket(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """A fake engine that is ready."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "engine.sock"
    launch = Launch((sys.executable, str(FAKE), "--host", str(path)), dict(os.environ), path)
    async with Supervisor(launch, runtime_dir=folder, log_path=folder / "log") as engine:
        await engine.ready(PATIENCE_S)
        yield path


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; the bound only turns a hang into a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.001)


async def fake(socket: Path, path: str, body: Mapping[str, object] | None = None) -> Any:
    """Talk to the fake behind the client's back."""
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, f"http://fake{path}", json=body) as answer:
            return await answer.json()


async def test_every_call_speaks_the_pagers_protocol(engine_socket: Path) -> None:
    """Each method sends its route, query and body, and gives the parsed answer."""
    async with EngineControl(engine_socket) as control:
        assert (await control.experts())["mode"] == "on"
        assert await control.push_prior({"id": "a", "kappa": 8, "layers": {"0": [[3, 0.5]]}}) == {
            "id": "a",
            "entries": 1,
        }
        assert (await control.residency())["layers"]["0"] == [3]
        first = await control.stats()
        assert first["priors"] == 1
        assert (await control.stats(since=first["snapshot"]))["delta"]["priors"] == 0
        assert await control.set_budget(4096) == {"ram_bytes": 4096}
        assert (await control.usage())["tokens"] == 0
        assert (await control.props())["total_slots"] == 1
        await fake(engine_socket, "/v1/completions", {"prompt": "x"})
        await control.usage(request="", reset=True)
    seen = await fake(engine_socket, "/fake/requests")
    usage = [request["query"] for request in seen if request["path"] == "/experts/usage"]
    assert usage == ["", "request=&reset=1"]


async def test_a_refusal_carries_the_engines_words(engine_socket: Path) -> None:
    """A 4xx or 5xx of the pager is a ControlError with status and message."""
    async with EngineControl(engine_socket) as control:
        with pytest.raises(ControlError, match=r"GET /experts/usage was refused with 404: no request nobody"):
            await control.usage(request="nobody")
        with pytest.raises(ControlError, match="layer 0 has no expert 99"):
            await control.push_prior({"id": "a", "kappa": 8, "layers": {"0": [[99, 0.5]]}})
        await fake(engine_socket, "/fake/switches", {"pager": False})
        with pytest.raises(ControlError, match="501: the pager is off"):
            await control.experts()


async def test_silence_and_absence_are_the_same_error(engine_socket: Path, tmp_path: Path) -> None:
    """No answer in time, no socket, or a closed client: EngineGoneError."""
    await fake(engine_socket, "/fake/switches", {"control_delay": 60})
    async with EngineControl(engine_socket, timeout_s=0.1) as control:
        with pytest.raises(EngineGoneError, match=r"did not answer GET /experts within 0\.1 s"):
            await control.experts()
    with pytest.raises(EngineGoneError, match="closed"):
        await control.experts()
    async with EngineControl(tmp_path / "none.sock") as nobody:
        with pytest.raises(EngineGoneError, match="did not answer GET /experts"):
            await nobody.experts()


async def test_an_answer_that_is_no_json_object_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever listens there, garbage is an error and no traceback."""
    path = tmp_path_factory.mktemp("g") / "e.sock"

    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n\xff[]")
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(garbage, str(path)), EngineControl(path) as control:
        with pytest.raises(ControlError, match="gave no JSON object"):
            await control.experts()


@dataclass(frozen=True)
class FakePrior:
    """A prior that is only a name."""

    id: str

    def to_json(self) -> dict[str, object]:
        """Its body."""
        return {"id": self.id}


class SlowControl(EngineControl):
    """Pushes that end when they are told to, in the way they are told to."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.pushed: list[str] = []
        self.gate = asyncio.Semaphore(0)
        self.error: Exception | None = None
        self.running = self.most = 0

    async def push_prior(self, prior: Mapping[str, object]) -> dict[str, Any]:
        """Note the id, wait for the gate."""
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.pushed.append(str(prior["id"]))
            await self.gate.acquire()
            if self.error is not None:
                raise self.error
        finally:
            self.running -= 1
        return {}

    async def reached(self, count: int) -> None:
        """Wait until so many pushes have begun."""
        await until(lambda: len(self.pushed) >= count)


def feed(control: SlowControl, **times: float) -> PriorFeed:
    """A feed that does not pause."""
    return PriorFeed(control, **{"min_interval_s": 0.0, "retry_s": 600.0, **times})


async def test_the_latest_offer_wins_and_pushes_never_overlap() -> None:
    """A, B, A offered while a push runs ends on A, with the offers between left out."""
    control = SlowControl()
    async with feed(control) as priors:
        priors.offer(FakePrior("A"))
        await control.reached(1)
        for name in "BCA":
            priors.offer(FakePrior(name))
        control.gate.release()
        await control.reached(2)
        control.gate.release()
    assert control.pushed == ["A", "A"]
    assert control.most == 1


async def test_offer_never_waits_and_close_ends_a_hanging_push() -> None:
    """offer returns at once while the engine hangs, and close does not wait for it."""
    control = SlowControl()
    async with feed(control) as priors:
        for number in range(1000):
            priors.offer(FakePrior(str(number)))
        await control.reached(1)
    assert control.running == 0
    assert control.pushed == ["999"]


async def test_at_most_one_push_per_interval() -> None:
    """A second prior within ``min_interval_s`` waits, and what replaces it meanwhile is pushed instead."""
    control = SlowControl()
    loop = asyncio.get_running_loop()
    async with feed(control, min_interval_s=0.2) as priors:
        priors.offer(FakePrior("A"))
        await control.reached(1)
        control.gate.release()
        started = loop.time()
        priors.offer(FakePrior("B"))
        await asyncio.sleep(0.01)
        priors.offer(FakePrior("C"))
        await control.reached(2)
        assert loop.time() - started >= 0.15
    assert control.pushed == ["A", "C"]


async def test_an_outage_is_counted_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failed push is retried with the newest prior; the log has one line per outage, not per push."""
    control = SlowControl()
    control.error = EngineGoneError("gone")
    async with feed(control, retry_s=0.0) as priors:
        priors.offer(FakePrior("A"))
        for count in (1, 2, 3):
            await control.reached(count)
            control.gate.release()
        await control.reached(4)
        control.error = None
        control.gate.release()
        await until(lambda: priors.pushed == 1)
        assert (priors.pushed, priors.failed) == (1, 3)
    assert len(caplog.records) == 1


async def test_repeat_pushes_the_last_prior_to_a_restarted_engine() -> None:
    """After a restart repeat() pushes what was offered last; before any offer it does nothing."""
    control = SlowControl()
    async with feed(control) as priors:
        priors.repeat()
        await asyncio.sleep(0)
        assert control.pushed == []
        priors.offer(FakePrior("A"))
        await control.reached(1)
        control.error = EngineGoneError("gone")
        control.gate.release()
        await until(lambda: priors.failed == 1)
        control.error = None
        priors.repeat()
        await control.reached(2)
        control.gate.release()
        await until(lambda: priors.pushed == 1)
        priors.repeat()
        await control.reached(3)
    assert control.pushed == ["A", "A", "A"]


async def test_a_refused_prior_is_not_tried_again() -> None:
    """A prior that the pager calls wrong would be wrong again; the next one is pushed."""
    control = SlowControl()
    control.error = ControlError("400")
    async with feed(control, retry_s=0.0) as priors:
        priors.offer(FakePrior("bad"))
        await control.reached(1)
        control.gate.release()
        await until(lambda: priors.failed == 1)
        await asyncio.sleep(0.05)
        assert control.pushed == ["bad"]
        priors.offer(FakePrior("good"))
        await control.reached(2)
