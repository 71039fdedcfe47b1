"""Owns how a byte stream is cut into server-sent events; it never looks into an event. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One event: its ``event`` field ("" when absent) and its ``data`` lines joined by line feeds."""

    name: str
    data: bytes


class SseSplitter:
    """Bytes as they come, cut anywhere, to whole events.

    Works on bytes, so that a character cut in two is whole again before anybody decodes it. Lines end in LF,
    CR LF or CR. Comments, ``id`` and ``retry`` are dropped.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._name = ""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that ``data`` completes."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
        if data:
            self._after_cr = data.endswith(b"\r")
        events: list[Event] = []
        # bytes.splitlines cuts at exactly the three line ends of server-sent events.
        for line in data.splitlines(keepends=True):
            self._line += line
            if line[-1] not in b"\r\n":
                break
            whole = bytes(self._line.rstrip(b"\r\n"))
            self._line.clear()
            event = self._take(whole)
            if event is not None:
                events.append(event)
        return events

    def _take(self, line: bytes) -> Event | None:
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._name = value.decode("utf-8", "replace")
            elif field == b"error":
                # Older llama-server named the field after what it carries.
                self._data.append(b'{"error":' + value + b"}")
            return None
        event = Event(self._name, b"\n".join(self._data)) if self._data else None
        self._name = ""
        self._data = []
        return event
