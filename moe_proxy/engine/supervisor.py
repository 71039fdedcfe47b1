"""Owns the life of the one llama-server: one task starts it, watches it, restarts it and stops it.

Callers ask for an outcome ("be ready within t", "stop"), they never read a state and then act on it. It never
talks to clients and knows no flag of llama-server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final

import aiohttp

from moe_proxy.engine.child import Child, Launch
from moe_proxy.engine.child_log import ChildLog
from moe_proxy.engine.leftover import EngineRecord, clear_the_way
from moe_proxy.engine.process import resident_bytes
from moe_proxy.errors import EngineGoneError, EngineStartError

__all__ = ["EngineStatus", "Launch", "State", "Supervisor", "SupervisorLimits"]

_log = logging.getLogger(__name__)

_HEALTH: Final = "http://engine/health"


class State(str, Enum):
    """Where the child is in its life."""

    STOPPED = "stopped"  # not started yet, or ended because it was asked to
    ASLEEP = "asleep"  # ended to give its memory back; started again for whoever next asks for it
    STARTING = "starting"  # started, does not answer yet
    LOADING = "loading"  # answers, and is loading the model
    READY = "ready"
    DRAINING = "draining"  # told to stop
    CRASHED = "crashed"  # died after it had been ready; will be started again
    FAILED = "failed"  # never became ready, so that another start would end the same way


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot for people and dashboards; to act on, ask ``ready``."""

    state: State
    reason: str  # why it crashed or failed, else ""
    restarts: int
    pid: int | None
    progress: float | None  # of loading, 0 to 1: how much of the model is in memory; None when not loading
    next_try_s: float | None  # until the next start, in state CRASHED
    since_s: float  # time spent in this state


@dataclass(frozen=True)
class SupervisorLimits:
    """Every time and size that the supervisor goes by."""

    ready_timeout_s: float = 600.0
    health_interval_s: float = 0.1
    health_timeout_s: float = 2.0
    term_grace_s: float = 10.0
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    backoff_reset_s: float = 60.0  # a child that was ready for this long is trusted again
    log_bytes: int = 10 * 1024 * 1024
    log_files: int = 3
    ring_lines: int = 200
    line_bytes: int = 8192
    error_lines: int = 10


@dataclass(frozen=True)
class _Life:
    """How one run of the child ended."""

    reason: str
    ready_s: float | None  # how long it was ready; None: never


class Supervisor:
    """``async with Supervisor(...) as engine: await engine.ready(600)``; leaving it stops the child."""

    def __init__(
        self,
        launch: Launch,
        *,
        runtime_dir: Path,
        log_path: Path,
        limits: SupervisorLimits | None = None,
        on_ready: Callable[[], Awaitable[None]] | None = None,
        model_bytes: int = 0,
    ) -> None:
        """``on_ready`` is awaited after each start once the child answers, and cancelled if it dies.

        ``model_bytes`` is what the child reads until it is ready, by which progress is told; 0: unknown.
        """
        self._launch = launch
        self._limits = limits or SupervisorLimits()
        self._on_ready = on_ready
        self._model_bytes = model_bytes
        self._runtime_dir = runtime_dir
        self._record = runtime_dir / "engine.json"
        self._log_path = log_path
        self._log: ChildLog | None = None
        self._child: Child | None = None
        self._owner: asyncio.Task[None] | None = None
        self._restarts = 0
        self._state, self._reason = State.STOPPED, ""
        self._since = self._next_try = 0.0
        self._stopping = False
        # Asked to rest, from then until it is started again; asked for again by somebody meanwhile.
        self._resting = self._wanted = False
        self._stop_deadline = float("inf")
        # Set on every event that the owning task has to look at: the child ended, or somebody wants a stop.
        self._wake = asyncio.Event()
        # Set, and replaced, on every change of state.
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Supervisor:
        limits = self._limits
        self._log = ChildLog(
            self._log_path,
            limit_bytes=limits.log_bytes,
            files=limits.log_files,
            ring_lines=limits.ring_lines,
            line_bytes=limits.line_bytes,
        )
        self._enter(State.STARTING)
        self._owner = asyncio.create_task(self._own(self._log), name="engine-supervisor")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if self._log is not None:
            self._log.close()

    @property
    def status(self) -> EngineStatus:
        """What is going on now."""
        now = asyncio.get_running_loop().time()
        crashed = self._state is State.CRASHED
        return EngineStatus(
            state=self._state,
            reason=self._reason,
            restarts=self._restarts,
            pid=self._child.pid if self._child is not None else None,
            progress=self._progress(),
            next_try_s=max(0.0, self._next_try - now) if crashed else None,
            since_s=now - self._since if self._owner is not None else 0.0,
        )

    def _progress(self) -> float | None:
        """llama-server does not say how far it is; how much memory it has taken does."""
        loading = self._state in (State.STARTING, State.LOADING)
        if not loading or self._child is None or not self._model_bytes:
            return None
        return round(min(resident_bytes(self._child.pid) / self._model_bytes, 1.0), 3)

    async def ready(self, timeout_s: float) -> None:
        """Return when the child is ready, also when it has to be restarted or woken for that.

        Raises EngineStartError when it failed or is not ready within ``timeout_s``, EngineGoneError when it
        was stopped; the message holds the reason and the child's last lines.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._state is not State.READY:
            if self._state is State.FAILED:
                raise EngineStartError(self._explained(self._reason))
            if self._resting and not self._stopping:
                self._wanted = True
                self._wake.set()
            elif self._state in (State.STOPPED, State.DRAINING):
                raise EngineGoneError(f"llama-server is {self._state.value}")
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                why = f"llama-server is not ready after {timeout_s:g} s, it is {self._state.value}"
                why = f"{why}: {self._reason}" if self._reason else why
                raise EngineStartError(self._explained(why)) from None

    def rest(self) -> None:
        """Stop the child and give its memory back, until somebody asks for ``ready``. Waits for nothing.

        Only a child that is ready is stopped: one that is loading is being waited for.
        """
        if self._state is State.READY and not self._stopping:
            self._resting, self._wanted = True, False
            self._enter(State.DRAINING)
            self._wake.set()

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop the child for good: SIGTERM, ``grace_s`` (default: the limits'), SIGKILL to its whole group.

        Returns when nothing of it is left. A second call with a shorter grace hurries the first one up.
        """
        if self._owner is None:
            return
        grace_s = self._limits.term_grace_s if grace_s is None else grace_s
        self._stop_deadline = min(self._stop_deadline, asyncio.get_running_loop().time() + grace_s)
        self._stopping = True
        self._wake.set()
        # Being cancelled while waiting leaves the owning task at its work.
        await asyncio.wait({self._owner})

    def tail(self, count: int) -> list[str]:
        """The last ``count`` lines that the child printed, oldest first."""
        return self._log.tail(count) if self._log is not None else []

    def reopen_log(self) -> None:
        """Open the log file anew under its name, for a log rotation done by others."""
        if self._log is not None:
            self._log.reopen()

    async def _own(self, log: ChildLog) -> None:
        """The owning task."""
        try:
            await self._live(log)
        except Exception as error:
            _log.exception("the supervisor failed")
            self._enter(State.FAILED, f"the supervisor failed: {error!r}")
        finally:
            if self._state is not State.FAILED:
                self._enter(State.STOPPED)

    async def _live(self, log: ChildLog) -> None:
        """One life after the other, with growing pauses, until stopped or until the first one fails."""
        limits, loop = self._limits, asyncio.get_running_loop()
        backoff_s, was_ready = limits.backoff_first_s, False
        while not self._stopping:
            life = await self._one_life(log)
            if self._stopping:
                return
            if self._resting:
                was_ready = True
                await self._rest_until_wanted()
                continue
            if life.ready_s is not None:
                was_ready = True
                backoff_s = limits.backoff_first_s if life.ready_s >= limits.backoff_reset_s else backoff_s
            elif not was_ready:
                self._enter(State.FAILED, life.reason)
                return
            self._next_try = loop.time() + backoff_s
            self._enter(State.CRASHED, life.reason)
            while not self._stopping and loop.time() < self._next_try:
                await self._sleep(self._next_try - loop.time())
            backoff_s = min(2 * backoff_s, limits.backoff_max_s)
            if not self._stopping:
                self._restarts += 1
                self._enter(State.STARTING)

    async def _rest_until_wanted(self) -> None:
        self._enter(State.ASLEEP)
        while not self._stopping and not self._wanted:
            await self._sleep(None)
        self._resting = self._wanted = False
        if not self._stopping:
            self._enter(State.STARTING)

    async def _one_life(self, log: ChildLog) -> _Life:
        """Start the child and stay with it to its end; however this is left, the child is gone."""
        loop = asyncio.get_running_loop()
        ready_at: float | None = None
        late = ended = ""
        try:
            self._runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            grace_s = self._limits.term_grace_s
            await asyncio.to_thread(clear_the_way, self._record, self._launch.socket, grace_s)
            if self._stopping:
                return _Life("stopped", None)
            log.reopen()  # a file that could not be written gets another chance
            child = self._child = Child(self._launch, log, on_exit=self._wake.set)
        except EngineStartError as error:
            return _Life(str(error), None)
        except OSError as error:
            return _Life(f"cannot prepare {self._runtime_dir}: {error}", None)
        try:
            EngineRecord.of(child.pid, child.start_time).write(self._record)
            late = await self._load(child)
            if child.running and not late and not self._stopping:
                ready_at = loop.time()
                self._enter(State.READY)
                await self._serve(child)
        except asyncio.CancelledError:
            child.kill()
            raise
        finally:
            ready_s = None if ready_at is None else loop.time() - ready_at
            ended = await self._end(child)
        during = "while loading" if ready_at is None else f"after {ready_s:.0f} s"
        return _Life(late or f"llama-server {ended} {during}", ready_s)

    async def _load(self, child: Child) -> str:
        """Poll /health until it is well; gives a reason when it took too long, else ""."""
        limits, loop = self._limits, asyncio.get_running_loop()
        deadline = loop.time() + limits.ready_timeout_s
        connector = aiohttp.UnixConnector(str(self._launch.socket), force_close=True)
        timeout = aiohttp.ClientTimeout(total=limits.health_timeout_s)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
            while child.running and not self._stopping:
                with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                    async with session.get(_HEALTH) as answer:
                        if answer.status == 200:
                            return ""
                        if self._state is State.STARTING:
                            self._enter(State.LOADING)
                if loop.time() >= deadline:
                    return f"llama-server was not ready within {limits.ready_timeout_s:g} s"
                await self._sleep(limits.health_interval_s)
        return ""

    async def _serve(self, child: Child) -> None:
        """Stay until the child ends or is to be stopped; the process is watched, not its health."""
        hook = asyncio.create_task(self._call_on_ready(), name="engine-on-ready")
        try:
            while child.running and not self._stopping and not self._resting:
                await self._sleep(None)
        finally:
            hook.cancel()
            await asyncio.wait({hook})

    async def _call_on_ready(self) -> None:
        if self._on_ready is None:
            return
        try:
            await self._on_ready()
        except Exception:
            _log.exception("on_ready failed; the engine serves without it")

    async def _end(self, child: Child) -> str:
        """TERM, wait, KILL, and remove what it left; says how the child ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.term_grace_s
        try:
            if child.running:
                if self._stopping:
                    self._enter(State.DRAINING)
                child.terminate()
            while child.running and (left_s := min(deadline, self._stop_deadline) - loop.time()) > 0:
                await self._sleep(left_s)
        finally:
            # The child may have been cancelled with us: it is killed before anything is awaited.
            child.kill()
        ended = await child.close()
        self._child = None
        self._record.unlink(missing_ok=True)
        self._launch.socket.unlink(missing_ok=True)
        return ended

    async def _sleep(self, seconds: float | None) -> None:
        """Until something happens, at most ``seconds``."""
        loop = asyncio.get_running_loop()
        timer = None if seconds is None else loop.call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            self._wake.clear()
            if timer is not None:
                timer.cancel()

    def _enter(self, state: State, reason: str = "") -> None:
        self._state, self._reason = state, reason
        self._since = asyncio.get_running_loop().time()
        _log.log(logging.WARNING if reason else logging.INFO, "engine %s %s", state.value, reason)
        self._changed.set()
        self._changed = asyncio.Event()

    def _explained(self, why: str) -> str:
        lines = self.tail(self._limits.error_lines)
        return "\n  ".join([f"{why}; its last lines:", *lines]) if lines else why
