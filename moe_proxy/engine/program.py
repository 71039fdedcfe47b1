"""Owns running one build program to its end: its output goes to a log, and it ends when we do.

It never decides what to run, and never retries.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_proxy.engine.process import dying_with_us, signal_group

_TAIL_LINES = 400
_LINE_BYTES = 64 * 1024
_GRACE_S = 5.0

OnLine = Callable[[str], None]


def _ignore(_line: str) -> None:
    """What to do with a line when nobody asked."""


def run_logged(
    argv: Sequence[str | Path],
    *,
    folder: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
    on_line: OnLine = _ignore,
) -> tuple[int, list[str]]:
    """Run ``argv`` in ``folder``, append all it prints to ``log``; give its exit code and its last lines.

    Any exception on the way (Ctrl-C, for one) first ends the program and all it started. If this process is
    killed, the program gets SIGTERM from the kernel, on which ninja ends its compilers. Raises OSError when
    the log cannot be written.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with log.open("ab") as sink:
        sink.write(f"\n$ {' '.join(str(argument) for argument in argv)}\n".encode())
        sink.flush()
        process = subprocess.Popen(
            dying_with_us(argv, signal.SIGTERM),
            cwd=folder,
            env=dict(os.environ if environment is None else environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(_LINE_BYTES):
                sink.write(line)
                sink.flush()
                text = line.decode("utf-8", "replace").rstrip()
                tail.append(text)
                on_line(text)
            return_code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            process.stdout.close()
    return return_code, list(tail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """TERM to the whole group, and KILL to what is left of it after a grace."""
    signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
