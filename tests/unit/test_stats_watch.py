"""`moe-proxy stats --watch`: a screen on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from rich.console import Console

from moe_proxy.cli.stats_view import screen
from moe_proxy.cli.stats_watch import watch
from moe_proxy.errors import NotRunningError
from moe_proxy.rates import Rates
from tests.support.command_line import run_main


def stats(number: int) -> dict[str, Any]:
    """The ``number``-th reading: 20 tokens and 100 picks a second of the engine, 3 of 4 of them hits."""
    request = {"id": "r", "path": "/v1/chat/completions", "domain": "math", "confidence": 0.9, "seconds": 1.5}
    ranks = {"p50": 0.25, "p95": 0.5, "p99": 0.5, "count": 3}
    return {
        "uptime_s": float(number),
        "model": {"name": "m [/bold]"},
        "engine": {"state": "ready", "reason": "", "restarts": 1, "rss_bytes": 1 << 30, "vram_bytes": None},
        "requests": {"total": 2, "active": 2, "failed": 0, "domains": {"math": number}},
        "in_flight": [{**request, "tokens": None, "id": "w"}, {**request, "tokens": 20 * number}],
        "latency": {"first_token_s": ranks, "duration_s": {**ranks, "count": 0}},
        "prior": {"map": None, "id": None, "pushed": 0, "failed": 0},
        "pager": True,
        "experts": {
            "start_id": "a", "uptime_us": number * 1_000_000, "tokens": 20 * number, "picks": 100 * number,
            "hits": 75 * number, "hit_bytes": 0, "miss_bytes": 1024 * number, "promoted_bytes": 0,
            "tiers": {"ram": {"home": "mmap", "budget_bytes": 2 << 30, "resident_bytes": 1 << 30}},
        },
        "recent": [{**request, "tokens": 9, "picks": 40, "hits": 30}],
        "remarks": [{"level": "warn", "text": "llama-server was restarted"}],
    }  # fmt: skip


@pytest.fixture
def readings() -> Iterator[Any]:
    """A proxy that is read again and again."""
    numbers = iter(range(1, 100))
    return lambda: stats(next(numbers))


def test_plain_lines_where_no_terminal_is(
    readings: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No TTY: one line a reading, without colours or moves; the first has no rates, as nothing was before."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    waits: list[float] = []
    watch(readings, interval_s=5.0, count=3, as_json=False, pause=waits.append)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "ready  in flight 2  tokens/s -  hit rate -  misses -  moved -  done 2  failed 0"
    rates = "tokens/s 20.0  hit rate 75.0 %  misses 1.0 KiB/s  moved 0 B/s"
    assert others == [f"ready  in flight 2  {rates}  done 2  failed 0"] * 2
    assert len(waits) == 2
    assert all(4.0 < wait_s <= 5.0 for wait_s in waits)


def test_json_lines(readings: Any, capsys: Any) -> None:
    """One object a line, with what was counted and the rates; what is not known is null."""
    watch(readings, interval_s=1.0, count=2, as_json=True, pause=lambda seconds: None)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["stats"] == stats(1)
    assert first["rates"]["hit_rate"] is None
    assert (second["rates"]["tokens_per_s"], second["rates"]["hit_rate"]) == (20.0, 0.75)
    assert second["rates"]["domains"] == {"math": 1}


def test_the_screen() -> None:
    """Like top: what runs, the fastest first, and beside it memory, times and what is wrong."""
    console = Console(file=io.StringIO(), width=100, markup=False, emoji=False)
    body = stats(1)
    console.print(screen(body, Rates(tokens_per_s=20.0, request_tokens_per_s={"r": 12.5})))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("m [/bold]: ready, 1 restarts", "20.0 (prompt and answer)", "RAM      budget 2.0 GiB",
                 "1.0 GiB of RAM", "0.250 s", "llama-server was restarted", "75.0 %"):  # fmt: skip
        assert text in printed
    assert "whole answer" not in printed
    fast, waits = (printed.index(f"\n{text}") for text in ("12.5  ", "-     "))
    assert fast < waits


def test_a_terminal_gets_the_screen(readings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TTY, and only it, is drawn over and over."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout", terminal)
    watch(readings, interval_s=1.0, count=2, as_json=False, pause=lambda seconds: None)
    drawn = terminal.getvalue()
    assert drawn.count("Last requests") >= 2
    assert "\x1b[1A" in drawn
    assert "\x1b[3" not in drawn.replace("\x1b[3m", "")  # NO_COLOR leaves italics, and no colour


def test_a_proxy_that_goes_away_ends_it(capsys: Any) -> None:
    """What was read is shown, and the error is said, not a screen that stands still."""
    answers = iter([stats(1)])

    def read() -> Any:
        try:
            return next(answers)
        except StopIteration:
            raise NotRunningError("gone") from None

    with pytest.raises(NotRunningError):
        watch(read, interval_s=1.0, count=None, as_json=False, pause=lambda seconds: None)
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("flags", [("--interval", "2"), ("--count", "3"), ("--watch", "--interval", "0"),
                                   ("--watch", "--count", "0")])  # fmt: skip
def test_wrong_flags(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Something was asked for wrongly: exit code 2, before any proxy is looked for."""
    monkeypatch.setattr(import_module("moe_proxy.cli.stats"), "find_proxy", None)
    assert run_main(monkeypatch, "stats", *flags) == 2
    assert flags[-2] in capsys.readouterr().err
