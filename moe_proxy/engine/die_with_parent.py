"""Owns that a child never outlives its parent. It is run as a program and imports nothing of ours.

``python -I -S die_with_parent.py SIGNAL PARENT_PID PROGRAM [ARGS...]`` asks the kernel to send SIGNAL to this
process when its parent dies, then becomes PROGRAM: the pid stays the same. PROGRAM must be a path.

The kernel watches the *thread* that forked, so the parent must start this from a thread that lives as long
as the child should. A parent that died before the request was made is noticed by its pid. On systems without
prctl only that check is made.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Arm the death signal and replace this process; exit 126 without a parent, 127 if PROGRAM cannot run."""
    death_signal, parent_pid, program = int(argv[0]), int(argv[1]), argv[2:]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(126)
    # Python ignores these two; what is ignored would stay ignored in PROGRAM.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execv(program[0], program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot run {program[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
