"""Owns ``collect`` and ``map``: making and judging router maps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
from rich.console import Console

from moe_proxy.app import collect_map
from moe_proxy.cli.build import progress_report
from moe_proxy.cli.serve import engine_for_start, free_port
from moe_proxy.config import load_settings
from moe_proxy.errors import ConfigError
from moe_proxy.files import write_text
from moe_proxy.instance import instance_paths
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.routing.router_map import check, dump, load
from moe_proxy.served import examine


@click.command(epilog="Example: moe-proxy collect --model qwen3-30b-a3b-q4_k_m.gguf --output qwen3.json")
@click.option(
    "--model", type=click.Path(path_type=Path), help="GGUF file; default: the small model that ships"
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="map file to write")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=48,
    show_default=True,
    help="tokens to generate per prompt",
)
def collect(model: Path | None, output: Path, tokens: int) -> None:
    """Make a router map: run the labelled prompts that ship through the engine and count experts."""
    settings = load_settings({"model": model, "port": free_port()})
    console = Console(stderr=True)
    served = examine(settings)
    server = engine_for_start(settings, None, console)
    paths = instance_paths(settings.runtime_dir, settings.state_dir, settings.port)
    paths.prepare()
    with progress_report(console) as report:
        router_map = asyncio.run(collect_map(served, server, paths, tokens, report))
    write_text(output, dump(router_map))
    counted = sum(domain.tokens for domain in router_map.domains.values())
    click.echo(f"{output}: {len(router_map.domains)} domains, {counted} tokens")


@click.group("map")
def router_map() -> None:
    """Look at router maps."""


@router_map.command("reset", epilog="Example: moe-proxy map reset")
@click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy whose map is meant")
def reset_map(port: int | None) -> None:
    """Forget what was learned from traffic; a running proxy forgets it too."""
    settings = load_settings({"port": port})
    state = instance_paths(settings.runtime_dir, settings.state_dir, settings.port).state
    learned = sorted(state.glob("learned-*.json"))
    for path in learned:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be removed ({error.strerror})", "check its rights") from error
        click.echo(f"Forgot {path}.")
    if not learned:
        click.echo(f"Nothing was learned on port {settings.port}.")


@router_map.command(
    "check", epilog="Example: moe-proxy map check qwen3.json --model qwen3-30b-a3b-q4_k_m.gguf"
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--model", type=click.Path(path_type=Path), help="also check that the map belongs to this model"
)
def check_map(file: Path, model: Path | None) -> None:
    """Say whether FILE is a well-formed router map."""
    loaded = load(file)
    warnings = check(loaded, layout_of(read_header(model))) if model else []
    for domain, counts in sorted(loaded.domains.items()):
        click.echo(f"{domain:15s} {counts.tokens} tokens, {len(counts.layers)} layers")
    for warning in warnings:
        click.echo(f"warning: {warning}")
