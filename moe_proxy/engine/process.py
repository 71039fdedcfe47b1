"""Owns how a child process is started so that it dies with us, and how a process is recognised later.

It never restarts anything and knows nothing of llama-server.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_WRAPPER = Path(__file__).with_name("die_with_parent.py")


def dying_with_us(argv: Sequence[str | Path], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Argv that runs ``argv`` and has it sent ``death_signal`` when the calling *thread* ends.

    Start it from the thread that calls this. ``argv[0]`` must be a path.
    """
    wrapper = [sys.executable, "-I", "-S", str(_WRAPPER), str(int(death_signal)), str(os.getpid())]
    return [*wrapper, *(str(argument) for argument in argv)]


def start_time_of(pid: int) -> int | None:
    """Start of process ``pid`` in clock ticks since boot; None when there is none, or only a zombie.

    Together with the pid it names a process: a recycled pid has another start time.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses; fields count from the last one.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def resident_bytes(pid: int) -> int:
    """Memory of process ``pid`` that is in RAM, files it has mapped included; 0 when there is none."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send ``number`` to the process group led by ``pid``; a group that is gone is no error."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def describe_exit(return_code: int) -> str:
    """``exited with code 1`` or ``was killed by SIGSEGV``, from a ``subprocess`` return code."""
    if return_code >= 0:
        return f"exited with code {return_code}"
    try:
        return f"was killed by {signal.Signals(-return_code).name}"
    except ValueError:
        return f"was killed by signal {-return_code}"
