"""Owns ``moe-proxy config``: which settings hold, where each came from, and where the file lies."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console

from moe_proxy.cli.options import serving_options
from moe_proxy.config import ENV_PREFIX, Settings, Source, config_path, load_settings, nearest, origins_of

_COLOURS: dict[Source, str] = {"flag": "magenta", "env": "cyan", "file": "green", "default": "dim"}


@click.group()
def config() -> None:
    """Look at the settings: flags beat variables, variables beat the file, the file beats the defaults."""


@config.command(epilog="Example: moe-proxy config path")
def path() -> None:
    """Print where the TOML file lies, whether it is there or not; MOE_PROXY_CONFIG names another."""
    click.echo(config_path())


@config.command(epilog="Example: moe-proxy config schema > moe-proxy.schema.json")
def schema() -> None:
    """Print the JSON Schema of the TOML file, for editors that complete and check."""
    click.echo(json.dumps(Settings.model_json_schema(), indent=2))


@config.command(epilog="Example: moe-proxy config show --ram-budget 12G --given")
@serving_options
@click.option("--given", is_flag=True, help="only what is not a default")
@click.option("--json", "as_json", is_flag=True, help="print the settings as JSON")
@click.pass_context
def show(context: click.Context, /, given: bool, as_json: bool, **flags: Any) -> None:
    """Show each setting that start with the same flags would have, and where it came from."""
    values = load_settings(flags).model_dump(mode="json")
    origins = origins_of(flags)
    names = {option.name: option.opts[0] for option in context.command.params}

    def where(name: str, source: Source) -> str | None:
        places = {"flag": names.get(name), "env": f"{ENV_PREFIX}{name.upper()}", "file": str(config_path())}
        return places.get(source)

    rows = {
        name: {
            "value": value,
            "source": source,
            "where": where(name, source),
            "also": origins.all[name][1:-1],
        }
        for name, value in values.items()
        if (source := origins.of(name)) != "default" or not given
    }
    for stranger in origins.strangers:
        meant = nearest(stranger[len(ENV_PREFIX) :], Settings.model_fields)
        cure = f": did you mean {ENV_PREFIX}{meant.upper()}?" if meant else ""
        click.echo(f"warning: {stranger} is no setting{cure}", err=True)
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("Every setting has its default.")
        return
    # Lines, not a table: outside a terminal nothing may be folded.
    console = Console()
    width = max(map(len, rows)), max(len(_text(row["value"])) for row in rows.values())
    for name, row in rows.items():
        also = " and the file" if isinstance(row["value"], dict) and row["also"] else ""
        origin = f"{row['source']} {row['where']}{also}" if row["where"] else "default"
        line = f"{name:{width[0]}}  {_text(row['value']):{width[1]}}  {origin}"
        console.print(
            line, style=_COLOURS[origins.of(name)], markup=False, highlight=False, emoji=False, soft_wrap=True
        )


def _text(value: object) -> str:
    """As one would write it in a variable; a dash for what is not set."""
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, (bool, dict)) else str(value)
