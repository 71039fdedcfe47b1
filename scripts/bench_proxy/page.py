"""Owns the page of the figures: each beside its aim, and said plainly where it is missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_INTRODUCTION = """# What the proxy adds

Written by `make bench-proxy`; the same figures as JSON: `scripts/bench_proxy/results/proxy.json`.

`moe-proxy start` with its defaults (keyword and tfidf classifiers, router map, pager counts asked after each
request) and room for 512 requests stands before a stand-in for llama-server that answers at once, so what is
measured is the proxy. It has one CPU to itself; the load and the stand-in share the others. Direct means the
same requests to the stand-in's Unix socket, in alternation with the proxied ones, round by round; a first
round warms up and is not counted. Added is the difference of the two quantiles within a round. Figures are
the median of the rounds, then the least and the greatest.

"""


_BUSY = """**The machine was busy when this was measured**: times are longer, and rates lower, than on a quiet
one. Run `make bench-proxy` again before believing them.

"""
_QUIET_LOAD = 0.5


def page(result: dict[str, Any]) -> str:
    """The whole page in Markdown."""
    given, whole = result["conditions"], result["whole"]
    conditions = (
        f"{given['date']}, {given['cpu']}, {given['cpus']} CPUs, {given['memory_gb']} GB, "
        f"Linux {given['kernel']}, Python {given['python']}, aiohttp {given['aiohttp']}, "
        f"commit {given['commit']}, load average before: {given['load_before'][0]}; "
        f"{whole['rounds']} rounds of {whole['requests_per_round']}."
    )
    lines = ["| figure | OpenAI, bytes as they are | Ollama, translated | aim | |", "|---|---|---|---|---|"]
    for title, step, figure, aim in (
        ("added latency, not streamed, p50", "whole", "added_p50_ms", 1.0),
        ("added latency, not streamed, p99", "whole", "added_p99_ms", 5.0),
        ("added time to first token, p50", "first_token", "added_p50_ms", 2.0),
        ("added time to first token, p99", "first_token", "added_p99_ms", None),
    ):
        found = [result[step][family][figure] for family in ("openai", "ollama")]
        lines.append(_row(title, found, "ms", aim, _at_most))
    for title, steps, unit, aim in (
        ("requests per second of the proxy's CPU, 32 at once", ("requests_openai", "requests_ollama"),
         "/s", 1500),
        ("chunks per second of its CPU, each read alone, 50 streams", ("chunks_paced_openai", "chunks_paced"),
         "/s", 5000),
    ):  # fmt: skip
        found = [result[step]["per_cpu_s"] for step in steps]
        lines.append(_row(title, found, unit, aim, lambda value, aim: value >= aim))
    flood = result["chunks_flood"]["per_cpu_s"]
    lines.append(_row("chunks per second of its CPU, as fast as they come", [None, flood], "/s", 5000,
                      lambda value, aim: value >= aim))  # fmt: skip
    streams, sizes = result["streams"], result["memory"]["resident_mb"]
    wrong = "none" if not streams["wrong"] else str(streams["wrong"])
    lines.append(
        f"| streams with a byte lost or out of order, {streams['streams']} at once | {wrong} of both APIs | "
        f"| none | {_verdict(not streams['wrong'])} |"
    )
    # The first requests fill caches that stay.
    settled = sizes[2:]
    growth = max(settled) - min(settled)
    lines.append(
        f"| resident memory after start | {result['idle_mb']:.0f} MB | | 80 MB "
        f"| {_verdict(result['idle_mb'] <= 80)} |"
    )
    lines.append(
        f"| its change from the first tenth to the end of {result['memory']['requests']:,} requests "
        f"| {growth:.1f} MB, ends at {sizes[-1]:.0f} MB | | 5 MB | {_verdict(growth <= 5)} |"
    )
    told, crash = result["disconnect"], result["crash"]
    restarted = " and ".join(f"{seconds:.1f}" for seconds in crash["ready_s"])
    gone = [told[family]["ms"] for family in ("openai", "ollama")]
    lines += [
        f"| a client gone before the first byte: the engine hears of it after | {_figures(gone[0])} ms "
        f"| {_figures(gone[1])} ms | 100 ms | {_verdict(max(one[2] for one in gone) <= 100)} |",
        *(
            f"| slowest of `/`, `/health`, `/api/tags`, `version`, `show`, `ps`, engine {state}, p99 "
            f"| {_figures(figures)} ms | | 10 ms | {_verdict(figures[0] <= 10)} |"
            for state, figures in result["information"].items()
        ),
        f"| a killed engine is seen after | {_figures(crash['seen_s'])} s | | 0.5 s "
        f"| {_verdict(crash['seen_s'][0] <= 0.5)} |",
        f"| killed once and again, it is ready after | {restarted} s | | 1 and 2 s, and its start | |",
    ]
    direct = ", ".join(
        f"{name} p50 {_figures(result[step]['direct']['p50_ms'])} ms"
        for name, step in (("not streamed", "whole"), ("first token", "first_token"))
    )
    busy = _BUSY if given["load_before"][0] > _QUIET_LOAD else ""
    return (
        f"{_INTRODUCTION}Conditions: {conditions}\n\n{busy}" + "\n".join(lines) + f"\n\nDirect: {direct}.\n"
    )


def _row(
    title: str,
    found: list[list[float] | None],
    unit: str,
    aim: float | None,
    good: Callable[[float, float], bool],
) -> str:
    cells = [_figures(figures) + (f" {unit}" if unit == "ms" else "") if figures else "" for figures in found]
    if aim is None:
        return f"| {title} | {' | '.join(cells)} | | |"
    reached = all(good(figures[0], aim) for figures in found if figures)
    return f"| {title} | {' | '.join(cells)} | {aim:,g} {unit} | {_verdict(reached)} |"


def _at_most(value: float, aim: float) -> bool:
    return value <= aim


def _figures(figures: list[float]) -> str:
    median, least, greatest = (f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in figures)
    return f"**{median}** ({least} to {greatest})"


def _verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"
