"""``moe-proxy build`` with archives, as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_proxy.engine.build import EngineBuild
from tests.support.command_line import run_main
from tests.support.proxy_process import run_cli

ZEROS = "0" * 64


@pytest.mark.usefixtures("own_folders")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--import", "x.tar.gz"), "--sha256"),
        (("--sha256", ZEROS), "--import"),
        (("--import", "x.tar.gz", "--sha256", ZEROS, "--cuda"), "builds nothing"),
        (("--import", "x.tar.gz", "--sha256", ZEROS, "--export", "y"), "builds nothing"),
        (("--import", "x.tar.gz", "--sha256", "short"), "'short' is no SHA-256"),
        (("--cuda-arch", "all"), "--cuda"),
    ],
)
def test_wrong_calls(monkeypatch: pytest.MonkeyPatch, capsys: Any, args: tuple[str, ...], said: str) -> None:
    """Options that contradict each other, or lack each other: one line that says which, exit code 2."""
    assert run_main(monkeypatch, "build", *args) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


@pytest.mark.usefixtures("own_folders")
def test_an_archive_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """A file that is not there is named, without a traceback."""
    assert run_main(monkeypatch, "build", "--import", str(tmp_path / "none.tar.gz"), "--sha256", ZEROS) == 1
    assert "none.tar.gz: No such file" in capsys.readouterr().err


@pytest.mark.engine
def test_a_real_engine_travels(proxy_env: dict[str, str], engine: EngineBuild, tmp_path: Path) -> None:
    """The real engine, packed and taken into another cache, is the one that build finds there."""
    path = tmp_path / "engine.tar.gz"
    packed = run_cli(proxy_env, "build", "--native", "--export", str(path), "--json")
    assert packed.returncode == 0, packed.stderr
    sha256 = json.loads(packed.stdout)["sha256"]
    env = proxy_env | {"MOE_PROXY_CACHE_DIR": str(tmp_path / "cache")}
    taken = run_cli(env, "build", "--import", str(path), "--sha256", sha256, "--json")
    assert taken.returncode == 0, taken.stderr
    assert json.loads(taken.stdout)["key"] == engine.key
    found = run_cli(env, "build")
    assert found.stdout.strip() == str(tmp_path / "cache" / "engine" / engine.key / "bin" / "llama-server")
