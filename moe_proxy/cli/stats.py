"""Owns ``moe-proxy stats``: what really happened, from the running proxy's own counters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from moe_proxy.access import read_keys
from moe_proxy.cli.client import find_proxy, get_json
from moe_proxy.cli.stats_view import in_flight, table
from moe_proxy.cli.stats_watch import watch
from moe_proxy.cli.units import bytes_text, percent_text
from moe_proxy.config import load_settings
from moe_proxy.rates import Rates

Json = Mapping[str, Any]
_SHORTEST_S = 0.1


@click.command(epilog="Examples: moe-proxy stats --watch; moe-proxy stats --json")
@click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy")
@click.option("--json", "as_json", is_flag=True, help="print the counters as JSON")
@click.option("-w", "--watch", "watched", is_flag=True, help="show rates, again and again, until Ctrl-C")
@click.option(
    "--interval", type=click.FloatRange(_SHORTEST_S, 3600), help="seconds between two readings of --watch [1]"
)
@click.option("--count", type=click.IntRange(1), help="readings of --watch after which it ends")
def stats(port: int | None, as_json: bool, watched: bool, interval: float | None, count: int | None) -> None:
    """Show requests, domains, the prior, and where experts were read from.

    With --watch, what happens now: a screen on a terminal, else a line for each reading; with --json, an
    object for each, with the counters and the rates since the one before.
    """
    if not watched and (interval is not None or count is not None):
        raise click.UsageError("--interval and --count belong to --watch")
    settings = load_settings({"port": port})
    # An engine that hangs is waited for; the proxy answers without it.
    read = partial(get_json, find_proxy(settings), "/stats", timeout_s=15.0, keys=read_keys(settings))
    if watched:
        watch(read, interval_s=interval or 1.0, count=count, as_json=as_json)
        return
    body = read()
    if as_json:
        click.echo(json.dumps(body))
        return
    console = Console(markup=False, emoji=False)
    for part in (_summary(body), _experts(body), in_flight(body, Rates()), _recent(body)):
        if part.row_count:
            console.print(part)


def _summary(body: Json) -> Table:
    shown = table("Proxy")
    engine, requests, prior = body["engine"], body["requests"], body["prior"]
    shown.add_row("model", body["model"]["name"])
    reason = f" ({engine['reason']})" if engine["reason"] else ""
    shown.add_row("engine", f"{engine['state']}{reason}, {engine['restarts']} restarts")
    shown.add_row(
        "requests", f"{requests['total']} done, {requests['active']} active, {requests['failed']} failed"
    )
    domains = ", ".join(f"{name} {count}" for name, count in sorted(requests["domains"].items()))
    shown.add_row("domains", domains or "none yet")
    if body.get("pager", True):
        source = prior["map"] or "none for this model: the pager lives on its own counts"
        shown.add_row("router map", source)
        shown.add_row("prior", f"{prior['id'] or 'none'}, {prior['pushed']} pushed, {prior['failed']} failed")
        if not body["experts"]:
            shown.add_row("experts", "not known: the engine does not answer now")
    else:
        shown.add_row("expert pager", "off: no experts are counted, and no prior is used")
    for remark in body.get("remarks", ()):
        if remark["level"] == "warn":
            shown.add_row("warning", remark["text"])
    return shown


def _experts(body: Json) -> Table:
    shown = table("Experts, since the engine's last start")
    experts = body["experts"]
    if not experts:
        return shown
    picks = experts["picks"]
    shown.add_row("tokens counted", f"{experts['tokens']}")
    shown.add_row("hit rate", f"{percent_text(experts['hits'], picks)} of {picks} picks")
    shown.add_row(
        "resident",
        f"{experts['resident_experts']} experts, {bytes_text(experts['resident_bytes'])}"
        f" of a budget of {bytes_text(experts['budget_bytes'])}"
        f" ({bytes_text(experts['locked_bytes'])} locked)",
    )
    shown.add_row("read outside the budget", bytes_text(experts["miss_bytes"]))
    shown.add_row(
        "moves",
        f"{experts['promotions']} promoted ({bytes_text(experts['promoted_bytes'])}),"
        f" {experts['demotions']} demoted, {bytes_text(experts['given_back_bytes'])} given back",
    )
    for reason in experts["reasons"]:
        shown.add_row("note", reason)
    return shown


def _recent(body: Json) -> Table:
    counted = ("tokens", "hit rate") if body.get("pager", True) else ()
    shown = table("Last requests", "path", "domain", "confidence", *counted, "seconds")
    for request in body["recent"]:
        counts = (str(request["tokens"]), percent_text(request["hits"], request["picks"])) if counted else ()
        shown.add_row(
            request["path"],
            request["domain"] or "-",
            f"{request['confidence']:.2f}",
            *counts,
            f"{request['seconds']:.2f}",
        )
    return shown
