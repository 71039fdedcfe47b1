"""Owns what a run leaves on disk, its record and its socket, and how the next run deals with them.

A process is only ever ended when its pid *and* its start time are those of the record.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_proxy.engine.process import signal_group, start_time_of
from moe_proxy.errors import EngineStartError
from moe_proxy.files import write_text

_log = logging.getLogger(__name__)

_POLL_S = 0.02
_KILL_WAIT_S = 5.0
_CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class EngineRecord:
    """Who runs: the child and the process that supervises it, each by pid and start time."""

    pid: int
    start_time: int | None
    owner_pid: int
    owner_start_time: int | None

    @classmethod
    def of(cls, pid: int, start_time: int | None) -> EngineRecord:
        """The record of a child of this process."""
        return cls(pid, start_time, os.getpid(), start_time_of(os.getpid()))

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        write_text(path, json.dumps(asdict(self)) + "\n")


def read_record(path: Path) -> EngineRecord | None:
    """The record in ``path``; None when there is none that can be read."""
    try:
        record = EngineRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return record if isinstance(record.pid, int) and record.pid > 1 else None


def clear_the_way(record_path: Path, socket_path: Path, grace_s: float) -> None:
    """End the child that an earlier run left behind and remove its socket. Blocks up to the grace.

    Raises EngineStartError when a living process of somebody else is in the way.
    """
    record = read_record(record_path)
    if record is not None and _lives(record.pid, record.start_time):
        if record.owner_pid != os.getpid() and _lives(record.owner_pid, record.owner_start_time):
            raise EngineStartError(
                f"another moe-proxy (pid {record.owner_pid}) runs a llama-server (pid {record.pid}) here",
                "stop it with moe-proxy stop, or use another port",
            )
        _log.warning("ending llama-server (pid %d) that an earlier run left behind", record.pid)
        _end(record, grace_s)
    record_path.unlink(missing_ok=True)
    _remove_socket(socket_path)


def _lives(pid: int, start_time: int | None) -> bool:
    return start_time is not None and start_time_of(pid) == start_time


def _end(record: EngineRecord, grace_s: float) -> None:
    # It is nobody's child here, so its end can only be polled for.
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        deadline = time.monotonic() + wait_s
        if _lives(record.pid, record.start_time):
            signal_group(record.pid, number)
        while _lives(record.pid, record.start_time) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    if _lives(record.pid, record.start_time):
        raise EngineStartError(
            f"llama-server (pid {record.pid}) of an earlier run does not end", f"kill -9 {record.pid}"
        )


def _remove_socket(path: Path) -> None:
    """Remove a socket file that nobody listens on."""
    if not path.exists():
        return
    if not path.is_socket():
        raise EngineStartError(f"{path} is in the way and is no socket", "remove it")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise EngineStartError(f"cannot tell who listens on {path}: {error}", "remove it") from error
    raise EngineStartError(
        f"another process listens on {path}", "stop it, or set MOE_PROXY_RUNTIME_DIR to another folder"
    )
