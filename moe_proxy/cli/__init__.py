"""Owns the command line: each command builds a configuration and calls one function.

Every error of the package ends here as one line that says what is wrong and what to do.
"""

from __future__ import annotations

import io
import os
import sys

import click

from moe_proxy import __version__
from moe_proxy.cli.bench import bench
from moe_proxy.cli.build import build
from moe_proxy.cli.classify import classify
from moe_proxy.cli.completion import completion
from moe_proxy.cli.config import config
from moe_proxy.cli.demo import demo
from moe_proxy.cli.doctor import doctor
from moe_proxy.cli.logs import logs
from moe_proxy.cli.maps import collect, router_map
from moe_proxy.cli.models import model
from moe_proxy.cli.plan import plan
from moe_proxy.cli.serve import start, status, stop
from moe_proxy.cli.stats import stats
from moe_proxy.cli.tune import tune_command
from moe_proxy.errors import MoeProxyError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="moe-proxy")
def cli() -> None:
    """Serve a large Mixture-of-Experts model behind OpenAI and Ollama clients.

    Example: moe-proxy start --model qwen3-30b-a3b-q4_k_m.gguf
    """


for command in (
    bench,
    build,
    classify,
    collect,
    completion,
    config,
    demo,
    doctor,
    logs,
    model,
    plan,
    router_map,
    start,
    stats,
    status,
    stop,
    tune_command,
):
    cli.add_command(command)


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
