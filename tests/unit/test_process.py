"""How a child process is started so that it dies with us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from moe_proxy.engine.process import describe_exit, dying_with_us, start_time_of


def test_a_parent_that_is_already_gone_is_noticed(tmp_path: Path) -> None:
    """A child whose parent died before the death signal was armed does not start its program."""
    proof = tmp_path / "proof"
    argv = dying_with_us([sys.executable, "-c", f"open({str(proof)!r}, 'w')"])
    argv[argv.index(str(os.getpid()))] = "1"
    assert subprocess.run(argv, check=False).returncode == 126
    assert not proof.exists()


def test_the_wrapped_program_keeps_pid_arguments_and_default_signals() -> None:
    """die_with_parent becomes its program: same pid, same argv, SIGPIPE not ignored."""
    argv = dying_with_us(["/bin/sh", "-c", 'echo "$$ $1"; grep SigIgn /proc/self/status', "sh", "a b"])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = process.stdout.read().splitlines()
    assert first == f"{process.pid} a b"
    assert int(second.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_a_process_is_named_by_its_start_time() -> None:
    """A living process has a start time; a zombie and a pid that is nobody's have none."""
    assert start_time_of(os.getpid()) == start_time_of(os.getpid()) is not None
    with subprocess.Popen(["/bin/true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_time_of(process.pid) is None
    assert start_time_of(2**22 + 1) is None


def test_an_exit_is_said_in_words() -> None:
    """Codes and signals by name."""
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(-99) == "was killed by signal 99"
