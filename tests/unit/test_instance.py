"""Who runs on a port, and files that are never half-written."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from moe_proxy.cli.serve import end_proxy
from moe_proxy.errors import ConfigError
from moe_proxy.files import check_writable, replacing, write_text
from moe_proxy.instance import (
    RunningProxy,
    claimed,
    instance_paths,
    running_proxy,
    start_time_s,
    write_record,
)


def _self() -> RunningProxy:
    return RunningProxy(os.getpid(), start_time_s(os.getpid()), "http://127.0.0.1:1", "m", "0")


def test_a_living_proxy_is_found(tmp_path: Path) -> None:
    """A record of a living process is believed."""
    paths = instance_paths(tmp_path / "run", tmp_path / "state", 1)
    assert running_proxy(paths) is None
    paths.prepare()
    write_record(paths, _self())
    assert running_proxy(paths) == _self()


def test_a_recycled_pid_is_not(tmp_path: Path) -> None:
    """A pid that belongs to a later process is no proxy of ours."""
    paths = instance_paths(tmp_path / "run", tmp_path / "state", 1)
    write_record(paths, replace(_self(), start_time_s=1.0))
    assert running_proxy(paths) is None


def test_a_zombie_is_not(tmp_path: Path) -> None:
    """A proxy that has ended runs no more, also where its parent does not take note of it."""
    paths = instance_paths(tmp_path / "run", tmp_path / "state", 1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        proxy = replace(_self(), pid=child.pid, start_time_s=start_time_s(child.pid))
        write_record(paths, proxy)
        assert running_proxy(paths) == proxy
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
        assert running_proxy(paths) is None
        end_proxy(proxy, 0.0, now=False)


@pytest.mark.parametrize(
    "text",
    [
        '{"pid": ',
        "null",
        "[" * 100_000,
        '{"pid": 1e400, "start_time_s": 1, "url": "", "model": "", "version": ""}',
        '{"pid": 99999999999999999999, "start_time_s": 1, "url": "", "model": "", "version": ""}',
    ],
)
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    """A record that cannot be read counts as none."""
    paths = instance_paths(tmp_path / "run", tmp_path / "state", 1)
    write_text(paths.record, text)
    assert running_proxy(paths) is None


def test_the_runtime_folder_is_private(tmp_path: Path) -> None:
    """The folder of the socket has mode 0700."""
    paths = instance_paths(tmp_path / "run", tmp_path / "state", 1)
    paths.prepare()
    assert stat.S_IMODE(paths.runtime.stat().st_mode) == 0o700


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """A Unix socket's path must fit; said at once with what to do."""
    with pytest.raises(ConfigError, match="MOE_PROXY_RUNTIME_DIR"):
        instance_paths(tmp_path / ("x" * 100), tmp_path, 1).prepare()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """Files are written to a temporary name and renamed: a failure leaves what was there, and no litter."""
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_one_proxy_has_an_instance(tmp_path: Path) -> None:
    """Of two starts at once one is refused before it touches the other's engine; later it may."""
    paths = instance_paths(tmp_path / "run", tmp_path / "state", 7)
    paths.prepare()
    with claimed(paths), pytest.raises(ConfigError, match=r"on port 7: .*--port"), claimed(paths):
        pass
    with claimed(paths):
        assert paths.lock.exists()
    assert list(paths.runtime.iterdir()) == []


def test_a_lock_that_was_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a file that has no name any more would keep nobody out."""
    paths = instance_paths(tmp_path / "run", tmp_path / "state", 7)
    paths.prepare()
    flock = fcntl.flock

    def too_late(file: IO[bytes], how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        paths.lock.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with claimed(paths), pytest.raises(ConfigError), claimed(paths):
        pass


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """An error names the file that was asked for, not a temporary one, also where the system names none."""
    path = tmp_path / "file"
    with pytest.raises(OSError, match="No space left") as full, replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == str(path)
    with pytest.raises(IsADirectoryError) as folder:
        write_text(tmp_path, "x")
    assert folder.value.filename == str(tmp_path)


def test_writing_can_be_tried(tmp_path: Path) -> None:
    """Before long work its output is tried: what is there stays, nothing is left, what cannot be is said."""
    path = tmp_path / "file"
    write_text(path, "old")
    check_writable(path)
    assert path.read_text() == "old"
    check_writable(tmp_path / "new")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="file"):
        check_writable(path / "below")
