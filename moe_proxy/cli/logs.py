"""Owns ``moe-proxy logs``: the files that the engine and a detached proxy write. It only reads them."""

from __future__ import annotations

import codecs
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import click

from moe_proxy.cli.client import paths_of
from moe_proxy.config import load_settings
from moe_proxy.errors import NotRunningError

_POLL_S = 0.1
_BLOCK_BYTES = 64 * 1024


@click.command(epilog="Example: moe-proxy logs --follow")
@click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="lines from the end"
)
@click.option("-f", "--follow", is_flag=True, help="go on printing what is added")
@click.option("--proxy", "of_proxy", is_flag=True, help="the detached proxy's own output, not llama-server's")
def logs(port: int | None, lines: int, follow: bool, of_proxy: bool) -> None:
    """Print what llama-server logged."""
    paths = paths_of(load_settings({"port": port}))
    path = paths.proxy_log if of_proxy else paths.engine_log
    if not path.exists():
        raise NotRunningError(f"there is no log at {path}", "start a proxy with: moe-proxy start")
    if not follow:
        with path.open("rb") as log:
            last = deque(log, maxlen=lines)
        click.echo(b"".join(last).decode("utf-8", "replace"), nl=False)
        return
    for text in followed(path, lines):
        click.echo(text, nl=False)


def followed(path: Path, lines: int, wait: Callable[[], None] = lambda: time.sleep(_POLL_S)) -> Iterator[str]:
    """The last ``lines`` of the file, then all that is added to the file of this name, without an end.

    A file that takes its place (a rotation) is read from its beginning, after the rest of the old one; so is
    one that was cut off. ``wait`` is called when there is nothing new.
    """
    log = path.open("rb")
    try:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        yield decoder.decode(b"".join(deque(log, maxlen=lines)))
        while True:
            # Looked up before the rest is read: what is written to a file before it is renamed is not lost.
            now = None
            with suppress(FileNotFoundError):  # between two files of a rotation
                now = path.stat()
            while data := log.read(_BLOCK_BYTES):
                yield decoder.decode(data)
            if now is not None and not os.path.samestat(now, os.fstat(log.fileno())):
                with suppress(FileNotFoundError):
                    newer = path.open("rb")
                    log.close()
                    log = newer
                    continue
            elif os.fstat(log.fileno()).st_size < log.tell():
                log.seek(0)
                continue
            wait()
    finally:
        log.close()
