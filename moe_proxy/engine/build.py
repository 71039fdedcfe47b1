"""Owns the engine's build: the steps from source to a finished llama-server.

A finished engine is a folder that appears at once and is never changed after. It never serves with one.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from moe_proxy.engine.cache import (
    EngineBuild,
    built_elsewhere,
    engines_folder,
    fault_of,
    finished,
    install,
    lock_of,
    locked,
    made_to_travel,
    sweep,
)
from moe_proxy.engine.program import run_logged
from moe_proxy.engine.recipe import BuildRequest, definitions, inputs_of, key_of, program_definitions
from moe_proxy.engine.source import Progress, read_pin
from moe_proxy.engine.toolchain import Toolchain, check_disk, find_toolchain, this_cpu
from moe_proxy.engine.tree import prepare_tree
from moe_proxy.errors import BuildError, ConfigError
from moe_proxy.resources import data_path

_CPU_BYTES, _CUDA_BYTES = 500_000_000, 5_000_000_000
_ERROR_LINES = 15
_LONG_LINE = 400
_NINJA_STEP = re.compile(r"^\[(\d+)/(\d+)\] ")


def engine_for(request: BuildRequest) -> EngineBuild | None:
    """The engine of ``request`` if it is already there, without network and in well under a second.

    Its own build comes first, then one that was imported or built to travel. A machine without a compiler (a
    container whose engine was built in another) gets the newest engine that agrees in all else. Raises
    BuildError when the request itself cannot be.
    """
    inputs = inputs_of(request)
    try:
        compiler = find_toolchain(request.cuda).compiler_version
    except BuildError:
        own = built_elsewhere(request.cache_dir, inputs)
    else:
        own = finished(request.cache_dir, {**inputs, "compiler": compiler})
    return own or made_to_travel(request.cache_dir, inputs, this_cpu())


def check_server(path: Path) -> Path:
    """``path``, a llama-server that somebody named. Raises ConfigError when it is no program."""
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(
            f"{path} is not an executable file", "name a llama-server as the engine, or none at all"
        )
    return path


def build_engine(request: BuildRequest, progress: Progress) -> EngineBuild:
    """Build the engine of ``request``, or give the one that is there.

    ``progress(stage, fraction)`` is called with the stages wait, download, git, unpack, patch, configure,
    compile, finish; a fraction of 0 means that it is not known. Blocks; Ctrl-C ends the compilers, and the
    next call goes on where this one stopped. Raises BuildError.
    """
    inputs = inputs_of(request)
    toolchain = find_toolchain(request.cuda)
    inputs["compiler"] = toolchain.compiler_version
    engines = engines_folder(request.cache_dir)
    try:
        engines.mkdir(parents=True, exist_ok=True)
        with locked(lock_of(request.cache_dir, key_of(inputs)), progress):
            found = finished(request.cache_dir, inputs)
            if found is not None:
                return found
            sweep(request.cache_dir)
            check_disk(engines, _CUDA_BYTES if request.cuda else _CPU_BYTES)
            return _build(request, inputs, toolchain, progress)
    except OSError as error:
        raise BuildError(
            f"cannot build in {engines}: {error}",
            "make it writable and its disk large enough, or set MOE_PROXY_CACHE_DIR to another folder",
        ) from error


def _build(
    request: BuildRequest, inputs: Mapping[str, object], toolchain: Toolchain, progress: Progress
) -> EngineBuild:
    """All steps, in a work folder that survives an interruption. The lock of this key is held."""
    work = engines_folder(request.cache_dir) / f".work-{key_of(inputs)}"
    work.mkdir(exist_ok=True)
    if not (work / "tree").is_dir():
        # Without a finished tree nothing that was built from it counts.
        shutil.rmtree(work / "build", ignore_errors=True)
        _prepare(request, inputs, work, progress)
    progress("configure", 0.0)
    _configure(work, [*program_definitions(toolchain), *definitions(inputs)], toolchain.cmake)
    _compile(work, toolchain.ninja, request.jobs or len(os.sched_getaffinity(0)), progress)
    progress("finish", 0.0)
    return _finish(request, inputs, work)


def _prepare(request: BuildRequest, inputs: Mapping[str, object], work: Path, progress: Progress) -> None:
    downloads = request.cache_dir / "source"
    downloads.mkdir(exist_ok=True)
    with locked(downloads / ".lock", progress):
        prepare_tree(
            work / "tree",
            pin=read_pin(),
            source=request.source,
            downloads=downloads,
            patches=None if request.stock else data_path("patches"),
            native=None if request.stock else data_path("native"),
            progress=progress,
        )
    if {**inputs_of(request), "compiler": inputs["compiler"]} != inputs:
        shutil.rmtree(work)
        raise BuildError("the source, patches/ or native/ changed while they were read", "build again")


def _configure(work: Path, flags: list[str], cmake: Path) -> None:
    build, log = work / "build", work / "build.log"
    argv: list[str | Path] = [cmake, "-S", work / "tree", "-B", build, *flags]
    resumed = build.is_dir()
    code, lines = run_logged(argv, folder=work, log=log, environment=_environment(work))
    if code != 0 and resumed:
        shutil.rmtree(build)
        code, lines = run_logged(argv, folder=work, log=log, environment=_environment(work))
    if code != 0:
        raise _failure("llama.cpp could not be configured", lines, "CMake Error", log)


def _compile(work: Path, ninja: Path, jobs: int, progress: Progress) -> None:
    log = work / "build.log"
    code, lines = run_logged(
        [ninja, "-C", work / "build", "-j", str(jobs), "llama-server"],
        folder=work,
        log=log,
        environment=_environment(work),
        on_line=lambda line: _report_step(line, progress),
    )
    if code != 0:
        raise _failure("llama-server did not compile", lines, "FAILED:", log)


def _finish(request: BuildRequest, inputs: Mapping[str, object], work: Path) -> EngineBuild:
    """Gather what an engine needs, prove that it starts, and let it appear under its key in one step."""
    staged = work / "engine"
    shutil.rmtree(staged, ignore_errors=True)
    (staged / "bin").mkdir(parents=True)
    for path in sorted((work / "build" / "bin").iterdir()):
        if path.name == "llama-server" or ".so" in path.name:
            shutil.copy2(path, staged / "bin" / path.name, follow_symlinks=False)
    if (work / "tree" / "licenses").is_dir():
        shutil.copytree(work / "tree" / "licenses", staged / "licenses")
    for name in ("LICENSE", "AUTHORS"):
        if (work / "tree" / name).is_file():
            shutil.copy2(work / "tree" / name, staged / f"{name}.llama.cpp")
    shutil.copy2(work / "build.log", staged / "build.log")
    server = staged / "bin" / "llama-server"
    # A CUDA build may have been made on a machine whose driver cannot load it.
    if not request.cuda and (fault := fault_of(server)):
        raise BuildError(
            f"the finished {server} does not start: {fault}",
            f"run it to see why, or delete {work} and build again",
        )
    engine = install(staged, request.cache_dir, inputs, {"built_at_s": int(time.time())})
    shutil.rmtree(work, ignore_errors=True)
    return engine


def _environment(work: Path) -> dict[str, str]:
    """Ours, without what would change the build: an enclosing git repository must not name its version."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(work.resolve())
    environment["NINJA_STATUS"] = "[%f/%t] "
    # Where there is a ccache, it finds again what was compiled under another key.
    environment.setdefault("CCACHE_BASEDIR", str(work.resolve()))
    environment.setdefault("CCACHE_NOHASHDIR", "1")
    return environment


def _report_step(line: str, progress: Progress) -> None:
    step = _NINJA_STEP.match(line)
    if step:
        progress("compile", int(step[1]) / int(step[2]))


def _failure(what: str, lines: list[str], mark: str, log: Path) -> BuildError:
    """The first thing that went wrong, without the command line of the compiler, and where the rest is."""
    start = next(
        (index for index, line in enumerate(lines) if mark in line), max(0, len(lines) - _ERROR_LINES)
    )
    shown = [line for line in lines[start:] if line and len(line) <= _LONG_LINE][:_ERROR_LINES]
    if any("No space left on device" in line for line in lines):
        what = f"{what}: the disk is full"
    elif any("Killed signal terminated program" in line for line in lines):
        what = f"{what}: the compiler was killed, most likely for lack of memory (try --jobs 1)"
    return BuildError("\n  ".join([what, *shown]), f"the whole output is in {log}")
