"""scripts/install.sh: what it says, refuses and takes back. The walk through README runs it in earnest."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install.sh"


def _install(home: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    return subprocess.run([SCRIPT, *args], env=env, capture_output=True, text=True, check=False)


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _installed(home: Path) -> None:
    """What an installation with the service consists of, as far as --uninstall is concerned."""
    venv = home / ".local/share/moe-proxy/venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "made-by-install.sh").touch()
    (home / ".local/bin").mkdir()
    (home / ".local/bin/moe-proxy").symlink_to(venv / "bin/moe-proxy")
    unit = home / ".config/systemd/user/moe-proxy.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(f'# Written by scripts/install.sh\nExecStart="{home}/.local/bin/moe-proxy" start\n')


def test_a_dry_run_says_it_and_does_nothing(tmp_path: Path) -> None:
    """It says what it will do before it does it; with --dry-run it stops there."""
    done = _install(tmp_path, "--dry-run", "--service")
    assert done.returncode == 0, done.stderr
    for named in ("share/moe-proxy/venv", "bin/moe-proxy", "systemd/user/moe-proxy.service", "PyPI"):
        assert named in done.stdout
    assert _tree(tmp_path) == set()


@pytest.mark.parametrize("foreign", ["share/moe-proxy/venv/pyvenv.cfg", "bin/moe-proxy"])
def test_what_is_not_ours_is_not_touched(tmp_path: Path, foreign: str) -> None:
    """A folder or a command that somebody else put there is refused before anything is done, and stays."""
    path = tmp_path / ".local" / foreign
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = _tree(tmp_path)
    done = _install(tmp_path)
    assert done.returncode == 1
    assert "move it away" in done.stderr
    assert _install(tmp_path, "--uninstall").returncode == 0
    assert path.read_text() == "mine"
    assert _tree(tmp_path) == before


def test_uninstall_takes_back_what_was_installed_and_nothing_else(tmp_path: Path) -> None:
    """--uninstall removes venv, link, unit; models, settings, other programs stay; again, it does nothing."""
    _installed(tmp_path)
    others = {".local/share/moe-proxy/models/m.gguf", ".local/bin/other", ".config/moe-proxy/config.toml"}
    for kept in others:
        (tmp_path / kept).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / kept).touch()
    said = _install(tmp_path, "--uninstall", "--dry-run").stdout
    for named in ("share/moe-proxy/venv", "bin/moe-proxy", "moe-proxy.service"):
        assert named in said
    done = _install(tmp_path, "--uninstall")
    assert done.returncode == 0, done.stderr
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    assert files == others
    assert "nothing" in _install(tmp_path, "--uninstall").stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--bogus",), "--bogus"),
        (("--prefix",), "--prefix"),
        (("--prefix", "a\nb"), "line break"),
        (("--service", "--uninstall"), "contradict"),
    ],
)
def test_a_wrong_call_is_refused(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    """A wrong option: one line that names it, exit code 2, nothing done."""
    done = _install(tmp_path, *args)
    assert done.returncode == 2
    assert said in done.stderr
    assert _tree(tmp_path) == set()


def test_a_python_that_will_not_do_is_named(tmp_path: Path) -> None:
    """No Python, or one that is too old: said with what to do."""
    assert "no-such-python" in _install(tmp_path, PYTHON="no-such-python").stderr
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\ncase $1 in --version) echo Python 3.8.0 ;; *) exit 1 ;; esac\n")
    old.chmod(0o755)
    done = _install(tmp_path, PYTHON=str(old))
    assert done.returncode == 1
    assert "Python 3.8.0 is too old" in done.stderr


def test_it_is_plain_sh() -> None:
    """POSIX sh, so that it runs where there is no bash: none of the usual bashisms."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/sh\n")
    assert re.findall(r"\[\[|\bfunction\b|\blocal\b \w|<<<|\$'|&>|^\s*source ", text, re.MULTILINE) == []
