"""Owns the command line: each command builds a configuration and calls one function.

Every error of the package ends here as one line that says what is wrong and what to do.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Final

import click

from moe_proxy import __version__
from moe_proxy.errors import MoeProxyError

# Where each command is, below this package. Its module is loaded when it is asked for: a proxy that runs for
# months need not keep what the other commands draw their tables with.
_COMMANDS: Final = {
    "bench": "bench:bench",
    "build": "build:build",
    "classify": "classify:classify",
    "collect": "maps:collect",
    "completion": "completion:completion",
    "config": "config:config",
    "demo": "demo:demo",
    "doctor": "doctor:doctor",
    "logs": "logs:logs",
    "map": "maps:router_map",
    "model": "models:model",
    "plan": "plan:plan",
    "start": "serve:start",
    "stats": "stats:stats",
    "status": "serve:status",
    "stop": "serve:stop",
    "tune": "tune:tune_command",
}


class _Commands(click.Group):
    """The commands, loaded as they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(f"{__name__}.{module}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="moe-proxy")
def cli() -> None:
    """Serve a large Mixture-of-Experts model behind OpenAI and Ollama clients.

    Example: moe-proxy start --model qwen3-30b-a3b-q4_k_m.gguf
    """


def main() -> None:
    """Run the command line and exit with its code."""
    if os.environ.get("COLUMNS") == "0":
        # A terminal that does not know its width; rich would believe it and print nothing.
        del os.environ["COLUMNS"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path of other bytes than UTF-8, a prompt in a terminal that knows ASCII alone.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(prog_name="moe-proxy", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "moe-proxy"
        # click breaks lines where it lists choices; an error of ours is one line.
        message = " ".join(error.format_message().split()).rstrip(".")
        click.echo(f"moe-proxy: {message}: see {command} --help", err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"moe-proxy: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except MoeProxyError as error:
        click.echo(f"moe-proxy: {error}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("moe-proxy: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away (`moe-proxy logs | head`); nothing is left to tell it.
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        # Nobody foresaw it where it happened: a full disk, a folder that was taken away or made read-only.
        where = f"{error.filename}: " if error.filename is not None else ""
        click.echo(f"moe-proxy: {where}{error.strerror or error}: check its rights and its disk", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
