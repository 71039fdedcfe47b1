"""Owns asking a proxy for text: the connection to it, request bodies, and its stream as records.

It never starts a proxy and never prints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from moe_proxy.errors import (
    BusyError,
    EngineError,
    EngineGoneError,
    ForbiddenError,
    ModelNotFoundError,
    MoeProxyError,
    NotRunningError,
    RequestError,
    UnauthorizedError,
    UnsupportedError,
)
from moe_proxy.proxy.sse import SseSplitter

Message = Mapping[str, object]
"""One message of a chat in OpenAI's form: ``{"role": "user", "content": "…"}``."""

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_ERRORS: Mapping[int, type[MoeProxyError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: ModelNotFoundError,
    429: BusyError,
    501: UnsupportedError,
    502: EngineGoneError,
    503: EngineError,
}


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    ``text`` is what was answered, ``reasoning`` what a thinking model thought before. ``tool_calls`` are in
    OpenAI's form, arguments as JSON text. ``finish_reason``: stop, length (``max_tokens`` or the context's
    end) or tool_calls. ``prompt_tokens`` counts cached ones too. ``prompt_per_s`` and ``decode_per_s`` are
    tokens per second as the engine timed them; None where it did not.
    """

    text: str
    reasoning: str
    tool_calls: tuple[Mapping[str, object], ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    prompt_per_s: float | None
    decode_per_s: float | None
    request_id: str


@dataclass
class _Parts:
    """What has come of an answer."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False


class CompletionStream:
    """An answer as it comes: ``async for piece in stream``, then ``stream.completion``.

    Leaving it early (``aclose``, or the end of ``async with``) stops the model's work on it.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._splitter = SseSplitter()
        self._waiting: list[str] = []
        self._parts = _Parts()
        self._completion: Completion | None = None
        self._request_id = response.headers.get("X-Request-Id", "")

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises RequestError before its end."""
        if self._completion is None:
            raise RequestError("the answer is not complete", "read the stream to its end first")
        return self._completion

    def __aiter__(self) -> CompletionStream:
        return self

    async def __anext__(self) -> str:
        """The next piece of the text, never empty.

        Raises EngineGoneError when the answer breaks off, and what the proxy says in its stream.
        """
        while not self._waiting:
            if self._completion is not None:
                raise StopAsyncIteration
            await self._receive()
        return self._waiting.pop(0)

    async def read(self) -> Completion:
        """The whole answer, once it is there. Raises as iterating does."""
        async for _ in self:
            pass
        return self.completion

    async def aclose(self) -> None:
        """Close the connection, unless the answer was read to its end; the proxy then stops the model."""
        self._response.close()

    async def __aenter__(self) -> CompletionStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _receive(self) -> None:
        try:
            data = await self._response.content.readany()
        except aiohttp.ClientError as error:
            raise EngineGoneError("the answer broke off", f"{error}") from error
        if not data:
            if not self._parts.done:
                raise EngineGoneError("the answer ended before it was complete", "ask again")
            self._completion = _completion_of(self._parts, self._request_id)
        for event in self._splitter.feed(data):
            if event.data == b"[DONE]":
                self._parts.done = True
            else:
                self._take(event.data)

    def _take(self, data: bytes) -> None:
        """One event of the stream."""
        try:
            value = json.loads(data)
        except ValueError:
            raise EngineGoneError(f"the answer is no JSON but {data[:80]!r}", "ask again") from None
        if not isinstance(value, dict):
            return
        if value.get("error"):
            code = value["error"].get("code") if isinstance(value["error"], dict) else None
            raise _error_of(code if isinstance(code, int) else 502, value)
        parts = self._parts
        parts.usage = value.get("usage") or parts.usage
        parts.timings = value.get("timings") or parts.timings
        for choice in value.get("choices") or ():
            delta = choice.get("delta") or {}
            parts.finish = choice.get("finish_reason") or parts.finish
            if thought := delta.get("reasoning_content"):
                parts.reasoning.append(thought)
            for call in delta.get("tool_calls") or ():
                _add_call(parts.calls, call)
            if text := choice.get("text") or delta.get("content"):
                parts.text.append(text)
                self._waiting.append(text)


def _completion_of(parts: _Parts, request_id: str) -> Completion:
    return Completion(
        text="".join(parts.text),
        reasoning="".join(parts.reasoning),
        tool_calls=tuple(parts.calls[index] for index in sorted(parts.calls)),
        finish_reason=parts.finish,
        prompt_tokens=int(parts.usage.get("prompt_tokens", 0)),
        completion_tokens=int(parts.usage.get("completion_tokens", 0)),
        prompt_per_s=parts.timings.get("prompt_per_second"),
        decode_per_s=parts.timings.get("predicted_per_second"),
        request_id=request_id,
    )


def _add_call(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Join a fragment of a tool call to what has come of it."""
    call = calls.setdefault(int(part.get("index", 0)), {"type": "function", "id": "", "function": {}})
    call["id"] = part.get("id") or call["id"]
    for name, text in (part.get("function") or {}).items():
        call["function"][name] = call["function"].get(name, "") + (text or "")


class ProxyClient:
    """The client of one proxy; made inside the event loop, and closed in the end."""

    def __init__(self, url: str, connector: aiohttp.BaseConnector, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Models take their time: how long an answer may take is for the caller to say.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=timeout, trust_env=False
        )

    async def close(self) -> None:
        """Close every connection: answers under way are stopped."""
        await self._session.close()

    async def get(self, path: str) -> dict[str, Any]:
        """GET ``path``, a JSON object. Raises NotRunningError, and what the proxy answers."""
        try:
            async with self._session.get(f"{self._url}{path}") as response:
                return await _json_of(response)
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    async def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """POST ``body`` as JSON; a JSON object. Raises NotRunningError, and what the proxy answers."""
        try:
            async with self._session.post(f"{self._url}{path}", json=body) as response:
                return await _json_of(response)
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    async def stream(
        self, prompt: str | Sequence[Message], domain: str | None, parameters: Mapping[str, object]
    ) -> CompletionStream:
        """Begin an answer to ``prompt``: text to go on with, or the messages of a chat.

        ``parameters`` go into the request's body, those that are None do not. ``domain`` names what it is
        about. Raises NotRunningError when there is no proxy, and what the proxy answers.
        """
        path, key = (_TEXT, "prompt") if isinstance(prompt, str) else (_CHAT, "messages")
        given = {name: value for name, value in parameters.items() if value is not None}
        body = {
            **given,
            key: prompt if isinstance(prompt, str) else list(prompt),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"X-Moe-Domain": domain} if domain else {}
        try:
            response = await self._session.post(f"{self._url}{path}", json=body, headers=headers)
            if response.status != 200:
                async with response:
                    await _json_of(response)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the request is no JSON: {error}", "give numbers, text and lists") from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        return CompletionStream(response)

    def _unreachable(self, error: aiohttp.ClientError) -> NotRunningError:
        return NotRunningError(f"the proxy at {self._url} does not answer: {error}", "is it running?")


async def _json_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The body of an answer, an object. Raises what an answer that is none, or no success, stands for."""
    try:
        value = json.loads(await response.read())
    except ValueError:
        value = None
    if response.status != 200:
        raise _error_of(response.status, value)
    if not isinstance(value, dict):
        raise NotRunningError(f"{response.url} gave no JSON object", "is that a moe-proxy?")
    return value


def _error_of(status: int, value: object) -> MoeProxyError:
    """The error of our tree that an answer stands for."""
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else f"the proxy answered with status {status}"
    kind = _ERRORS.get(status) or (RequestError if 400 <= status < 500 else EngineError)
    return kind(text)
