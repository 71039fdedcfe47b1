"""What commands report: true for what runs, and with the exit code that a script needs."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_proxy.cli.build import progress_report
from moe_proxy.config import Settings
from moe_proxy.hardware import Gpu, Hardware
from moe_proxy.instance import RunningProxy, instance_paths, start_time_s, write_record
from moe_proxy.resources import data_path
from tests.support.command_line import run_main

pytestmark = pytest.mark.usefixtures("own_folders")
PLANTED_MAP = data_path("maps") / "planted-moe.json"
CARD = Gpu(0, "Card", 8 * 2**30, 8 * 2**30, "8.9")


def _findings(monkeypatch: pytest.MonkeyPatch, capsys: Any, hardware: Hardware, *args: str) -> Any:
    """What doctor says on ``hardware``, by subject."""
    monkeypatch.setattr(import_module("moe_proxy.cli.doctor"), "probe", lambda: hardware)
    run_main(monkeypatch, "doctor", "--port", "0", "--json", *args)
    return {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("gpus", "flag", "level"),
    [((), "--cpu", "ok"), ((), "--gpu", "fail"), ((CARD,), "--gpu", "ok")],
)
def test_doctor_looks_at_what_start_would_use(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, gpus: tuple[Gpu, ...], flag: str, level: str
) -> None:
    """doctor takes --gpu/--cpu as start does: without a card, --gpu is a failure and --cpu is none."""
    hardware = Hardware(8 * 2**30, 4 * 2**30, 4, None, gpus)
    monkeypatch.setenv("MOE_PROXY_ENGINE", sys.executable)
    found = _findings(monkeypatch, capsys, hardware, flag)
    assert found["gpu"]["level"] == level


@pytest.mark.parametrize(("limit", "level"), [(None, "ok"), (65536, "warn")])
def test_doctor_warns_of_a_limit_that_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, limit: int | None, level: str
) -> None:
    """A finding with its cure stands where there is something to cure, and nowhere else."""
    found = _findings(monkeypatch, capsys, Hardware(8 * 2**30, 4 * 2**30, 4, limit, ()))
    assert found["memlock"]["level"] == level


def _stats(monkeypatch: pytest.MonkeyPatch, capsys: Any, **changes: Any) -> str:
    body = {
        "model": {"name": "m"},
        "engine": {"state": "ready", "reason": "", "restarts": 0},
        "requests": {"total": 1, "active": 0, "failed": 0, "domains": {"math": 1}},
        "prior": {"map": None, "id": None, "pushed": 0, "failed": 0},
        "pager": True,
        "experts": None,
        "recent": [
            {
                "path": "/x",
                "domain": "math",
                "confidence": 1,
                "tokens": 0,
                "picks": 0,
                "hits": 0,
                "seconds": 1,
            }
        ],
    }
    monkeypatch.setenv("COLUMNS", "200")
    module = import_module("moe_proxy.cli.stats")  # the package has a command of this name
    monkeypatch.setattr(module, "find_proxy", lambda settings: None)
    monkeypatch.setattr(module, "get_json", lambda proxy, path, **more: body | changes)
    assert run_main(monkeypatch, "stats") == 0
    printed: str = capsys.readouterr().out
    return printed


def test_stats_without_a_pager_say_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`stats` shows what really happened: without a pager nothing was counted, and no 0 stands for it."""
    printed = _stats(monkeypatch, capsys, pager=False)
    assert "expert pager  off" in printed
    assert "router map" not in printed
    assert "hit rate" not in printed


def test_stats_of_a_silent_engine_say_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An engine that does not answer leaves no silent gap in the report."""
    printed = _stats(monkeypatch, capsys)
    assert "not known" in printed
    assert "router map" in printed
    assert "hit rate" in printed


def test_stats_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """ "Inert but enabled" must be visible: a warning stands in the report, and so does what runs now."""
    running = {"id": "r", "path": "/api/chat", "domain": None, "seconds": 12.3, "tokens": 77}
    warning = {"level": "warn", "text": "the cache is on and inert [/b]"}
    printed = _stats(monkeypatch, capsys, remarks=[warning], in_flight=[running])
    assert "the cache is on and inert [/b]" in printed
    assert re.search(r"-\s+77\s+12\.3\s+-\s+/api/chat", printed)


def test_a_good_map_is_called_ok(monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path) -> None:
    """`map check` ends with one line of verdict; of a good map the exit code is 0."""
    assert run_main(monkeypatch, "map", "check", str(PLANTED_MAP)) == 0
    assert "planted-moe.json: ok" in capsys.readouterr().out.splitlines()[-1]
    assert run_main(monkeypatch, "map", "check", str(PLANTED_MAP), "--model", str(planted_model)) == 0
    assert "and this is its model" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("defect", ["no domains", "constant"])
def test_a_doubtful_map_is_called_so(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, defect: str
) -> None:
    """A map that nothing can be learned from is well formed and yet not ok: exit code 1, with the reason."""
    content = json.loads(PLANTED_MAP.read_text())
    if defect == "no domains":
        content["domains"] = {}
    else:
        for domain in content["domains"].values():
            for layer, row in domain["layers"].items():
                used = content["model"]["experts_used"]
                domain["layers"][layer] = [sum(row) // used] * used + [0] * (len(row) - used)
    path = tmp_path / "map.json"
    path.write_text(json.dumps(content))
    assert run_main(monkeypatch, "map", "check", str(path)) == 1
    *_, warning, verdict = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: ")
    assert "doubtful" in verdict


@pytest.mark.parametrize("command", ["status", "stop", "stats"])
def test_the_wrong_port_names_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, command: str
) -> None:
    """A message says what to do: where a proxy runs on another port, that port."""
    monkeypatch.setattr(import_module("moe_proxy.cli.serve"), "end_proxy", None)
    settings = Settings()
    me = RunningProxy(os.getpid(), start_time_s(os.getpid()), "http://127.0.0.1:4242", "m", "0")
    write_record(instance_paths(settings.runtime_dir, settings.state_dir, 4242), me)
    (settings.runtime_dir / "no-port").mkdir()
    assert run_main(monkeypatch, command, "--port", "4343") == 1
    said = capsys.readouterr().err
    assert "no proxy is running on port 4343, one is on port 4242: add --port 4242" in said


def test_collect_tries_its_output_first(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """An output that cannot be written is said before minutes of work, not after."""
    monkeypatch.setattr(import_module("moe_proxy.cli.maps"), "examined", None)  # nothing slow is reached
    assert run_main(monkeypatch, "collect", "--output", str(tmp_path)) == 1
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "convert"])
def test_a_domain_that_the_map_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, command: str
) -> None:
    """A domain that was asked for and is not there is refused, not left out in silence."""
    output = () if command == "show" else ("--to", "text", "--output", str(tmp_path / "out.txt"))
    assert run_main(monkeypatch, "map", command, str(PLANTED_MAP), "--domain", "bogus", *output) == 2
    assert "no domain 'bogus'" in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


def test_one_domain_of_a_map_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`map convert --domain` writes that domain alone, in our own form too."""
    path = tmp_path / "math.json"
    args = ("map", "convert", str(PLANTED_MAP), "--domain", "math", "--output", str(path))
    assert run_main(monkeypatch, *args) == 0
    assert list(json.loads(path.read_text())["domains"]) == ["math"]


def test_the_model_of_a_map_has_the_names_that_start_knows(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """`map convert --model` takes what `start --model` takes; `map show` names it for other forms."""
    monkeypatch.setenv("MOE_PROXY_CACHE_DIR", str(tmp_path))
    experts, output = tmp_path / "experts.txt", tmp_path / "map.json"
    experts.write_text("0 1 2\n1 0\n", encoding="utf-8")
    assert run_main(monkeypatch, "map", "show", str(experts)) == 2
    assert "map convert" in capsys.readouterr().err
    args = ("map", "convert", str(experts), "--model", "planted-moe", "--output", str(output))
    assert run_main(monkeypatch, *args) == 0
    assert json.loads(output.read_text())["model"]["experts"] == 32


def test_architectures_without_cuda(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An option that would do nothing is refused."""
    assert run_main(monkeypatch, "build", "--cuda-arch", "86") == 2
    assert "--cuda" in capsys.readouterr().err


def test_a_terminal_of_no_width(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """COLUMNS=0, as a terminal without a size says it, hides nothing."""
    monkeypatch.setenv("COLUMNS", "0")
    run_main(monkeypatch, "doctor", "--port", "0")
    assert "moe-proxy" in capsys.readouterr().out


@pytest.mark.parametrize("forced", [False, True])
def test_progress_is_plain_lines_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, forced: bool
) -> None:
    """Piped, progress is a line per tenth on standard error alone: no bar that moves, colours or not."""
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_report(Console(stderr=True)) as report:
        for part in (0.0, 0.05, 0.1, 1.0):
            report("prompts", part)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.sub(r"\x1b\[[0-9;]*m", "", printed.err) == "prompts 0 %\nprompts 10 %\nprompts 100 %\n"


@pytest.mark.parametrize(("writable", "level"), [(True, "warn"), (False, "fail")])
def test_doctor_promises_no_build_where_none_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, writable: bool, level: str
) -> None:
    """An engine that start would build is a warning; where the cache cannot be written it is a failure."""
    module = import_module("moe_proxy.cli.doctor")
    monkeypatch.setattr(module, "engine_for", lambda request: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/bin/{name}")
    asked: list[Path] = []
    monkeypatch.setattr(module.os, "access", lambda path, mode: asked.append(path) or writable)
    found = _findings(monkeypatch, capsys, Hardware(8 * 2**30, 4 * 2**30, 4, None, ()))
    assert found["engine"]["level"] == level
    assert asked == [Settings().cache_dir.parent]
