"""Owns the talk with the pager's control API, and that the newest prior reaches it without anybody waiting.

It never decides which prior is right and never talks to clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import urlencode

from moe_proxy.errors import ControlError, EngineError, EngineGoneError
from moe_proxy.unix_http import UnansweredError, UnixHttp

_log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_HEADERS = (("Host", "localhost"), ("Content-Type", "application/json"))


class EngineControl:
    """The routes behind llama-server's Unix socket; use as an async context manager.

    Every call raises EngineGoneError when nobody answers within ``timeout_s``, and ControlError, with the
    engine's own words, when the answer is a refusal: the pager is off, the body is wrong, the id is unknown.
    """

    def __init__(self, socket: Path, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._http: UnixHttp | None = None

    async def __aenter__(self) -> EngineControl:
        self._http = UnixHttp(self._socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    async def experts(self) -> dict[str, Any]:
        """Mode, layout, tiers with budgets and use, policy, and the reasons for anything that is off."""
        return await self._call("GET", "/experts")

    async def stats(self, since: int | None = None) -> dict[str, Any]:
        """Counters since the start; with ``since``, a former answer's ``snapshot``, also their ``delta``."""
        return await self._call("GET", "/experts/stats", {} if since is None else {"since": str(since)})

    async def residency(self) -> dict[str, Any]:
        """``{"layers": {"0": [expert, …]}}``: which experts are resident."""
        return await self._call("GET", "/experts/residency")

    async def usage(
        self, *, request: str | None = None, sequence: int | None = None, reset: bool = False
    ) -> dict[str, Any]:
        """Routed experts of one request or one sequence, or of all; ``reset`` starts its counts anew."""
        query = {"request": request, "sequence": sequence, "reset": 1 if reset else None}
        given = {name: str(value) for name, value in query.items() if value is not None}
        return await self._call("GET", "/experts/usage", given)

    async def push_prior(self, prior: Mapping[str, object]) -> dict[str, Any]:
        """Set the prior; it takes effect before the next token."""
        return await self._call("POST", "/experts/prior", body=prior)

    async def set_budget(self, ram_bytes: int) -> dict[str, Any]:
        """Change the RAM budget of the experts while the engine runs."""
        return await self._call("POST", "/experts/budget", body={"ram_bytes": ram_bytes})

    async def props(self) -> dict[str, Any]:
        """llama-server's own properties: slots, context per slot, chat template."""
        return await self._call("GET", "/props")

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        target = f"{path}?{urlencode(query)}" if query else path
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            status, raw = await self._exchanged(method, target, data)
        except asyncio.TimeoutError as error:
            raise EngineGoneError(
                f"llama-server did not answer {method} {path} within {self._timeout_s:g} s"
            ) from error
        except OSError as error:
            raise EngineGoneError(f"llama-server did not answer {method} {path}: {error}") from error
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        text = raw.decode("utf-8", "replace")
        if status != 200:
            raise ControlError(f"{method} {path} was refused with {status}: {_message_of(value, text)}")
        if not isinstance(value, dict):
            raise ControlError(f"{method} {path} gave no JSON object but {text[:80]!r}")
        return value

    async def _exchanged(self, method: str, target: str, data: bytes | None) -> tuple[int, bytes]:
        """Status and body; a call that a kept connection lost is made again, as none changes by that."""
        fresh = False
        while True:
            if self._http is None:
                raise EngineGoneError("the connection to llama-server is closed")
            try:
                answer = await self._http.send(
                    method, target, _HEADERS, data, timeout_s=self._timeout_s, fresh=fresh
                )
            except UnansweredError as error:
                # A kept connection that llama-server closed just now.
                if fresh or not error.reused:
                    raise
                fresh = True
                continue
            try:
                return answer.status, await answer.read()
            finally:
                answer.close()


def _message_of(value: object, text: str) -> str:
    """llama-server's error message, or the beginning of whatever came instead."""
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else text[:200].strip() or "no message"


class OfferedPrior(Protocol):
    """What PriorFeed needs of a prior."""

    def to_json(self) -> dict[str, object]:
        """The body of ``POST /experts/prior``."""
        ...


class PriorFeed:
    """Brings the newest prior to the engine; use as an async context manager.

    At most one push per ``min_interval_s`` and never two at once; what was offered meanwhile is replaced by
    what is newer. While the engine is gone the newest one is tried again every ``retry_s``; one that the
    pager refuses is not.
    """

    def __init__(self, control: EngineControl, *, min_interval_s: float = 0.05, retry_s: float = 1.0) -> None:
        self._control = control
        self._min_interval_s = min_interval_s
        self._retry_s = retry_s
        self._offered: OfferedPrior | None = None
        self._pending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._outage = False
        self.pushed = 0
        self.failed = 0

    async def __aenter__(self) -> PriorFeed:
        self._task = asyncio.create_task(self._run(), name="prior-feed")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def offer(self, prior: OfferedPrior) -> None:
        """Have ``prior`` pushed soon, unless a newer one comes first. Never blocks and never fails."""
        self._offered = prior
        self._pending.set()

    def repeat(self) -> None:
        """Push the last prior again: a restarted engine has forgotten it. Never blocks and never fails."""
        if self._offered is not None:
            self._pending.set()

    async def close(self) -> None:
        """Stop pushing; what is pending is dropped."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._pending.wait()
            self._pending.clear()
            started = loop.time()
            if await self._push():
                await asyncio.sleep(max(0.0, started + self._min_interval_s - loop.time()))
            elif not self._pending.is_set():
                # Woken early by a newer prior, or by the engine being back.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._pending.wait(), self._retry_s)
                self._pending.set()
            else:
                await asyncio.sleep(self._min_interval_s)

    async def _push(self) -> bool:
        """Push the newest prior; False when it should be tried again."""
        prior = self._offered
        assert prior is not None
        try:
            await self._control.push_prior(prior.to_json())
        except Exception as error:
            self.failed += 1
            if not self._outage:
                self._outage = True
                known = isinstance(error, EngineError)
                _log.warning("no prior reaches the engine: %s", error, exc_info=None if known else error)
            return not isinstance(error, EngineGoneError)
        self.pushed += 1
        self._outage = False
        return True
