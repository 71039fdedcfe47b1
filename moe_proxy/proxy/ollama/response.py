"""Owns the way from llama-server's stream to Ollama's objects. Pure: bytes in, records out, clocks handed in.

One translator serves streams (each object a line) and whole replies (all objects put together), chat and
completion alike. It ends with ``done`` only when the engine said that it has finished.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache

from moe_proxy.errors import EngineError, EngineGoneError
from moe_proxy.proxy.context import Clocks
from moe_proxy.proxy.replies import refusal
from moe_proxy.proxy.sse import SseSplitter

# Readers with a line limit of 64 KiB are common; a character takes up to 6 bytes in JSON.
LINE_CHARACTERS = 8192

Record = dict[str, object]


@dataclass(frozen=True)
class Reply:
    """Whose answer it is: ``model`` as it was asked for, the route, when the request came (monotonic)."""

    model: str
    is_chat: bool
    started_ns: int


@dataclass
class _ToolCall:
    """Put together from its fragments."""

    identity: str = ""
    name: str = ""
    arguments: str = ""


class Translator:
    """The state of one answer."""

    def __init__(self, reply: Reply, clocks: Clocks) -> None:
        self._reply = reply
        self._clocks = clocks
        self._events = SseSplitter()
        self._calls: dict[int, _ToolCall] = {}
        self._reason: str | None = None
        self._timings: Mapping[str, object] = {}
        self._usage: Mapping[str, object] = {}
        self._done = False
        self._error: EngineError | None = None
        self.held_ns = 0

    def feed(self, data: bytes) -> list[Record]:
        """The objects that ``data`` completes.

        An error among the events is raised by the next call of ``feed`` or ``end``, so that what was said
        before it is not lost. Raises EngineError.
        """
        if self._error is not None:
            raise self._error
        records: list[Record] = []
        try:
            for event in self._events.feed(data):
                if self._done:
                    break
                if event.data != b"[DONE]":
                    records += self._translate(_parsed(event.data))
                elif self._reason is not None:
                    records += self._finish()
        except EngineError as error:
            self._error = error
        return records

    def end(self) -> list[Record]:
        """The objects that are left when the stream has ended.

        Raises EngineError: there was an error among the events, or the stream ended too early.
        """
        if self._error is not None:
            raise self._error
        if self._done:
            return []
        if self._reason is None:
            raise EngineGoneError("the backend closed the stream before the answer was complete", "try again")
        return self._finish()

    def empty(self) -> Record:
        """An object that says nothing: a sign of life."""
        return self._said("")

    def loaded(self, reason: str) -> Record:
        """The one object for a request that generates nothing; ``reason`` is load or unload."""
        return {**self._said(""), "done": True, "done_reason": reason}

    def _translate(self, value: Mapping[str, object]) -> Iterator[Record]:
        if value.get("error"):
            raise refusal(_status_in(value["error"]), json.dumps(value).encode())
        self._timings = _mapping(value.get("timings")) or self._timings
        self._usage = _mapping(value.get("usage")) or self._usage
        if "choices" in value:
            choices = value["choices"]
            if isinstance(choices, list) and choices:
                yield from self._choice(_mapping(choices[0]))
        elif "content" in value:
            yield from self._texts(_string(value, "content"), "", _probabilities(value))
            if value.get("stop") is True:
                self._reason = "length" if value.get("stop_type") == "limit" else "stop"
                self._usage = self._usage or {
                    "prompt_tokens": value.get("tokens_evaluated"),
                    "completion_tokens": value.get("tokens_predicted"),
                }

    def _choice(self, choice: Mapping[str, object]) -> Iterator[Record]:
        delta = _mapping(choice.get("delta"))
        logprobs = _mapping(choice.get("logprobs")).get("content")
        yield from self._texts(
            _string(delta, "content"),
            _string(delta, "reasoning_content"),
            [_logprob(item) for item in logprobs] if isinstance(logprobs, list) else [],
        )
        fragments = delta.get("tool_calls")
        for fragment in fragments if isinstance(fragments, list) else ():
            self._gather(_mapping(fragment))
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._reason = "length" if reason == "length" else "stop"

    def _texts(self, text: str, thinking: str, logprobs: list[Record]) -> Iterator[Record]:
        """Text in lines that are not too long; probabilities go with the first."""
        more: Record = {"logprobs": logprobs} if logprobs else {}
        for part in _cut(thinking):
            yield {**self._said("", part), **more}
            more = {}
        for part in _cut(text):
            yield {**self._said(part), **more}
            more = {}
        if more:
            yield {**self._said(""), **more}

    def _gather(self, fragment: Mapping[str, object]) -> None:
        index = fragment.get("index")
        call = self._calls.setdefault(index if isinstance(index, int) else 0, _ToolCall())
        function = _mapping(fragment.get("function"))
        call.identity += _string(fragment, "id") if not call.identity else ""
        call.name += _string(function, "name")
        call.arguments += _string(function, "arguments")

    def _finish(self) -> list[Record]:
        """Tool calls in an object of their own, then the last one."""
        records: list[Record] = []
        if self._calls:
            calls = self._whole_calls()
            said = self._said("")
            message = _mapping(said.get("message"))
            where: Record = (
                {"message": {**message, "tool_calls": calls}} if message else {"tool_calls": calls}
            )
            records.append({**said, **where})
        last: Record = {**self._said(""), "done": True, "done_reason": self._reason or "stop"}
        if not self._reply.is_chat:
            # Deprecated, and yet clients fail without the key.
            last["context"] = []
        last |= self._figures()
        self._done = True
        return [*records, last]

    def _whole_calls(self) -> list[Record]:
        """The calls; one that the limit of tokens cut is left out where others are whole, as in Ollama."""
        *first, last = sorted(self._calls)
        calls = [_tool_call(index, self._calls[index]) for index in first]
        try:
            return [*calls, _tool_call(last, self._calls[last], cut=self._reason == "length")]
        except EngineError:
            if calls and self._reason == "length":
                return calls
            raise

    def _figures(self) -> Record:
        timings, usage = self._timings, self._usage
        prompt = _integer(timings, "cache_n") + _integer(timings, "prompt_n")
        figures = {
            "total_duration": self._clocks.monotonic_ns() - self._reply.started_ns,
            "load_duration": self.held_ns,
            "prompt_eval_count": prompt or _integer(usage, "prompt_tokens"),
            "prompt_eval_duration": _nanoseconds(timings, "prompt_ms"),
            "eval_count": _integer(timings, "predicted_n") or _integer(usage, "completion_tokens"),
            "eval_duration": _nanoseconds(timings, "predicted_ms"),
        }
        return {name: value for name, value in figures.items() if value}

    def _said(self, text: str, thinking: str = "") -> Record:
        head: Record = {"model": self._reply.model, "created_at": date_of(self._clocks.wall_ns())}
        thought = {"thinking": thinking} if thinking else {}
        if self._reply.is_chat:
            message = {"role": "assistant", "content": text, **thought}
            return {**head, "message": message, "done": False}
        return {**head, "response": text, **thought, "done": False}


def gathered(records: Sequence[Record]) -> Record:
    """The objects of one finished answer as the one object of a reply that is not streamed."""
    last = dict(records[-1])
    spoken = [record for record in records if not record["done"]]
    where = [_mapping(record.get("message")) or record for record in spoken]
    is_chat = "message" in last
    merged: Record = {
        "content" if is_chat else "response": _joined(where, "content" if is_chat else "response")
    }
    thinking = _joined(where, "thinking")
    if thinking:
        merged["thinking"] = thinking
    calls = _listed(where, "tool_calls")
    if calls:
        merged["tool_calls"] = calls
    logprobs = _listed(spoken, "logprobs")
    if logprobs:
        last["logprobs"] = logprobs
    if is_chat:
        return {**last, "message": {"role": "assistant", **merged}}
    return {**last, **merged}


def date_of(wall_ns: int) -> str:
    """UTC, RFC 3339, with nanoseconds."""
    seconds, rest = divmod(wall_ns, 1_000_000_000)
    return f"{_date_of_second(seconds)}.{rest:09d}Z"


@lru_cache(maxsize=8)
def _date_of_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}"


def _parsed(data: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"llama-server sent what is no JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise EngineError(f"llama-server sent no object: {data[:80]!r}")
    return value


def _tool_call(index: int, call: _ToolCall, *, cut: bool = False) -> Record:
    """A call in Ollama's form. Raises EngineError: half a set of arguments must not be acted upon.

    ``cut``: the answer ended here because it had to, so that no arguments are not the same as none.
    """
    try:
        arguments = json.loads(call.arguments if call.arguments or cut else "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise EngineError(
            f"the model called {call.name!r} with arguments that are no JSON object: {call.arguments[:80]!r}"
        )
    function = {"index": index, "name": call.name, "arguments": arguments}
    return {"id": call.identity or f"call_{index}", "function": function}


def _logprob(item: object) -> Record:
    entry = _mapping(item)
    kept: Record = {name: entry[name] for name in ("token", "logprob", "bytes") if name in entry}
    top = entry.get("top_logprobs")
    if isinstance(top, list) and top:
        kept["top_logprobs"] = [
            {name: _mapping(other)[name] for name in ("token", "logprob", "bytes") if name in _mapping(other)}
            for other in top
        ]
    return kept


def _probabilities(value: Mapping[str, object]) -> list[Record]:
    found = value.get("completion_probabilities")
    return [_logprob(item) for item in found] if isinstance(found, list) else []


def _cut(text: str) -> Iterator[str]:
    for start in range(0, len(text), LINE_CHARACTERS):
        yield text[start : start + LINE_CHARACTERS]


def _joined(records: Sequence[Mapping[str, object]], name: str) -> str:
    return "".join(_string(record, name) for record in records)


def _listed(records: Sequence[Mapping[str, object]], name: str) -> list[object]:
    found: list[object] = []
    for record in records:
        value = record.get(name)
        found += value if isinstance(value, list) else ()
    return found


def _status_in(error: object) -> int:
    code = _mapping(error).get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _mapping(value: object) -> Mapping[str, object]:
    # What is looked at here came from a JSON parser; asking for the abstract type takes ten times as long.
    return value if isinstance(value, dict) else {}


def _string(value: Mapping[str, object], name: str) -> str:
    found = value.get(name)
    return found if isinstance(found, str) else ""


def _integer(value: Mapping[str, object], name: str) -> int:
    found = value.get(name)
    return int(found) if isinstance(found, int | float) else 0


def _nanoseconds(value: Mapping[str, object], name: str) -> int:
    found = value.get(name)
    return int(found * 1_000_000) if isinstance(found, int | float) else 0
