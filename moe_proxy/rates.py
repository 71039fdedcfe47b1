"""Owns how two readings of the counters behind ``/stats`` become the rates that are shown.

Pure: no clock, no network. What cannot be known from the two is None, and never a 0 that nobody counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """The JSON of ``/stats`` as it was at ``time_s`` of a clock that runs evenly."""

    time_s: float
    stats: Json


@dataclass(frozen=True)
class Rates:
    """What happened between two readings; None: no data.

    ``hit_rate`` is a share of the picks, 0 to 1; None as well when nothing was picked. ``domains`` are
    requests classified meanwhile. ``request_tokens_per_s`` is by id of a request in flight, prompt included.
    """

    tokens_per_s: float | None = None
    hit_rate: float | None = None
    hit_bytes_per_s: float | None = None
    miss_bytes_per_s: float | None = None
    promoted_bytes_per_s: float | None = None
    requests_per_s: float | None = None
    domains: Mapping[str, int] | None = None
    request_tokens_per_s: Mapping[str, float] = field(default_factory=dict)


def rates(before: Reading | None, now: Reading) -> Rates:
    """Rates between ``before`` and ``now``.

    Counters of an engine, or of a proxy, that was started in between are of no use together.
    """
    if before is None or now.time_s <= before.time_s:
        return Rates()
    old, new = before.stats, now.stats
    seconds = now.time_s - before.time_s
    requests_per_s, domains, per_request = None, None, {}
    if new.get("uptime_s", 0) >= old.get("uptime_s", 0):
        finished = _difference(old.get("requests"), new.get("requests"), "total")
        requests_per_s = None if finished is None else finished / seconds
        domains = _domains(old, new)
        per_request = _per_request(old, new, seconds)
    experts = _experts(old.get("experts"), new.get("experts"))
    return Rates(requests_per_s=requests_per_s, domains=domains, request_tokens_per_s=per_request, **experts)


def _experts(old: Json | None, new: Json | None) -> dict[str, float | None]:
    """The pager's part, by the engine's own clock: when it was asked is known better there than here."""
    if not old or not new or old.get("start_id") != new.get("start_id"):
        return {}
    elapsed_us = _difference(old, new, "uptime_us")
    if not elapsed_us:
        return {}
    per_s = {
        f"{name}_per_s": None
        if (amount := _difference(old, new, name)) is None
        else amount * 1e6 / elapsed_us
        for name in ("tokens", "hit_bytes", "miss_bytes", "promoted_bytes")
    }
    hits, picks = _difference(old, new, "hits"), _difference(old, new, "picks")
    return {**per_s, "hit_rate": hits / picks if hits is not None and picks else None}


def _domains(old: Json, new: Json) -> dict[str, int] | None:
    try:
        was, is_now = old["requests"]["domains"], new["requests"]["domains"]
    except KeyError:
        return None
    grown = {name: count - was.get(name, 0) for name, count in is_now.items()}
    return {name: count for name, count in grown.items() if count > 0}


def _per_request(old: Json, new: Json, seconds: float) -> dict[str, float]:
    was = {request["id"]: request.get("tokens") for request in old.get("in_flight", ())}
    found = {}
    for request in new.get("in_flight", ()):
        first, last = was.get(request["id"]), request.get("tokens")
        if first is not None and last is not None and last >= first:
            found[request["id"]] = (last - first) / seconds
    return found


def _difference(old: Json | None, new: Json | None, name: str) -> float | None:
    """How much a counter grew; None when it is not in both, or fell and so is another one."""
    first, last = (old or {}).get(name), (new or {}).get(name)
    if not isinstance(first, int | float) or not isinstance(last, int | float) or last < first:
        return None
    return last - first
