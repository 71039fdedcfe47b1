"""Owns one request on its way: its id and family, its body read once, what the observer is told of it.

It never talks to the engine and never shapes an answer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from aiohttp import web

from moe_proxy import prompts
from moe_proxy.domains.base import Classification
from moe_proxy.errors import BodyStalledError, BodyTooLargeError, RequestError
from moe_proxy.proxy.access_log import AccessRecord
from moe_proxy.proxy.admission import Admission
from moe_proxy.proxy.context import ProxyContext
from moe_proxy.proxy.replies import Family, family_of
from moe_proxy.proxy.security import origin_allowed
from moe_proxy.proxy.upstream import Upstream
from moe_proxy.proxy.watching import Watching

Result = TypeVar("Result")


class Exchange:
    """One request. ``path`` is the normal path, ``route`` its pattern, ``name`` what the path names, if
    anything. ``committed``: the head of the reply was sent. ``generates``: its answer is text of the model.
    """

    def __init__(
        self,
        request: web.Request,
        context: ProxyContext,
        admission: Admission,
        upstream: Upstream,
        watching: Watching,
        path: str,
    ) -> None:
        self.request = request
        self.context = context
        self.admission = admission
        self.upstream = upstream
        self.watching = watching
        self.path = path
        self.route = "other"
        self.name = ""
        self.family: Family = family_of(path)
        self.id = context.new_id()
        self.started_s = context.clocks.monotonic_s()
        self.started_ns = context.clocks.monotonic_ns()
        self.committed = False
        self.generates = False
        self._first_token_s: float | None = None
        self._domain: str | None = None

    @property
    def target(self) -> str:
        """The path to forward: exactly the one that was judged, with the query as it came."""
        query = self.request.raw_path.partition("#")[0].partition("?")[2]
        return f"{self.path}?{query}" if query else self.path

    async def body(self) -> bytes:
        """The whole body, as it came. Raises BodyTooLargeError."""
        limit = self.context.limits.max_body_bytes
        if (self.request.content_length or 0) > limit:
            raise _too_large(limit)
        try:
            if self.request.content.is_eof():
                # Came whole with its head, as most do: nothing is left to wait for.
                return await self.request.read()
            with self._watched():
                return await self.request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise _too_large(limit) from error
        except web.RequestPayloadError as error:
            raise RequestError("the body does not match its Content-Encoding or Transfer-Encoding") from error

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, a body of which nothing comes for a while fails, and so gives its place back."""
        stream, loop = self.request.content, asyncio.get_running_loop()
        stall_s = self.context.limits.stall_s

        timer: asyncio.TimerHandle

        def look(before: int) -> None:
            nonlocal timer
            if stream.total_bytes == before:
                stream.set_exception(BodyStalledError(f"nothing of the body came for {stall_s:g} s"))
            else:
                timer = loop.call_later(stall_s, look, stream.total_bytes)

        timer = loop.call_later(stall_s, look, stream.total_bytes)
        try:
            yield
        finally:
            timer.cancel()

    async def json_object(self) -> tuple[bytes, Mapping[str, object]]:
        """The body as it came and as an object, whatever its Content-Type says. Raises RequestError."""
        raw = await self.body()
        if not raw:
            raise RequestError("missing request body")
        return raw, await self.aside(len(raw), lambda: _object_of(raw))

    async def aside(self, size_bytes: int, compute: Callable[[], Result]) -> Result:
        """The result of ``compute``, in a thread where a body of ``size_bytes`` would hold up the others."""
        if size_bytes > self.context.limits.inline_body_bytes:
            return await asyncio.to_thread(compute)
        return compute()

    async def classified(self, value: Mapping[str, object]) -> Classification | None:
        """What the request is about, or None. Never fails: what goes wrong here is counted.

        A slow classifier works in a thread and has a bounded time; a thread that is late is not waited for.
        """
        named = self.request.headers.get("X-Moe-Domain", "").strip()
        if named in self.context.labels:
            labelling, text = self.context.labelling, None
            if labelling is not None:
                with self.admission.beside("learn label"):
                    text = prompts.text_in(self.path, value)
            if labelling is not None and text is not None:
                self.admission.follow_up("learn label", labelling.learn(text, named))
            return self._counted(Classification({named: 1.0}, "header"))
        classifier = self.context.classifier
        if classifier is None:
            return None
        with self.admission.beside("classify"):
            text = prompts.text_in(self.path, value)
            if text is None:
                return None
            if not classifier.slow:
                return self._counted(classifier.classify(text))
            answer = asyncio.to_thread(classifier.classify, text)
            return self._counted(await asyncio.wait_for(answer, self.context.limits.classify_s))
        return None

    @contextmanager
    def observed(self, classification: Classification | None) -> Iterator[None]:
        """Tell the observer that the request begins, and, whatever happens, that it has ended."""
        self.generates = True
        with self.admission.beside("observe"):
            self.context.observer.begin(self.id, self.path, classification)
        try:
            yield
        finally:
            self.admission.follow_up("observe", self.context.observer.end(self.id))

    def stamp(self, response: web.StreamResponse) -> None:
        """Add what every reply carries; to be done before its head is sent."""
        response.headers["Server"] = "moe-proxy"
        response.headers["X-Request-Id"] = self.id
        origin = self.request.headers.get("Origin")
        if origin is None:
            return
        response.headers.add("Vary", "Origin")
        if origin_allowed(origin, self.context.security, self.request.headers.get("Host", "")):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"

    def first_token(self) -> None:
        """The first bytes that come from the model leave now."""
        self._first_token_s = self.context.clocks.monotonic_s() - self.started_s
        self.context.metrics.first_token(self.route, self._first_token_s)

    def record(self, status: int, duration_s: float) -> AccessRecord:
        """What the access log says of the request."""
        return AccessRecord(
            time_ns=self.context.clocks.wall_ns(),
            id=self.id,
            client=self.request.remote or "-",
            method=self.request.method,
            path=self.path,
            status=status,
            duration_s=duration_s,
            first_token_s=self._first_token_s,
            domain=self._domain,
        )

    def _counted(self, classification: Classification) -> Classification:
        self._domain = classification.domain
        self.context.metrics.classified(classification.domain)
        return classification


def _object_of(raw: bytes) -> Mapping[str, object]:
    try:
        value = _DECODER.decode(raw.decode(json.detect_encoding(raw), "surrogatepass"))
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {type(value).__name__}, not an object")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse_constant(text)
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# Made once: with arguments of its own, json.loads makes one for every call.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is over the limit of {limit} bytes", "send less at once")
