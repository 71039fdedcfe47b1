"""The command line as a person meets it: one line per error, codes that a script can use."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from moe_proxy import __version__
from moe_proxy.cli import cli
from moe_proxy.resources import data_path
from tests.support.proxy_process import ProxyProcess, free_port, run_cli

Env = dict[str, str]


def _refused(env: Env, *args: str) -> str:
    """Run a command that must be refused: one line on standard error, a code that is not 0, no traceback."""
    done = run_cli(env, *args)
    assert done.returncode not in (0, -9), done.stdout
    lines = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("moe-proxy: ")
    return lines[0]


def test_version(proxy_env: Env) -> None:
    """--version prints the version."""
    assert __version__ in run_cli(proxy_env, "--version").stdout


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from _commands(child, f"{path} {name}")


def test_every_command_has_help_with_an_example(proxy_env: Env) -> None:
    """Every command has --help with an example: of itself."""
    commands = dict(_commands(cli, "moe-proxy"))
    assert len(commands) > 20
    for path, command in commands.items():
        text = " ".join(command.get_help(click.Context(command, info_name=path)).split())
        assert re.search(rf"Examples?: {path}\b", text), path
    assert "Example: moe-proxy start" in run_cli(proxy_env, "start", "--help").stdout


@pytest.mark.parametrize("command", ["stats", "status", "stop"])
def test_no_proxy_runs(proxy_env: Env, command: str) -> None:
    """`stats` of a stopped proxy says so and exits 1; so do its neighbours."""
    port = str(free_port())
    done = run_cli(proxy_env, command, "--port", port)
    assert done.returncode == 1
    assert f"no proxy is running on port {port}" in done.stderr


def test_unknown_option(proxy_env: Env) -> None:
    """Unknown option: one line that says what and what to do."""
    assert "--bogus" in _refused(proxy_env, "start", "--bogus")


def test_stray_argument(proxy_env: Env) -> None:
    """Arguments for llama-server follow `--`; a stray word is not passed on in silence."""
    assert "follow --" in _refused(proxy_env, "start", "model.gguf")


def test_not_a_gguf(proxy_env: Env, tmp_path: Path) -> None:
    """A file that is no GGUF."""
    path = tmp_path / "notes.txt"
    path.write_text("hello, this is no model\n" * 10)
    assert "not a GGUF" in _refused(proxy_env, "start", "--model", str(path), "--port", str(free_port()))


def test_missing_model(proxy_env: Env, tmp_path: Path) -> None:
    """A model file that is not there is named."""
    assert "nowhere.gguf" in _refused(proxy_env, "model", "inspect", str(tmp_path / "nowhere.gguf"))


def test_truncated(proxy_env: Env, tmp_path: Path, planted_model: Path) -> None:
    """A truncated GGUF is refused before anything is started."""
    path = tmp_path / "half.gguf"
    path.write_bytes(planted_model.read_bytes()[: planted_model.stat().st_size // 2])
    message = _refused(proxy_env, "start", "--model", str(path), "--port", str(free_port()))
    assert "half.gguf" in message


def test_dense_model(proxy_env: Env, tmp_path: Path) -> None:
    """A GGUF that is no MoE."""
    path = tmp_path / "dense.gguf"
    text = b"general.architecture"
    pair = struct.pack("<Q", len(text)) + text + struct.pack("<IQ", 8, 5) + b"llama"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    assert "no expert tensors" in _refused(
        proxy_env, "start", "--model", str(path), "--port", str(free_port())
    )


def test_missing_shard(proxy_env: Env, tmp_path: Path) -> None:
    """One shard of several missing."""
    path = tmp_path / "big-00001-of-00002.gguf"

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    pairs = text(b"general.architecture") + struct.pack("<I", 8) + text(b"qwen3moe")
    pairs += text(b"split.count") + struct.pack("<IH", 2, 2)
    pairs += text(b"split.no") + struct.pack("<IH", 2, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + pairs)
    message = _refused(proxy_env, "start", "--model", str(path), "--port", str(free_port()))
    assert "big-00002-of-00002.gguf" in message


def test_map_of_another_model(proxy_env: Env, tmp_path: Path) -> None:
    """A map of another model is refused by name."""
    content = json.loads((data_path("maps") / "planted-moe.json").read_text())
    content["model"]["fingerprint"] = "0" * 64
    content["model"]["name"] = "somebody-elses-model"
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    message = _refused(proxy_env, "start", "--router-map", str(path), "--port", str(free_port()))
    assert "somebody-elses-model" in message


def test_malformed_map(proxy_env: Env, tmp_path: Path) -> None:
    """A malformed map is refused naming the file."""
    path = tmp_path / "broken.json"
    path.write_text('{"format": "moe-router-map/1", ')
    assert "broken.json" in _refused(proxy_env, "map", "check", str(path))


def test_port_in_use(proxy_env: Env) -> None:
    """Port in use: said at once, before a build."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port}" in _refused(proxy_env, "start", "--port", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_others_reach_is_refused(proxy_env: Env, host: str) -> None:
    """Loopback by default; another address needs --insecure."""
    assert "--insecure" in _refused(proxy_env, "start", "--host", host, "--port", str(free_port()))


def test_wrong_budget(proxy_env: Env) -> None:
    """A budget that is none is refused with its value."""
    assert "'lots'" in _refused(proxy_env, "start", "--ram-budget", "lots", "--port", str(free_port()))


def test_wrong_setting_in_the_environment(proxy_env: Env) -> None:
    """An environment variable of the wrong kind is named with its value."""
    message = _refused(proxy_env | {"MOE_PROXY_PORT": "many"}, "status")
    assert "port" in message
    assert "many" in message


def test_wrong_setting_in_the_file(proxy_env: Env) -> None:
    """An unknown key in the configuration file is named."""
    Path(proxy_env["MOE_PROXY_CONFIG"]).write_text("prot = 1\n")
    assert "'prot'" in _refused(proxy_env, "status")


def test_an_owned_engine_option_is_refused(proxy_env: Env, fake_server: Path) -> None:
    """An option of llama-server that the supervisor owns is refused, naming ours."""
    args = ("start", "--engine", str(fake_server), "--port", str(free_port()), "--", "--port", "9")
    assert "--port" in _refused(proxy_env, *args)


def test_engine_that_does_not_start(proxy_env: Env, fake_server: Path) -> None:
    """A child that ends before it is ready: exit code not 0, its last words in the message."""
    env = proxy_env | {"FAKE_LLAMA_SWITCHES": "--exit-at-start 3 --log-lines 5"}
    done = run_cli(env, "start", "--engine", str(fake_server), "--port", str(free_port()))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "llama-server" in done.stderr


def test_classify(proxy_env: Env) -> None:
    """`classify --json` gives domain and distribution; `print hello world` is codegen."""
    body = json.loads(run_cli(proxy_env, "classify", "--json", "print hello world").stdout)
    assert body["domain"] == "codegen"
    assert abs(sum(body["distribution"].values()) - 1) < 0.01


def test_model_inspect(proxy_env: Env, planted_model: Path) -> None:
    """`model inspect --json` shows layers, experts and sizes."""
    facts = json.loads(run_cli(proxy_env, "model", "inspect", "--json", str(planted_model)).stdout)
    assert facts["architecture"] == "qwen3moe"
    assert facts["all_expert_bytes"] + facts["dense_bytes"] <= facts["size_bytes"]


@pytest.mark.engine
def test_detached_life(proxy_env: Env, start_proxy: Callable[..., ProxyProcess]) -> None:
    """start --detach, status, stats, logs, doctor, stop: each does its work, and nothing is left."""
    port = str(free_port())
    started = run_cli(proxy_env, "start", "--detach", "--port", port, "--ram-budget", "30%")
    try:
        assert started.returncode == 0, started.stderr
        state = json.loads(run_cli(proxy_env, "status", "--port", port, "--json").stdout)
        assert state["ready"] is True
        assert (
            json.loads(run_cli(proxy_env, "stats", "--port", port, "--json").stdout)["engine"]["state"]
            == "ready"
        )
        assert "hit rate" in run_cli(proxy_env, "stats", "--port", port).stdout
        assert run_cli(proxy_env, "logs", "--port", port, "-n", "3").stdout.count("\n") == 3
        doctor = run_cli(proxy_env, "doctor", "--port", port, "--json")
        assert doctor.returncode == 0, doctor.stdout
        assert {found["subject"]: found["level"] for found in json.loads(doctor.stdout)}["answer"] == "ok"
        again = run_cli(proxy_env, "start", "--port", port)
        assert again.returncode == 2
        assert "already" in again.stderr
    finally:
        stopped = run_cli(proxy_env, "stop", "--port", port)
    assert stopped.returncode == 0, stopped.stderr
    assert run_cli(proxy_env, "status", "--port", port).returncode == 1
