"""What a child prints: a rotating file and a bounded ring."""

from __future__ import annotations

import threading
from pathlib import Path

from moe_proxy.engine.child_log import ChildLog


def log_in(folder: Path, **limits: int) -> ChildLog:
    """A log of generous limits, but for those given."""
    return ChildLog(folder / "e.log", **{"limit_bytes": 1 << 20, "files": 3, **limits})


def test_the_log_rotates_and_keeps_so_many_files(tmp_path: Path) -> None:
    """The log never outgrows its limit, and no more generations are kept than asked for."""
    log = log_in(tmp_path, limit_bytes=100, files=3)
    for number in range(50):
        log.write(f"{number:019d}\n".encode())
    log.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["e.log", "e.log.1", "e.log.2"]
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    assert (tmp_path / "e.log").read_text().endswith("49\n")


def test_the_ring_is_bounded_in_lines_and_in_their_length(tmp_path: Path) -> None:
    """An endless line costs no memory, and text cut anywhere comes out whole."""
    log = log_in(tmp_path, ring_lines=3, line_bytes=10)
    for _ in range(1000):
        log.write(b"x" * 1000)
    assert log.tail(5) == ["x" * 10 + " …"]
    log.write(b"\nca")
    log.write("fé\r\nthree\nfour".encode()[:-2])
    assert log.tail(2) == ["three", "fo"]
    log.end_line()
    assert log.tail(9) == ["café", "three", "fo"]
    log.close()


def test_reopen_follows_a_rotation_by_others(tmp_path: Path) -> None:
    """SIGHUP: after the file was renamed away, reopen makes a new one under the old name."""
    log = log_in(tmp_path)
    log.write(b"old\n")
    (tmp_path / "e.log").rename(tmp_path / "rotated")
    log.write(b"still old\n")
    log.reopen()
    log.write(b"new\n")
    log.close()
    assert (tmp_path / "rotated").read_text() == "old\nstill old\n"
    assert (tmp_path / "e.log").read_text() == "new\n"


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """A broken disk costs the file, not the child and not the last lines."""
    (tmp_path / "file").write_text("")
    log = ChildLog(tmp_path / "file" / "e.log", limit_bytes=100, files=2)
    log.write(b"kept\n")
    assert log.tail(1) == ["kept"]
    log.close()


def test_a_disk_that_hangs_stops_no_reader(tmp_path: Path) -> None:
    """The ring, reopen and close never wait for a write that does not end."""
    log = log_in(tmp_path)
    log.write(b"before\n")
    with log._file_lock:
        writer = threading.Thread(target=log.write, args=(b"during\n",))
        writer.start()
        while log.tail(1) != ["during"]:
            pass
        log.reopen()
        log.close()
    writer.join()
    assert (tmp_path / "e.log").read_text() == "before\nduring\n"
    log.close()
