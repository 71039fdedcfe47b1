"""Owns ``moe-proxy stats``: what really happened, from the running proxy's own counters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from moe_proxy.access import read_keys
from moe_proxy.cli.client import find_proxy, get_json
from moe_proxy.cli.units import bytes_text, percent_text
from moe_proxy.config import load_settings

Json = Mapping[str, Any]


@click.command(epilog="Example: moe-proxy stats --json")
@click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy")
@click.option("--json", "as_json", is_flag=True, help="print the counters as JSON")
def stats(port: int | None, as_json: bool) -> None:
    """Show requests, domains, the prior, and where experts were read from."""
    settings = load_settings({"port": port})
    # An engine that hangs is waited for; the proxy answers without it.
    body = get_json(find_proxy(settings), "/stats", timeout_s=15.0, keys=read_keys(settings))
    if as_json:
        click.echo(json.dumps(body))
        return
    console = Console(markup=False, emoji=False)
    for table in (_summary(body), _experts(body), _recent(body)):
        if table.row_count:
            console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(columns), box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _summary(body: Json) -> Table:
    table = _table("Proxy")
    engine, requests, prior = body["engine"], body["requests"], body["prior"]
    table.add_row("model", body["model"]["name"])
    reason = f" ({engine['reason']})" if engine["reason"] else ""
    table.add_row("engine", f"{engine['state']}{reason}, {engine['restarts']} restarts")
    table.add_row(
        "requests", f"{requests['total']} done, {requests['active']} active, {requests['failed']} failed"
    )
    domains = ", ".join(f"{name} {count}" for name, count in sorted(requests["domains"].items()))
    table.add_row("domains", domains or "none yet")
    if not body.get("pager", True):
        table.add_row("expert pager", "off: no experts are counted, and no prior is used")
        return table
    source = prior["map"] or "none for this model: the pager lives on its own counts"
    table.add_row("router map", source)
    table.add_row("prior", f"{prior['id'] or 'none'}, {prior['pushed']} pushed, {prior['failed']} failed")
    if not body["experts"]:
        table.add_row("experts", "not known: the engine does not answer now")
    return table


def _experts(body: Json) -> Table:
    table = _table("Experts, since the engine's last start")
    experts = body["experts"]
    if not experts:
        return table
    picks = experts["picks"]
    table.add_row("tokens counted", f"{experts['tokens']}")
    table.add_row("hit rate", f"{percent_text(experts['hits'], picks)} of {picks} picks")
    table.add_row(
        "resident",
        f"{experts['resident_experts']} experts, {bytes_text(experts['resident_bytes'])}"
        f" of a budget of {bytes_text(experts['budget_bytes'])}"
        f" ({bytes_text(experts['locked_bytes'])} locked)",
    )
    table.add_row("read outside the budget", bytes_text(experts["miss_bytes"]))
    table.add_row(
        "moves",
        f"{experts['promotions']} promoted ({bytes_text(experts['promoted_bytes'])}),"
        f" {experts['demotions']} demoted, {bytes_text(experts['given_back_bytes'])} given back",
    )
    for reason in experts["reasons"]:
        table.add_row("note", reason)
    return table


def _recent(body: Json) -> Table:
    counted = ("tokens", "hit rate") if body.get("pager", True) else ()
    table = _table("Last requests", "path", "domain", "confidence", *counted, "seconds")
    for request in body["recent"]:
        counts = (str(request["tokens"]), percent_text(request["hits"], request["picks"])) if counted else ()
        table.add_row(
            request["path"],
            request["domain"] or "-",
            f"{request['confidence']:.2f}",
            *counts,
            f"{request['seconds']:.2f}",
        )
    return table
