"""Owns ``moe-proxy completion``: what a shell has to read to complete our commands and options."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

_PROGRAM = "moe-proxy"
_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(epilog="Example: moe-proxy completion fish > ~/.config/fish/completions/moe-proxy.fish")
@click.argument("shell", metavar="SHELL", type=click.Choice(sorted(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion for SHELL; docs/install.md says where each shell looks for it."""
    of = _SHELLS[shell](context.find_root().command, {}, _PROGRAM, "_MOE_PROXY_COMPLETE")
    # Not source(): that asks this machine's bash for its version, and the text may be for another.
    click.echo(of.source_template % of.source_vars())
