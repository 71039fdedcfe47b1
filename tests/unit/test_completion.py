"""Completion in a shell: what it is told, and what it then asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import run_main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any, shell: str) -> None:
    """Shell completion for bash, zsh, fish: a script that asks our command in that shell's form."""
    assert run_main(monkeypatch, "completion", shell) == 0
    printed = capsys.readouterr().out
    assert f"_MOE_PROXY_COMPLETE={shell}_complete" in printed
    assert "%(" not in printed


def test_another_shell_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A shell that nothing is known of is refused with those that are."""
    assert run_main(monkeypatch, "completion", "tcsh") == 2
    assert "'bash', 'fish', 'zsh'" in capsys.readouterr().err


def test_no_shell_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A missing argument: one line that says what may stand there."""
    assert run_main(monkeypatch, "completion") == 2
    printed = capsys.readouterr().err
    assert "'SHELL'. Choose from: bash, fish, zsh" in printed
    assert printed.count("\n") == 1


def test_bash_completes(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """In a real bash: `moe-proxy star` becomes `moe-proxy start`, and an option is found by its beginning."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    run_main(monkeypatch, "completion", "bash")
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    command = tmp_path / "moe-proxy"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moe_proxy "$@"\n')
    command.chmod(0o755)
    script = (
        "source ./completion\n"
        'ask() { COMP_WORDS=(moe-proxy "$@"); COMP_CWORD=$#; COMPREPLY=(); _moe_proxy_completion moe-proxy;'
        ' echo "${COMPREPLY[*]}"; }\n'
        "ask star\nask start --vram\n"
    )
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["start", "--vram-budget"], done.stderr
