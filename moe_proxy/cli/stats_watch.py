"""Owns the loop of ``moe-proxy stats --watch``: when a reading is taken, and in which form it is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from itertools import count as counting
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from moe_proxy.cli.stats_view import line, screen
from moe_proxy.rates import Rates, Reading, rates

Json = Mapping[str, Any]


def watch(
    read: Callable[[], Json],
    *,
    interval_s: float,
    count: int | None,
    as_json: bool,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show what ``read`` gives every ``interval_s``, ``count`` times or endlessly. Raises what it raises."""
    console = Console(markup=False, emoji=False, highlight=False)
    on_screen = not as_json and console.file.isatty() and not console.is_dumb_terminal
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if on_screen else None
    with live or nullcontext():
        for body, now in _readings(read, interval_s, count, pause):
            if live is not None:
                live.update(screen(body, now), refresh=True)
            elif as_json:
                click.echo(json.dumps({"time_s": round(time.time(), 3), "rates": asdict(now), "stats": body}))
            else:
                click.echo(line(body, now))


def _readings(
    read: Callable[[], Json], interval_s: float, count: int | None, pause: Callable[[float], None]
) -> Iterator[tuple[Json, Rates]]:
    before: Reading | None = None
    for number in counting(1):
        now = Reading(time.monotonic(), read())
        yield now.stats, rates(before, now)
        if number == count:
            return
        before = now
        # From one reading to the next, however long it took to show.
        pause(max(0.0, now.time_s + interval_s - time.monotonic()))
