"""Answers of an HTTP/1.1 server, cut anywhere: framing, ends, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.http_answer import AnswerParser

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = (
    OK + b"Transfer-Encoding: chunked\r\nSet-Cookie: a\r\nset-cookie: b\r\n\r\n"
    b"5\r\nhello\r\n1;x=y\r\n\n\r\n00A\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)
LENGTH = OK + b"Content-Length: 6\r\nX-Empty:\r\n\r\n\r\n\r\nab"
UNTIL_END = b"HTTP/1.0 200 \r\n\r\nwhatever\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 x\r\nA: b\r\n\r\n" + LENGTH
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
RECORDED = {
    "chunked": (CHUNKED, b"hello\n0123456789", True),
    "length": (LENGTH, b"\r\n\r\nab", True),
    "until_end": (UNTIL_END, b"whatever\r\n", False),
    "interim": (INTERIM, b"\r\n\r\nab", True),
    "empty": (EMPTY, b"", True),
    "closing": (OK + b"Connection: x, Close\r\nContent-Length: 1\r\n\r\na", b"a", False),
    "none": (OK + b"Content-Length: 0\r\n\r\n", b"", True),
}


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(data) for place in places} - {0}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(st.sampled_from(sorted(RECORDED)), st.lists(st.integers(0, 500), max_size=20))
def test_any_cuts(name: str, places: list[int]) -> None:
    """However an answer is cut, its body is the same, and so is whether the connection can go on."""
    data, body, reusable = RECORDED[name]
    parser = AnswerParser("GET")
    found = b"".join(parser.feed(piece) for piece in _cut(data, places))
    assert found == body
    if name == "until_end":
        assert not parser.complete
        assert parser.ended()
    assert parser.complete
    assert parser.reusable == reusable


@pytest.mark.parametrize("name", sorted(set(RECORDED) - {"until_end"}))
def test_every_early_end(name: str) -> None:
    """An answer that ends early, after any byte, is never taken for a complete one."""
    data = RECORDED[name][0]
    for end in range(len(data)):
        parser = AnswerParser("GET")
        parser.feed(data[:end])
        assert not parser.ended()
        assert not parser.reusable


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(0, 500), max_size=20))
def test_any_chunks(chunks: list[bytes], places: list[int]) -> None:
    """Any bytes in any chunks, cut anywhere, come out as they went in."""
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    data = OK + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    parser = AnswerParser("POST")
    assert b"".join(parser.feed(piece) for piece in _cut(data, places)) == b"".join(chunks)
    assert parser.complete


def test_repeated_headers_and_head() -> None:
    """Repeated headers are kept, in any case; an answer to HEAD has no body whatever it says."""
    parser = AnswerParser("GET")
    parser.feed(CHUNKED)
    assert parser.headers is not None
    assert parser.headers.getall("set-cookie") == ["a", "b"]
    parser = AnswerParser("HEAD")
    assert parser.feed(OK + b"Content-Length: 6\r\n\r\n") == b""
    assert parser.complete
    assert parser.reusable


@pytest.mark.parametrize("extra", [b"x", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_bytes_after_the_end(extra: bytes) -> None:
    """What follows an answer was not asked for: it is dropped, and the connection is not used again."""
    for data, body in ((LENGTH, b"\r\n\r\nab"), (CHUNKED, b"hello\n0123456789")):
        parser = AnswerParser("GET")
        assert parser.feed(data + extra) == body
        assert parser.complete
        assert not parser.reusable


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff garbage\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"bad name : x\r\n\r\n",
        OK + b" folded: x\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na" + b"b" * 100,
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 9000,
        b"H" * 70_000,
    ],
)
def test_what_is_no_http(data: bytes) -> None:
    """Garbage and ambiguous framing are errors, never a guess and never an endless wait."""
    with pytest.raises(ValueError, match=r"answer"):
        AnswerParser("GET").feed(data)
