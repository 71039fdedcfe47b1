"""llama-server's stream to Ollama's objects, for every way the bytes may be cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_proxy.errors import EngineError, EngineGoneError
from moe_proxy.proxy.context import Clocks
from moe_proxy.proxy.ollama.response import LINE_CHARACTERS, Reply, Translator, date_of, gathered
from moe_proxy.proxy.replies import dump
from moe_proxy.proxy.sse import Event, SseSplitter

CLOCKS = Clocks(monotonic_ns=lambda: 5_000, wall_ns=lambda: 1_700_000_000_000_000_001)
TIMINGS = {"cache_n": 3, "prompt_n": 4, "prompt_ms": 1.5, "predicted_n": 2, "predicted_ms": 2.25}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2}
Json = dict[str, Any]


def _event(value: Any, end: str = "\n\n") -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + end.encode()


def _chunk(delta: Json | None = None, finish: str | None = None, **more: Any) -> Json:
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more}


DONE = b"data: [DONE]\n\n"
LAST = _event({"choices": [], "usage": USAGE, "timings": TIMINGS}) + DONE
TEXT = (
    b": ping\n\n"
    + _event(_chunk({"role": "assistant", "content": None}, usage=None))
    + _event(_chunk({"reasoning_content": "grübeln "}), "\r\n\r\n")
    + _event(_chunk({"reasoning_content": "思考"}))
    + _event(_chunk({"content": "naïve "}))
    + b":\r\n\r\n"
    + _event(_chunk({"content": "🙂 日本"}), "\r\r")
    + _event(_chunk(finish="stop"))
    + LAST
)


def _call(index: int, arguments: str, identity: str | None = None, name: str | None = None) -> Json:
    function: Json = {"arguments": arguments} | ({"name": name} if name else {})
    fragment: Json = {"index": index, "function": function} | ({"id": identity} if identity else {})
    return _chunk({"tool_calls": [fragment]})


TOOL = (
    _event(_chunk({"content": "let me see"}))
    + _event(_call(0, "", "abc", "weather"))
    + _event(_call(0, '{"city":'))
    + _event(_call(1, '{"a"', "def", "time"))
    + _event(_call(0, '"Zürich"}'))
    + _event(_call(1, ":1}"))
    + _event(_chunk(finish="tool_calls"))
    + LAST
)
COMPLETION = (
    _event({"content": "x = ", "stop": False, "tokens": []})
    + _event({"content": "ü", "stop": False})
    + _event({"content": "", "stop": True, "stop_type": "limit", "timings": TIMINGS, "tokens_evaluated": 7})
)
BROKEN = (
    _event(_chunk({"content": "half"}))
    + _event({"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error"}})
    + _event(_chunk({"content": "never"}))
)
EARLY = _event(_chunk({"content": "half"})) + b'data: {"choices": [{"del'
RECORDED = {"text": TEXT, "tool": TOOL, "completion": COMPLETION, "broken": BROKEN, "early": EARLY}


def _run(pieces: list[bytes], *, is_chat: bool = True) -> tuple[list[Json], str | None]:
    """The objects, and the message of the error if it ends in one."""
    translator = Translator(Reply("m:latest", is_chat, 1_000), CLOCKS)
    translator.held_ns = 77
    records: list[Json] = []
    try:
        for piece in pieces:
            records += translator.feed(piece)
        return records + translator.end(), None
    except EngineError as error:
        return records, error.message


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(data) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def test_text() -> None:
    """Content and thinking piece by piece, then one done object with the figures; comments are swallowed."""
    records, error = _run([TEXT])
    head = {"model": "m:latest", "created_at": "2023-11-14T22:13:20.000000001Z"}

    def said(content: str, **more: str) -> Json:
        return {**head, "message": {"role": "assistant", "content": content, **more}, "done": False}

    assert error is None
    assert records == [
        said("", thinking="grübeln "),
        said("", thinking="思考"),
        said("naïve "),
        said("🙂 日本"),
        {
            **said(""),
            "done": True,
            "done_reason": "stop",
            "total_duration": 4_000,
            "load_duration": 77,
            "prompt_eval_count": 7,
            "prompt_eval_duration": 1_500_000,
            "eval_count": 2,
            "eval_duration": 2_250_000,
        },
    ]


def test_tool_calls() -> None:
    """Fragments are put together by index; one object carries all, with ids and arguments as objects."""
    records, error = _run([TOOL])
    assert error is None
    assert [record["done"] for record in records] == [False, False, True]
    assert records[1]["message"]["tool_calls"] == [
        {"id": "abc", "function": {"index": 0, "name": "weather", "arguments": {"city": "Zürich"}}},
        {"id": "def", "function": {"index": 1, "name": "time", "arguments": {"a": 1}}},
    ]
    assert records[2]["message"] == {"role": "assistant", "content": ""}
    assert records[2]["done_reason"] == "stop"


def test_tool_call_without_id_or_arguments() -> None:
    """A call without an id gets one; without arguments it has none."""
    data = _event(_call(0, "", None, "now")) + _event(_chunk(finish="tool_calls")) + LAST
    records, _ = _run([data])
    expected = [{"id": "call_0", "function": {"index": 0, "name": "now", "arguments": {}}}]
    assert records[0]["message"]["tool_calls"] == expected


@pytest.mark.parametrize("arguments", ["", '{"a": '])
def test_a_call_that_the_limit_cut(arguments: str) -> None:
    """Calls that are whole are not lost with one that the limit of tokens cut; what was cut is not called."""
    whole = _event(_call(0, '{"a": 1}', "x", "f"))
    for finish, kept in (("length", ["f"]), ("tool_calls", ["f", "g"] if not arguments else None)):
        records, error = _run(
            [whole + _event(_call(1, arguments, "y", "g")) + _event(_chunk(finish=finish)) + LAST]
        )
        assert (error is None) == (kept is not None)
        names = (
            [call["function"]["name"] for call in records[0]["message"]["tool_calls"]] if records else None
        )
        assert names == kept
        assert not records or records[-1]["done_reason"] == ("length" if finish == "length" else "stop")


@pytest.mark.parametrize("arguments", ["", '{"a": ', "[1]", "nothing"])
def test_broken_arguments(arguments: str) -> None:
    """Arguments that are no object end in an error: half a call is never acted upon, and nothing crashes."""
    records, error = _run([_event(_call(0, arguments, "x", "f")) + _event(_chunk(finish="length")) + LAST])
    assert records == []
    assert error is not None
    assert "'f'" in error


def test_completion() -> None:
    """/completion has no [DONE]; its last object has reason and figures; generate returns a context."""
    records, error = _run([COMPLETION], is_chat=False)
    assert error is None
    assert [record["response"] for record in records] == ["x = ", "ü", ""]
    assert records[-1]["done_reason"] == "length"
    assert records[-1]["context"] == []
    assert records[-1]["prompt_eval_count"] == 7
    assert "message" not in records[-1]


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "length"), ("stop", "stop"), ("tool_calls", "stop"), ("other", "stop")]
)
def test_done_reason(finish: str, reason: str) -> None:
    """Length stays length; everything else is stop."""
    assert _run([_event(_chunk(finish=finish)) + LAST])[0][-1]["done_reason"] == reason


def test_figures_without_timings() -> None:
    """Without timings, counts come from the usage, and what is 0 is left out."""
    records, _ = _run([_event(_chunk(finish="stop")) + _event({"choices": [], "usage": USAGE}) + DONE])
    assert (records[-1]["prompt_eval_count"], records[-1]["eval_count"]) == (7, 2)
    assert "eval_duration" not in records[-1]


def test_early_end_is_an_error() -> None:
    """An end without a finish reason is an error, never a done; so is [DONE] without one."""
    for data in (EARLY, b"", DONE, _event(_chunk({"content": "x"})) + DONE):
        records, error = _run([data])
        assert error is not None
        assert "closed the stream" in error
        assert not any(record["done"] for record in records)
    with pytest.raises(EngineGoneError):
        Translator(Reply("m", True, 0), CLOCKS).end()


def test_finish_without_done_marker() -> None:
    """A finish reason is enough: the end of the stream then is the end of the answer."""
    assert _run([_event(_chunk({"content": "x"})) + _event(_chunk(finish="stop"))])[0][-1]["done"] is True


def test_error_event() -> None:
    """What was said before an error is kept, the error's own words are told, nothing after it is said."""
    records, error = _run([BROKEN])
    assert [record["message"]["content"] for record in records] == ["half"]
    assert error == "too long"


@pytest.mark.parametrize("data", [b"data: {oops\n\n", b"data: 3\n\n", b"data: \xff\xfe\n\n", b"data: []\n\n"])
def test_garbage(data: bytes) -> None:
    """Bytes that are no answer are an error, not an exception of another kind."""
    records, error = _run([data])
    assert records == []
    assert error is not None


def test_logprobs() -> None:
    """Log-probabilities go with their text, reduced to Ollama's fields."""
    item: Json = {"id": 5, "token": "a", "logprob": -0.5, "bytes": [97]}
    item["top_logprobs"] = [{"token": "b", "logprob": -1, "id": 6}]
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None, "logprobs": {"content": [item]}}
    records, _ = _run([_event({"choices": [choice]}) + _event(_chunk(finish="stop")) + LAST])
    kept = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1}]}
    assert records[0]["logprobs"] == [kept]
    assert gathered(records)["logprobs"] == [kept]


def test_lines_stay_short() -> None:
    """Each line stays under 64 KB, whatever the text needs when it is escaped."""
    text = "\x01" * (3 * LINE_CHARACTERS + 5)
    records, _ = _run([_event(_chunk({"content": text})) + _event(_chunk(finish="stop")) + LAST])
    assert max(len(dump(record)) for record in records) < 64_000
    assert "".join(record["message"]["content"] for record in records) == text


def test_gathered() -> None:
    """A whole reply is the stream put together: text, thinking, calls, and the figures of the last object."""
    whole = gathered(_run([TEXT])[0])
    assert whole["message"] == {"role": "assistant", "content": "naïve 🙂 日本", "thinking": "grübeln 思考"}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "stop", 2)
    assert len(gathered(_run([TOOL])[0])["message"]["tool_calls"]) == 2
    flat = gathered(_run([TEXT], is_chat=False)[0])
    assert (flat["response"], flat["thinking"]) == ("naïve 🙂 日本", "grübeln 思考")
    assert "message" not in flat


def test_date() -> None:
    """Dates are UTC with nanoseconds."""
    assert date_of(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123456789Z"


@pytest.mark.parametrize("name", RECORDED)
def test_every_cut_in_two(name: str) -> None:
    """Wherever a recorded stream is cut in two, the objects are the same."""
    data = RECORDED[name]
    expected = _run([data])
    for place in range(len(data) + 1):
        assert _run([data[:place], data[place:]]) == expected
    assert _run([bytes([byte]) for byte in data]) == expected


@settings(deadline=None)
@given(st.sampled_from(sorted(RECORDED)), st.lists(st.integers(0, 5000), max_size=30), st.booleans())
def test_any_cuts(name: str, places: list[int], is_chat: bool) -> None:
    """However often a recorded stream is cut, the objects are the same."""
    data = RECORDED[name]
    assert _run(_cut(data, places), is_chat=is_chat) == _run([data], is_chat=is_chat)


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))
LINES = st.lists(
    st.tuples(st.sampled_from(["\n", "\r\n", "\r"]), st.lists(LINE, min_size=1, max_size=3)), max_size=6
)


@settings(deadline=None)
@given(LINES, st.lists(st.integers(0, 500), max_size=20))
def test_splitter(events: list[tuple[str, list[str]]], places: list[int]) -> None:
    """Any texts in any line ends, cut anywhere, come out as they went in."""
    data = b"".join(
        "".join(f"data: {line}{end}" for line in lines).encode() + end.encode() for end, lines in events
    )
    splitter = SseSplitter()
    found = [event for piece in _cut(data, places) for event in splitter.feed(piece)] if data else []
    assert found == [Event("", "\n".join(lines).encode()) for _, lines in events]


def test_splitter_fields() -> None:
    """Names are kept, comments and ids dropped; an event without data is none."""
    splitter = SseSplitter()
    data = b": c\nid: 3\nevent: message_stop\ndata:{}\n\nevent: lonely\n\nretry: 5\ndata\n\n"
    assert splitter.feed(data) == [Event("message_stop", b"{}"), Event("", b"")]
    assert splitter.feed(b'error: {"message":"x"}\n\n') == [Event("", b'{"error":{"message":"x"}}')]
