"""Owns ``moe-proxy build`` and the progress that a build shows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moe_proxy.config import load_settings
from moe_proxy.engine.archive import export_engine, import_engine
from moe_proxy.engine.build import build_engine, engine_for
from moe_proxy.engine.cache import EngineBuild
from moe_proxy.engine.recipe import BuildRequest
from moe_proxy.files import check_writable

ProgressReport = Callable[[str, float], None]


@contextmanager
def progress_report(console: Console) -> Iterator[ProgressReport]:
    """Where a build reports (stage, fraction): a bar on a terminal, a line per stage and tenth elsewhere.

    Colours may be forced on a pipe or a file; a bar that moves is of no use there.
    """
    if console.file.isatty() and not console.is_dumb_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
            task = bar.add_task("preparing", total=1.0)
            yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)
        return
    last = ("", -1)

    def report(stage: str, fraction: float) -> None:
        nonlocal last
        step = (stage, int(fraction * 10))
        if step != last:
            last = step
            console.print(f"{stage} {step[1] * 10} %", highlight=False)

    yield report


def built_engine(request: BuildRequest, console: Console) -> EngineBuild:
    """The engine for ``request``, built now when it is not there. Raises BuildError."""
    engine = engine_for(request)
    if engine is not None:
        return engine
    console.print("Building llama-server with the expert pager; this happens once.", highlight=False)
    with progress_report(console) as report:
        return build_engine(request, report)


@click.command(epilog="Example: moe-proxy build --cuda --cuda-arch 89")
@click.option(
    "--source", type=click.Path(path_type=Path), help="a llama.cpp tree to build instead of the pinned one"
)
@click.option("--cuda", is_flag=True, help="build for NVIDIA GPUs; needs the CUDA toolkit")
@click.option(
    "--cuda-arch",
    default="",
    metavar="LIST",
    help="CUDA architectures, such as 86;89, or all; default: the GPUs here",
)
@click.option("--stock", is_flag=True, help="build llama.cpp as it is, for comparison")
@click.option("--jobs", type=click.IntRange(min=1), help="compilers at once; default: one per core")
@click.option(
    "--portable/--native",
    default=None,
    help="for most CPUs of this kind, or for this very one; default: portable with --export, else native",
)
@click.option(
    "--export",
    "export_to",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="also pack the engine into FILE (.tar.gz), for machines that cannot build one",
)
@click.option(
    "--import",
    "import_from",
    metavar="FILE|URL",
    help="build nothing: take the engine that another machine exported; needs --sha256",
)
@click.option("--sha256", metavar="HEX", help="with --import: what --export printed")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON")
def build(
    source: Path | None,
    cuda: bool,
    cuda_arch: str,
    stock: bool,
    jobs: int | None,
    portable: bool | None,
    export_to: Path | None,
    import_from: str | None,
    sha256: str | None,
    as_json: bool,
) -> None:
    """Build llama-server; do nothing when this very build is there already."""
    if cuda_arch and not cuda:
        raise click.UsageError("--cuda-arch is for a build with --cuda")
    if (import_from is None) != (sha256 is None):
        raise click.UsageError(
            "--import and --sha256 go together: an engine is a program that will run as you"
        )
    settings = load_settings({})
    console = Console(stderr=True)
    if import_from is not None and sha256 is not None:
        if source or cuda or stock or jobs or export_to or portable is not None:
            raise click.UsageError("--import builds nothing: leave the other options out")
        with progress_report(console) as report:
            engine = import_engine(import_from, sha256, settings.cache_dir, report)
        _print(engine, None, as_json)
        return
    if export_to is not None:
        check_writable(export_to)
    request = BuildRequest(
        cache_dir=settings.cache_dir,
        source=source,
        cuda=cuda,
        cuda_architectures=cuda_arch,
        stock=stock,
        jobs=jobs,
        portable=export_to is not None if portable is None else portable,
    )
    engine = built_engine(request, console)
    archive = None
    if export_to is not None:
        with progress_report(console) as report:
            archive = (export_to, export_engine(engine, export_to, report))
    _print(engine, archive, as_json)


def _print(engine: EngineBuild, archive: tuple[Path, str] | None, as_json: bool) -> None:
    if as_json:
        body = {"key": engine.key, "server": str(engine.server), "log": str(engine.log)}
        click.echo(json.dumps(body | ({"archive": str(archive[0]), "sha256": archive[1]} if archive else {})))
    elif archive:
        click.echo(f"moe-proxy build --import {shlex.quote(str(archive[0]))} --sha256 {archive[1]}")
    else:
        click.echo(engine.server)
