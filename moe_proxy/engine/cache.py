"""Owns the folder of finished engines: where each lies, its record, its lock, and which one serves a request.

It builds and fetches nothing. An engine that is there is never changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_proxy.engine.compatibility import capabilities_of, is_portable, refusal
from moe_proxy.engine.recipe import key_of
from moe_proxy.engine.source import Progress
from moe_proxy.files import write_text

RECORD = "build.json"
_GIVEN_UP_S = 24 * 3600
_PROBE_TIMEOUT_S = 60

Record = Mapping[str, object]


@dataclass(frozen=True)
class EngineBuild:
    """A finished engine in ``<cache>/engine/<key>/``."""

    key: str
    folder: Path
    server: Path
    log: Path
    stock: bool
    cuda: bool


def engines_folder(cache_dir: Path) -> Path:
    """Where engines are kept."""
    return cache_dir / "engine"


def engine_in(folder: Path, inputs: Mapping[str, object]) -> EngineBuild:
    """The engine of ``inputs`` in ``folder``, whether it is there or not."""
    return EngineBuild(
        key=key_of(inputs),
        folder=folder,
        server=folder / "bin" / "llama-server",
        log=folder / "build.log",
        stock=bool(inputs["stock"]),
        cuda=bool(inputs["cuda"]),
    )


def finished(cache_dir: Path, inputs: Mapping[str, object]) -> EngineBuild | None:
    """The engine of exactly these inputs, if it is there."""
    engine = engine_in(engines_folder(cache_dir) / key_of(inputs), inputs)
    return engine if (engine.folder / RECORD).is_file() and os.access(engine.server, os.X_OK) else None


def built_elsewhere(cache_dir: Path, inputs: Mapping[str, object]) -> EngineBuild | None:
    """The newest engine that agrees in all but the compiler: for a machine that has none."""
    return _newest(
        cache_dir, lambda record, built: {**built, "compiler": None} == {**inputs, "compiler": None}
    )


def made_to_travel(cache_dir: Path, inputs: Mapping[str, object], cpu: str) -> EngineBuild | None:
    """The newest engine that was imported, or built to run on other machines too, and serves here."""

    def serves(record: Record, built: Mapping[str, object]) -> bool:
        travels = bool(record.get("imported")) or is_portable(built)
        return travels and not refusal(built, inputs, cpu, capabilities_of(inputs))

    return _newest(cache_dir, serves)


def _newest(cache_dir: Path, suits: Callable[[Record, Mapping[str, object]], bool]) -> EngineBuild | None:
    found: list[tuple[int, EngineBuild]] = []
    for path in engines_folder(cache_dir).glob(f"*/{RECORD}"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            built = dict(record["inputs"])
            built_at_s = int(record["built_at_s"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if suits(record, built):
            engine = finished(cache_dir, built)
            if engine is not None:
                found.append((built_at_s, engine))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def install(
    staged: Path, cache_dir: Path, inputs: Mapping[str, object], more: Mapping[str, object]
) -> EngineBuild:
    """Let the folder ``staged`` appear under its key in one step, with its record. Its lock must be held."""
    final = engines_folder(cache_dir) / key_of(inputs)
    record = {"key": key_of(inputs), "inputs": inputs, **more}
    write_text(staged / RECORD, json.dumps(record, indent=2) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    staged.rename(final)
    return engine_in(final, inputs)


def fault_of(server: Path) -> str:
    """What a llama-server says that cannot run here; "" for one that runs."""
    try:
        done = subprocess.run(
            [server, "--list-devices"],
            env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0 and done.stdout:
        return ""
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return said[0] if said else f"it ended with code {done.returncode} and said nothing"


def lock_of(cache_dir: Path, key: str) -> Path:
    """The file that is held while the engine ``key`` is made."""
    return engines_folder(cache_dir) / f".lock-{key}"


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold ``path`` against other processes. The file stays: removing it would let two hold it at once."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("wait", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sweep(cache_dir: Path) -> None:
    """Remove work folders of builds that were given up: a day old, and nobody holds their lock."""
    for work in engines_folder(cache_dir).glob(".work-*"):
        if time.time() - work.stat().st_mtime < _GIVEN_UP_S:
            continue
        with lock_of(cache_dir, work.name.removeprefix(".work-")).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(work, ignore_errors=True)
