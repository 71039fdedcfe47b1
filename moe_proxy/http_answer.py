"""Owns how the bytes of an HTTP/1.1 answer become a head and a body. Pure: no socket, no clock."""

from __future__ import annotations

import re

from multidict import CIMultiDict, CIMultiDictProxy

_MOST_HEAD_BYTES = 64 << 10
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?")
_LENGTH = re.compile(r"\d{1,18}")
_MOST_LINE_BYTES = 8 << 10


class AnswerParser:
    """One answer, cut anywhere. ``status`` is 0 and ``headers`` None until its head is whole.

    ``complete``: the body has ended. ``reusable``: the connection can then carry another request. ``begun``:
    at least one byte has come.
    """

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: CIMultiDictProxy[str] | None = None
        self.complete = self.reusable = self.begun = False
        self._bodiless = method == "HEAD"
        self._buffer = b""
        self._chunked = False
        # Bytes left of the body, or of the chunk; None: the body ends with the connection.
        self._left: int | None = 0
        self._after_chunk = self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Bytes of the body that ``data`` holds. Raises ValueError for what is no HTTP."""
        self.begun = True
        if self.headers is None:
            self._buffer += data
            if not self._take_head():
                return b""
            data, self._buffer = self._buffer, b""
        if self.complete:
            self._over(data)
            return b""
        if self._chunked:
            return self._unchunked(data)
        if self._left is None:
            return data
        body, rest = data[: self._left], data[self._left :]
        self._left -= len(body)
        if not self._left:
            self.complete = True
            self._over(rest)
        return body

    def ended(self) -> bool:
        """The connection has ended; whether the answer is complete."""
        self.reusable = False
        if self.headers is not None and self._left is None and not self._chunked:
            self.complete = True
        return self.complete

    def _take_head(self) -> bool:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MOST_HEAD_BYTES:
                    raise ValueError(f"the head of the answer is longer than {_MOST_HEAD_BYTES} bytes")
                return False
            first, *lines = self._buffer[:end].split(b"\r\n")
            self._buffer = self._buffer[end + 4 :]
            match = _STATUS.fullmatch(first)
            if match is None:
                raise ValueError(f"the answer is no HTTP: {first[:80]!r}")
            status = int(match[2])
            if status >= 200:
                self._begin_body(status, match[1] == b"1", _headers(lines))
                return True
            # An interim answer; the real one follows.

    def _begin_body(self, status: int, is_1_1: bool, headers: CIMultiDict[str]) -> None:
        connection = {
            word.strip().lower() for value in headers.getall("Connection", ()) for word in value.split(",")
        }
        self.reusable = "close" not in connection and (is_1_1 or "keep-alive" in connection)
        lengths = {value.strip() for value in headers.getall("Content-Length", ())}
        coding = ",".join(headers.getall("Transfer-Encoding", ())).strip().lower()
        if self._bodiless or status in (204, 304):
            self.complete = True
        elif coding:
            if coding != "chunked" or lengths:
                raise ValueError(f"the answer's body is framed in a way that is not understood: {coding!r}")
            self._chunked = True
        elif lengths:
            length = lengths.pop()
            if lengths or not _LENGTH.fullmatch(length):
                raise ValueError(f"the answer's Content-Length is no number: {length!r}")
            self._left = int(length)
            self.complete = self._left == 0
        else:
            self._left = None
            self.reusable = False
        self.status, self.headers = status, CIMultiDictProxy(headers)

    def _unchunked(self, data: bytes) -> bytes:
        buffer = self._buffer + data if self._buffer else data
        pieces = []
        at = 0
        while not self.complete:
            if self._left:
                piece = buffer[at : at + self._left]
                if not piece:
                    break
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._after_chunk = True
            end = buffer.find(b"\r\n", at)
            if end < 0:
                if len(buffer) - at > _MOST_LINE_BYTES or (self._after_chunk and len(buffer) - at > 1):
                    raise ValueError("a chunk of the answer does not end")
                break
            line = buffer[at:end]
            at = end + 2
            if self._after_chunk:
                if line:
                    raise ValueError("a chunk of the answer is longer than it says")
                self._after_chunk = False
            elif self._in_trailer:
                self.complete = not line
            else:
                match = _SIZE.fullmatch(line)
                if match is None:
                    raise ValueError(f"a chunk of the answer has no size: {line[:40]!r}")
                self._left = int(match[1], 16)
                self._in_trailer = not self._left
        if self.complete:
            self._over(buffer[at:])
            self._buffer = b""
        else:
            self._buffer = buffer[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _over(self, rest: bytes) -> None:
        """Bytes after the end belong to nothing that was asked."""
        if rest:
            self.reusable = False


def _headers(lines: list[bytes]) -> CIMultiDict[str]:
    headers: CIMultiDict[str] = CIMultiDict()
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name) or b"\n" in value or b"\r" in value or b"\0" in value:
            raise ValueError(f"a header of the answer is malformed: {line[:80]!r}")
        headers.add(name.decode("ascii"), value.strip().decode("utf-8", "surrogateescape"))
    return headers
