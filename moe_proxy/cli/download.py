"""Owns ``moe-proxy model download``: what it says before, while and after it fetches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moe_proxy.cli.units import bytes_text
from moe_proxy.config import load_settings
from moe_proxy.errors import ConfigError
from moe_proxy.model import download as fetching
from moe_proxy.model.folder import Unusable, look_at
from moe_proxy.model.hub_name import parse_hub_name, quant_of


@click.command(epilog="Example: moe-proxy model download Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M")
@click.argument("name", metavar="REPO[:QUANT]")
@click.option("--file", "file_name", help="the file of the repository, where its quantisation does not tell")
@click.option("--revision", help="branch, tag or commit of the repository")
@click.option(
    "--to", type=click.Path(path_type=Path), help="folder for models; default: the setting models_dir"
)
@click.option("--dry-run", is_flag=True, help="say what would be fetched, and fetch nothing")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON")
def download(
    name: str, file_name: str | None, revision: str | None, to: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Fetch a GGUF from a hub into the models folder; called again after a break, it goes on.

    Without QUANT: Q4_K_M, or the only one that there is. All files of a split model are fetched, and each is
    checked against the hub's SHA-256. HF_ENDPOINT names another hub, HF_TOKEN holds a token for gated models.
    """
    wanted = parse_hub_name(name)
    if wanted is None:
        raise ConfigError(f"{name!r} is no name of a model on a hub", "write it as OWNER/NAME:Q4_K_M")
    models_dir = to or load_settings({}).models_dir
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    model = fetching.find(wanted, file_name, revision)
    count = f"{len(model.files)} files" if len(model.files) > 1 else model.files[0].name
    console.print(f"{model.repo}: {count}, {bytes_text(model.size_bytes)}", soft_wrap=True)
    path: Path | None = None
    if not dry_run:
        with _bar(console) as progress:
            path = fetching.download(model, models_dir, progress)
    if as_json:
        files = [{"name": file.name, "size_bytes": file.size_bytes} for file in model.files]
        told = str(path) if path else None
        click.echo(json.dumps({"repo": model.repo, "commit": model.commit, "files": files, "path": told}))
    elif path:
        click.echo(path)
    if path is None:
        return
    found = look_at(path)
    if isinstance(found, Unusable):
        console.print(f"It is here, but cannot be served: {found.reason}", soft_wrap=True)
        raise click.exceptions.Exit(1)
    quant = quant_of(str(path.relative_to(models_dir / model.repo)))
    serve = str(path) if to or quant is None else f"{model.repo}:{quant}"
    console.print(f"Serve it with: moe-proxy start --model {serve}", soft_wrap=True)


@contextmanager
def _bar(console: Console) -> Iterator[fetching.Progress]:
    """Bytes, speed and time left on a terminal; a line per tenth of a file elsewhere."""
    if console.file.isatty() and not console.is_dumb_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console) as bar:
            tasks: dict[str, object] = {}

            def draw(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total, completed=done)
                bar.update(tasks[what], completed=done)  # type: ignore[arg-type]

            yield draw
        return
    last = ("", -1)

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        step = (what, 10 * done // max(total, 1))
        if step != last:
            last = step
            console.print(f"{what} {10 * step[1]} % of {bytes_text(total)}", soft_wrap=True)

    yield tell
