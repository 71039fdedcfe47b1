"""Owns where one instance (one port) keeps its files, and who it is that runs there.

It never starts, stops or talks to anything.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from moe_proxy.errors import ConfigError
from moe_proxy.files import write_text

# A Unix socket's path must fit into sockaddr_un.sun_path, 108 bytes with its final zero on Linux.
_SOCKET_PATH_BYTES = 107
_PORT = re.compile("[1-9][0-9]{0,4}")


@dataclass(frozen=True)
class InstancePaths:
    """The files of the instance on ``port``."""

    port: int
    runtime: Path
    state: Path

    @property
    def socket(self) -> Path:
        """The Unix socket between proxy and engine."""
        return self.runtime / "engine.sock"

    @property
    def record(self) -> Path:
        """Who runs here; see RunningProxy."""
        return self.runtime / "proxy.json"

    @property
    def lock(self) -> Path:
        """Held by the proxy that starts or runs here; see claimed."""
        return self.runtime / "lock"

    @property
    def engine_log(self) -> Path:
        """What llama-server prints."""
        return self.state / "engine.log"

    @property
    def proxy_log(self) -> Path:
        """What a detached proxy prints."""
        return self.state / "proxy.log"

    def prepare(self) -> None:
        """Make the folders, the runtime one for this user alone. Raises ConfigError."""
        if len(str(self.socket).encode()) > _SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {self.socket} is longer than {_SOCKET_PATH_BYTES} bytes",
                "set MOE_PROXY_RUNTIME_DIR to a shorter folder",
            )
        try:
            self.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.runtime.chmod(0o700)
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot use {error.filename}: {error.strerror}",
                "set MOE_PROXY_RUNTIME_DIR and MOE_PROXY_STATE_DIR to folders you may write",
            ) from error


def instance_paths(runtime_dir: Path, state_dir: Path, port: int) -> InstancePaths:
    """Paths of the instance on ``port``."""
    return InstancePaths(port, runtime_dir / str(port), state_dir / str(port))


@contextmanager
def claimed(paths: InstancePaths) -> Iterator[None]:
    """Have the instance for this process alone, from before its engine starts until that has ended.

    The port alone is no guard: it is taken late. Raises ConfigError when another proxy has it.
    """
    while True:
        with paths.lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another proxy is starting, running or ending on port {paths.port}",
                    f"wait for it, stop it with moe-proxy stop --port {paths.port}, or choose another --port",
                ) from error
            # Whoever had it may have removed the file between our opening and our locking it.
            if not _names(paths.lock, file.fileno()):
                continue
            try:
                yield
            finally:
                paths.lock.unlink(missing_ok=True)
            return


def _names(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def running_ports(runtime_dir: Path, state_dir: Path) -> tuple[int, ...]:
    """The ports on which proxies run whose files lie in these folders, sorted."""
    try:
        names = [entry.name for entry in runtime_dir.iterdir()]
    except OSError:
        return ()
    ports = sorted(int(name) for name in names if _PORT.fullmatch(name))
    return tuple(port for port in ports if running_proxy(instance_paths(runtime_dir, state_dir, port)))


@dataclass(frozen=True)
class RunningProxy:
    """A proxy process. ``start_time_s`` tells it from a later process with the same pid."""

    pid: int
    start_time_s: float
    url: str
    model: str
    version: str


def start_time_s(pid: int) -> float:
    """Start time of a process in seconds since the epoch. Raises psutil.NoSuchProcess."""
    return psutil.Process(pid).create_time()


def write_record(paths: InstancePaths, proxy: RunningProxy) -> None:
    """Say who runs here."""
    write_text(paths.record, json.dumps(asdict(proxy)))


def running_proxy(paths: InstancePaths) -> RunningProxy | None:
    """The proxy that runs here, or None; a record left by a dead process counts as none."""
    try:
        proxy = RunningProxy(**json.loads(paths.record.read_text(encoding="utf-8")))
        return proxy if runs(proxy) else None
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, psutil.Error):
        return None


def runs(proxy: RunningProxy) -> bool:
    """Whether the process lives; one that has ended does not, also where nobody takes note (a zombie)."""
    try:
        process = psutil.Process(proxy.pid)
        same = abs(process.create_time() - proxy.start_time_s) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
