"""Owns one run of llama-server: from its start to the moment when nothing of it is left.

It never decides to start or stop: the supervisor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_proxy.engine.child_log import ChildLog, Drain
from moe_proxy.engine.process import describe_exit, dying_with_us, signal_group, start_time_of
from moe_proxy.errors import EngineStartError

_DRAIN_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Launch:
    """How to start llama-server: argv, its whole environment, and the socket that it will listen on."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    socket: Path


class Child:
    """A running llama-server, leader of its own process group."""

    def __init__(self, launch: Launch, log: ChildLog, on_exit: Callable[[], None]) -> None:
        """Start it. Raises EngineStartError. ``on_exit`` is called in the event loop.

        Must run in the thread of the event loop: the kernel ends the child when the thread that started it
        ends.
        """
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                dying_with_us(launch.argv),
                env=dict(launch.env),
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
                umask=0o077,  # the socket is for this user alone
            )
        except OSError as error:
            os.close(read_end)
            raise EngineStartError(f"cannot start {launch.argv[0]}: {error.strerror}") from error
        finally:
            os.close(write_end)
        self.pid = self._process.pid
        self.start_time = start_time_of(self.pid)
        self._drain = Drain(read_end, log)
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._on_exit = on_exit
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()

    @property
    def running(self) -> bool:
        """False as soon as the event loop knows that it has ended."""
        return not self._exited.is_set()

    def terminate(self) -> None:
        """SIGTERM to it and to all that it started."""
        signal_group(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to it and to all that it started."""
        signal_group(self.pid, signal.SIGKILL)

    async def close(self) -> str:
        """Kill what is left of the group, wait for the child and its output; say how it ended."""
        self.kill()
        await self._exited.wait()
        return_code = self._process.wait()
        await self._drain.finish(_DRAIN_TIMEOUT_S)
        return describe_exit(return_code)

    def _wait(self) -> None:
        # WNOWAIT leaves a zombie: until it is reaped its pid, and so its group, cannot be anybody else's.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._note_exit)

    def _note_exit(self) -> None:
        self._exited.set()
        self._on_exit()
