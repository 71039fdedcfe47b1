"""Owns what a child prints: a thread drains its pipe into a rotating file and a ring of last lines.

A thread of its own, because then neither can stop the other: a busy event loop never fills the pipe and halts
the child, and a disk that hangs never halts the event loop. Memory is bounded whatever the child prints. It
never interprets a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import selectors
import threading
from collections import deque
from io import FileIO
from pathlib import Path

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 64 * 1024
# What may still be read from a pipe whose owner is gone, should somebody else go on writing into it.
_LAST_BLOCKS = 64
_END, _NOTHING_YET = 0, -1
_MODE = 0o600  # a verbose llama-server prints prompts


class ChildLog:
    """A file of at most ``limit_bytes``, ``files`` generations of it (the present one included), and a ring.

    Safe to use from several threads. A file that cannot be written is reported once and given up until
    ``reopen``; the ring works on.
    """

    def __init__(
        self, path: Path, *, limit_bytes: int, files: int, ring_lines: int = 200, line_bytes: int = 8192
    ) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._files = max(1, files)
        self._line_bytes = line_bytes
        self._ring: deque[str] = deque(maxlen=ring_lines)
        self._partial = bytearray()
        # Two locks, so that whoever reads the ring never waits for the disk.
        self._ring_lock = threading.Lock()
        self._file_lock = threading.Lock()
        self._file: FileIO | None = None
        self._size_bytes = 0
        self._reopen = False
        self._open()

    def write(self, data: bytes) -> None:
        """Take a piece of output; it may end anywhere. Waits for the disk."""
        with self._ring_lock:
            self._keep(data)
        with self._file_lock:
            self._append(data)

    def end_line(self) -> None:
        """Finish a line that the child left open when it died. Waits for the disk."""
        with self._ring_lock:
            unfinished = bool(self._partial)
            if unfinished:
                self._finish_line()
        if unfinished:
            with self._file_lock:
                self._append(b"\n")

    def tail(self, count: int) -> list[str]:
        """The last ``count`` lines, oldest first, an unfinished one included; each of bounded length."""
        with self._ring_lock:
            lines = list(self._ring)
            if self._partial:
                lines.append(self._text())
        return lines[-count:] if count > 0 else []

    def reopen(self) -> None:
        """Have the next output go to a new file of this name, after others have renamed the present one."""
        self._reopen = True

    def close(self) -> None:
        """Close the file; the ring stays readable. A file that somebody is stuck in is left to him."""
        if self._file_lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._file_lock.release()

    def _keep(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._extend(line)
            self._finish_line()
        self._extend(rest)

    def _extend(self, data: bytes) -> None:
        # One byte over the limit is kept as the sign that something was cut.
        room = self._line_bytes + 1 - len(self._partial)
        self._partial += data[: max(0, room)]

    def _finish_line(self) -> None:
        self._ring.append(self._text())
        self._partial.clear()

    def _text(self) -> str:
        cut = len(self._partial) > self._line_bytes
        text = self._partial[: self._line_bytes].decode("utf-8", "replace").rstrip("\r")
        return text + " …" if cut else text

    def _append(self, data: bytes) -> None:
        if self._reopen:
            self._reopen = False
            self._close()
            self._open()
        if self._file is None:
            return
        try:
            if self._size_bytes and self._size_bytes + len(data) > self._limit_bytes:
                self._rotate()
            view = memoryview(data)
            while view and self._file is not None:
                written = self._file.write(view)
                self._size_bytes += written
                view = view[written:]
        except OSError as error:
            self._give_up(error)

    def _rotate(self) -> None:
        self._close()
        for number in range(self._files - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if newer.exists():
                newer.replace(older)
        if self._files == 1:
            self._path.unlink(missing_ok=True)
        self._open()

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = FileIO(os.open(self._path, flags, _MODE), "ab")
            self._size_bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            self._give_up(error)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        _log.warning("the engine's log %s cannot be written: %s", self._path, error)
        try:
            self._close()
        except OSError:
            self._file = None


class Drain:
    """Reads a pipe's read end, which it owns and closes, into a ChildLog until the writers are gone."""

    def __init__(self, descriptor: int, log: ChildLog) -> None:
        self._descriptor = descriptor
        self._log = log
        self._wake_read, self._wake_write = os.pipe()
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        os.set_blocking(descriptor, False)
        self._thread = threading.Thread(target=self._run, name="engine-log", daemon=True)
        self._thread.start()

    async def finish(self, timeout_s: float) -> None:
        """Take what the pipe still holds, and end the thread even if somebody keeps the pipe open."""
        os.write(self._wake_write, b"x")
        try:
            await asyncio.wait_for(self._done.wait(), timeout_s)
        except asyncio.TimeoutError:
            _log.warning("the engine's log could not be written within %g s", timeout_s)
            return
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._descriptor, selectors.EVENT_READ)
                selector.register(self._wake_read, selectors.EVENT_READ)
                while self._wake_read not in {key.fd for key, _ in selector.select()}:
                    if self._read() == _END:
                        return
            for _ in range(_LAST_BLOCKS):
                if self._read() in (_END, _NOTHING_YET):
                    return
        finally:
            os.close(self._descriptor)
            self._log.end_line()
            # The loop is closed when the interpreter ends in a hurry; then nobody waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._done.set)

    def _read(self) -> int:
        """Take one block; give its size, or why there is none."""
        try:
            data = os.read(self._descriptor, _BLOCK_BYTES)
        except BlockingIOError:
            return _NOTHING_YET
        if data:
            self._log.write(data)
        return len(data)
