"""Owns the line that a request leaves behind: nothing of a prompt, an answer, a query string or a key."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Literal, TextIO

AccessLogForm = Literal["off", "text", "json"]
AccessLog = Callable[["AccessRecord"], None]

_LONGEST_PATH = 200


@dataclass(frozen=True)
class AccessRecord:
    """One request. ``status`` is 499 when its client went away first.

    ``first_token_s`` is None when no streamed answer began; ``domain`` when the request was not classified,
    or not surely.
    """

    time_ns: int
    id: str
    client: str
    method: str
    path: str
    status: int
    duration_s: float
    first_token_s: float | None
    domain: str | None


def text_line(record: AccessRecord) -> str:
    """One line for a person; whatever stands in a path, it stays one line."""
    first = "-" if record.first_token_s is None else f"{record.first_token_s:.3f}s"
    path = record.path[:_LONGEST_PATH].encode("unicode_escape").decode()
    return (
        f"{_date(record.time_ns)} {record.id} {record.client} {record.method} {path} {record.status}"
        f" {record.duration_s:.3f}s first={first} domain={record.domain or '-'}"
    )


def json_line(record: AccessRecord) -> str:
    """One JSON object for a program."""
    value = asdict(record)
    del value["time_ns"]
    value["path"] = record.path[:_LONGEST_PATH]
    for name in ("duration_s", "first_token_s"):
        value[name] = None if value[name] is None else round(value[name], 6)
    return json.dumps({"time": _date(record.time_ns), **value}, separators=(",", ":"))


def access_log(form: AccessLogForm, stream: TextIO | None = None) -> AccessLog | None:
    """Writes each record to ``stream`` (None: standard output as it is then); None when it is off."""
    if form == "off":
        return None
    line = json_line if form == "json" else text_line

    def write(record: AccessRecord) -> None:
        out = stream or sys.stdout
        out.write(line(record) + "\n")
        out.flush()

    return write


def _date(time_ns: int) -> str:
    moment = datetime.fromtimestamp(time_ns / 1e9, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
