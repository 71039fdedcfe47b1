"""Owns the flags that say what is served: ``start`` has them, and whatever foretells a ``start``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

# Each flag is named as the setting it gives, but for --ctx-size: load_settings takes them as they come.
_OPTIONS = (
    click.option(
        "--model",
        type=click.Path(path_type=Path),
        help="GGUF file; REPO:QUANT of a downloaded one; auto for the best of those; default: the small model"
        " that ships",
    ),
    click.option("--alias", help="name of the model towards clients; default: the file's stem"),
    click.option("--host", help="address to listen on; default: 127.0.0.1 and ::1"),
    click.option(
        "--insecure", is_flag=True, default=None, help="listen where others can reach it, without a key"
    ),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        help="file of keys, one a line; clients must send one",
    ),
    click.option("--port", type=click.IntRange(0, 65535), help="port; default 11435, 0 takes a free one"),
    click.option(
        "--gpu/--cpu", default=None, help="compute on an NVIDIA GPU, with hot experts in its memory"
    ),
    click.option(
        "--vram-budget", metavar="SIZE", help="with --gpu: VRAM of the whole engine; default: what is free"
    ),
    click.option("--pager/--no-pager", default=None, help="the expert pager; without it: stock llama.cpp"),
    click.option("--ram-budget", metavar="SIZE", help="RAM for experts: 8G, 512M, or 30% of all experts"),
    click.option(
        "--policy",
        type=click.Choice(("posterior", "lru", "lfu", "static")),
        help="which experts are kept; default: posterior",
    ),
    click.option("--router-map", type=click.Path(path_type=Path), help="router map of this model"),
    click.option(
        "--router-top-k", type=click.IntRange(min=1), help="of the map, each layer's N busiest experts"
    ),
    click.option("--learn/--no-learn", default=None, help="let the router map follow the traffic"),
    click.option(
        "--learn-labels/--no-learn-labels", default=None, help="let corrected labels teach the classifier"
    ),
    click.option("--classifier", metavar="NAMES", help="keyword, tfidf, embedding: asked in the order given"),
    click.option(
        "--ctx-size", "--ctx", "context_length", type=click.IntRange(min=16), help="tokens of context"
    ),
    click.option("--slots", type=click.IntRange(1, 256), help="requests computed at once"),
    click.option("--threads", type=click.IntRange(min=1), help="CPU threads"),
    click.option(
        "--engine", type=click.Path(path_type=Path), help="a llama-server to use instead of building one"
    ),
)


def serving_options(command: Command) -> Command:
    """Give ``command`` the flags of ``start`` that are settings, as keyword arguments; None: not given."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def refuse_words(engine_args: tuple[str, ...]) -> None:
    """Raise UsageError for a word that stands where only arguments for llama-server may."""
    if engine_args and not engine_args[0].startswith("-"):
        raise click.UsageError(
            f"unexpected argument {engine_args[0]!r}; arguments for llama-server follow --"
        )
