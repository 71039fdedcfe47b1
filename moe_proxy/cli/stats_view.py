"""Owns how a reading of ``/stats``, and the rates since the last one, look in a terminal; it reads none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from moe_proxy.cli.units import bytes_text, percent_text
from moe_proxy.rates import Rates

Json = Mapping[str, Any]

_RECENT = 5
_NONE = "-"


def table(title: str, *columns: str) -> Table:
    """An empty table; without ``columns`` it has no head."""
    made = Table(title=title, title_justify="left", show_header=bool(columns), box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def screen(body: Json, now: Rates) -> Group:
    """What happens now, in one picture."""
    parts = (
        _now(body, now),
        _memory(body),
        _times(body),
        in_flight(body, now),
        _recent(body),
        _remarks(body),
    )
    return Group(*(part for part in parts if part.row_count))


def line(body: Json, now: Rates) -> str:
    """The same in one line."""
    parts = [
        body["engine"]["state"],
        f"in flight {body['requests']['active']}",
        f"tokens/s {_number(now.tokens_per_s)}",
        f"hit rate {_share(now.hit_rate)}",
        f"misses {_speed(now.miss_bytes_per_s)}",
        f"moved {_speed(now.promoted_bytes_per_s)}",
        f"done {body['requests']['total']}",
        f"failed {body['requests']['failed']}",
    ]
    return "  ".join(parts)


def in_flight(body: Json, now: Rates) -> Table:
    """The running requests, the fastest first; their rate where it is known."""
    shown = table("In flight", "tokens/s", "tokens", "seconds", "domain", "path")
    running = body.get("in_flight", ())
    speed = now.request_tokens_per_s
    for request in sorted(running, key=lambda one: -speed.get(one["id"], -1.0)):
        tokens = request["tokens"]
        shown.add_row(
            _number(speed.get(request["id"])),
            _NONE if tokens is None else str(tokens),
            f"{request['seconds']:.1f}",
            request["domain"] or _NONE,
            request["path"],
        )
    return shown


def _now(body: Json, now: Rates) -> Table:
    engine, requests = body["engine"], body["requests"]
    shown = table(f"{body['model']['name']}: {engine['state']}, {engine['restarts']} restarts")
    shown.add_row("tokens/s", f"{_number(now.tokens_per_s)} (prompt and answer)")
    shown.add_row("hit rate", f"{_share(now.hit_rate)} of what was picked")
    shown.add_row("misses", f"{_speed(now.miss_bytes_per_s)} read outside the budget")
    shown.add_row("moved", f"{_speed(now.promoted_bytes_per_s)} of experts made resident")
    shown.add_row(
        "requests", f"{requests['active']} in flight, {requests['total']} done, {requests['failed']} failed"
    )
    if now.domains:
        shown.add_row("domains", ", ".join(f"{name} {count}" for name, count in sorted(now.domains.items())))
    return shown


def _memory(body: Json) -> Table:
    shown = table("Memory")
    tiers = (body["experts"] or {}).get("tiers", {})
    for name, tier in sorted(tiers.items(), reverse=True):
        parts = (
            f"{part.removesuffix('_bytes')} {bytes_text(size)}"
            for part, size in tier.items()
            if part.endswith("_bytes")
        )
        shown.add_row(name.upper(), ", ".join(parts))
    engine = body["engine"]
    used = {"RAM": engine.get("rss_bytes"), "VRAM": engine.get("vram_bytes")}
    known = ", ".join(f"{bytes_text(size)} of {kind}" for kind, size in used.items() if size is not None)
    if known:
        shown.add_row("process", known)
    return shown


def _times(body: Json) -> Table:
    shown = table("Time, of the last answers", "", "p50", "p95", "p99", "answers")
    for name, text in (("first_token_s", "first token"), ("duration_s", "whole answer")):
        found = body["latency"][name]
        if found["count"]:
            times = (f"{found[rank]:.3f} s" for rank in ("p50", "p95", "p99"))
            shown.add_row(text, *times, str(found["count"]))
    return shown


def _recent(body: Json) -> Table:
    shown = table("Last requests", "tokens", "hit rate", "seconds", "domain", "path")
    for request in reversed(body["recent"][-_RECENT:]):
        shown.add_row(
            str(request["tokens"]) if body["pager"] else _NONE,
            percent_text(request["hits"], request["picks"]),
            f"{request['seconds']:.2f}",
            request["domain"] or _NONE,
            request["path"],
        )
    return shown


def _remarks(body: Json) -> Table:
    shown = table("Remarks")
    for remark in body["remarks"]:
        shown.add_row("warning" if remark["level"] == "warn" else "note", remark["text"])
    return shown


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return _NONE if value is None else percent_text(value, 1)


def _speed(value: float | None) -> str:
    return _NONE if value is None else f"{bytes_text(value)}/s"
