"""Streams recorded from the pinned llama-server, cut in every way, through both forms a client may ask for.

They are in ``tests/recorded``: text with log-probabilities, a tool call in fragments, one that the limit cut,
a completion, an error in the middle, and the streams of /v1/messages and /v1/responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.errors import EngineError
from moe_proxy.proxy.context import Clocks
from moe_proxy.proxy.ollama.response import Reply, Translator
from moe_proxy.proxy.ollama.routes import NdjsonForm
from moe_proxy.proxy.passthrough import SseForm
from moe_proxy.proxy.replies import family_of

FOLDER = Path(__file__).parents[1] / "recorded"
ROUTES = {
    "text": "/v1/chat/completions",
    "tool": "/v1/chat/completions",
    "tool_cut": "/v1/chat/completions",
    "error": "/v1/chat/completions",
    "completion": "/completion",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
TRANSLATED = ("text", "tool", "tool_cut", "error", "completion")
CLOCKS = Clocks(monotonic_ns=lambda: 5_000, wall_ns=lambda: 1_700_000_000_000_000_001)
CUTS = st.lists(st.integers(0, 20_000), max_size=25)

# What may lie on the wire in place of what was recorded, without any other meaning.
DRESSES: dict[str, Callable[[bytes], bytes]] = {
    "as recorded": lambda data: data,
    "with carriage returns": lambda data: data.replace(b"\n", b"\r\n"),
    "with comments": lambda data: data.replace(b"data: ", b": ping\n\n: x\ndata: "),
    "with characters of many bytes": lambda data: data.replace(b"python", "пайтон 🐍 日本".encode()),
}


def _recorded(name: str) -> bytes:
    return (FOLDER / f"{name}.sse").read_bytes()


def _pieces(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(data) for place in places} - {0}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def _translated(pieces: list[bytes]) -> list[Any]:
    """The lines a client of Ollama's API gets, parsed; the last may be an error."""
    form = NdjsonForm(Translator(Reply("m", True, 1_000), CLOCKS))
    sent = b""
    try:
        for piece in pieces:
            sent += form.feed(piece)
        sent += form.end()
    except EngineError as error:
        sent += form.failure(error)
    assert sent.endswith(b"\n")
    lines = sent[:-1].split(b"\n")
    # A blank line breaks clients that parse each.
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("name", TRANSLATED)
def test_every_cut_in_two(name: str, dress: str) -> None:
    """Wherever a stream is cut in two, a client gets the same lines."""
    data = DRESSES[dress](_recorded(name))
    expected = _translated([data])
    step = 1 if dress == "as recorded" else 7
    for place in range(0, len(data), step):
        assert _translated([data[:place], data[place:]]) == expected


@given(st.sampled_from(TRANSLATED), st.sampled_from(sorted(DRESSES)), CUTS)
def test_any_cuts(name: str, dress: str, places: list[int]) -> None:
    """However often it is cut, the lines are the same; pings and line ends do not matter."""
    data = DRESSES[dress](_recorded(name))
    assert _translated(_pieces(data, places)) == _translated([data])
    if dress in ("with carriage returns", "with comments"):
        assert _translated([data]) == _translated([_recorded(name)])


@given(st.sampled_from(("text", "tool", "completion")), st.integers(0, 20_000))
def test_early_end(name: str, length: int) -> None:
    """A stream that ends before its finish is an error, never done; what was said before is not lost."""
    data = _recorded(name)
    cut = data[: length % len(data)]
    lines = _translated([cut])
    whole = _translated([data])
    done = [line for line in lines if line.get("done")]
    if done:
        # Only when the finish was among the bytes; the figures may still be missing.
        assert b'"finish_reason":"' in cut or b'"stop":true' in cut
        assert "error" not in lines[-1]
    else:
        assert set(lines[-1]) == {"error"}
        assert lines[:-1] == whole[: len(lines) - 1]


def test_what_a_client_gets() -> None:
    """Text with its probabilities, one call in one line, an error after half of it."""
    text = _translated([_recorded("text")])
    assert "".join(line["message"]["content"] for line in text).startswith(" write python")
    assert all(len(line["logprobs"][0]["top_logprobs"]) == 2 for line in text[:-1])
    assert (text[-1]["done_reason"], text[-1]["eval_count"]) == ("length", 6)
    assert text[-1]["prompt_eval_count"] > 0
    tool = _translated([_recorded("tool")])
    calls = [call for line in tool for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "weather", "arguments": {"city": "Bergen"}}
    ]
    assert calls[0]["id"]
    assert tool[-1]["done"]
    cut = _translated([_recorded("tool_cut")])
    # Of two calls, the limit cut the second.
    assert [len(line["message"].get("tool_calls", ())) for line in cut] == [0, 0, 1, 0]
    assert cut[-1]["done_reason"] == "length"
    broken = _translated([_recorded("error")])
    assert broken[0]["message"]["content"] == "write"
    assert broken[-1] == {
        "error": "The model produced output that does not match the expected peg-native format"
    }


@given(st.sampled_from(sorted(ROUTES)), st.sampled_from(sorted(DRESSES)), CUTS, st.integers(0, 20_000))
def test_passed_through(name: str, dress: str, places: list[int], length: int) -> None:
    """Bytes go through as they are; the proper end is recognised however it is cut, and an early one too."""
    data = DRESSES[dress](_recorded(name))
    path = ROUTES[name]
    form = SseForm(path, family_of(path))
    assert b"".join(form.feed(piece) for piece in _pieces(data, places)) == data
    assert form.end() == b""
    early = data[: min(length % len(data), data.rindex(b"data:"))]
    form = SseForm(path, family_of(path))
    form.feed(early)
    if name in ("text", "tool", "tool_cut", "error", "completion"):
        with pytest.raises(EngineError):
            form.end()
        failure = form.failure(EngineError("gone"))
        events = (early + failure).replace(b"\r\n", b"\n").split(b"\n\n")
        last = next(event for event in reversed(events) if event.strip())
        assert json.loads(last.rpartition(b"data: ")[2])["error"]["message"] == "gone"
