"""The engine's build with made-up sources and build programs: key, cache, faults, interruptions."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_proxy.engine import build as build_module
from moe_proxy.engine import source, toolchain
from moe_proxy.engine.build import build_engine, engine_for
from moe_proxy.engine.process import start_time_of
from moe_proxy.engine.toolchain import Toolchain
from moe_proxy.errors import BuildError
from tests.support.build_world import PATIENCE_S, TREE, World, made_up_world, until, write


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A made-up world."""
    with made_up_world(tmp_path, monkeypatch) as made:
        yield made


def test_a_build_from_nothing(world: World) -> None:
    """Source by hash from the index, patched, native added, compiled, and one folder with all it needs."""
    engine = world.build()
    assert world.stages == ["download", "unpack", "patch", "configure", "compile", "finish"]
    assert engine.folder == world.cache / "engine" / engine.key
    names = sorted(path.name for path in (engine.folder / "bin").iterdir())
    assert names == ["libllama.so", "libllama.so.1", "llama-server"]
    assert (engine.folder / "bin" / "libllama.so").is_symlink()
    assert (engine.folder / "LICENSE.llama.cpp").read_text() == "MIT\n"
    assert "Linking llama-server" in engine.log.read_text()
    record = json.loads((engine.folder / "build.json").read_text())
    assert record["key"] == engine.key
    assert record["inputs"]["compiler"] == "c++ 1.0"
    assert sorted(path.name for path in (world.cache / "engine").iterdir()) == sorted(
        [f".lock-{engine.key}", engine.key]
    )
    [configured] = world.calls("cmake")
    for flag in ("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DCMAKE_INSTALL_RPATH=$ORIGIN"):
        assert flag in configured
    assert f"-DLLAMA_BUILD_COMMIT={'c' * 9}" in configured


def test_a_second_call_does_nothing_and_needs_no_network(world: World) -> None:
    """engine_for and build_engine find it in under a second; no program runs, no index is asked."""
    assert engine_for(world.request()) is None
    engine = world.build()
    world.index.served.clear()
    started = time.monotonic()
    assert engine_for(world.request()) == engine
    assert world.build() == engine
    assert time.monotonic() - started < 1.0
    assert (len(world.calls("ninja")), world.index.served) == (1, [])


def test_stock_has_neither_patches_nor_native(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """stock=True builds the same source as upstream made it; otherwise both are in the tree."""
    trees: list[dict[str, str]] = []
    real = build_module.run_logged

    def spy(argv: list[object], **more: object) -> object:
        tree = Path(str(more["folder"])) / "tree"
        trees.append({str(n): (tree / n).read_text() for n in source.tree_files(tree)})
        return real(argv, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "run_logged", spy)
    stock, ours = world.build(stock=True), world.build()
    assert stock.key != ours.key
    used = {name: text for name, text in TREE.items() if not name.startswith("models")}
    assert trees[0] == used
    assert trees[-1]["native/src/a.cpp"] == "a\n"
    assert "add_subdirectory(native)" in trees[-1]["CMakeLists.txt"]
    assert "native/tests/t.cpp" not in trees[-1]


def test_the_key_holds_everything_that_goes_in(world: World) -> None:
    """Source, patches, native, flags, compiler, CPU: each changes the key; native's tests do not."""
    data, keys = world.root / "data", [world.key()]
    keys += [world.key(stock=True), world.key(cuda=True, cuda_architectures="86")]
    keys += [world.key(cuda=True, cuda_architectures="89")]
    (data / "native" / "tests" / "t.cpp").write_text("changed")
    assert world.key() == keys[0]
    for path in (data / "patches" / "0001-x.patch", data / "native" / "src" / "a.cpp"):
        path.write_text(path.read_text() + "\n")
        keys.append(world.key())
    world.toolchain = dataclasses.replace(world.toolchain, compiler_version="c++ 2.0")
    keys.append(world.key())
    world.cpu = "another"
    keys.append(world.key())
    world.pin = dataclasses.replace(world.pin, sha256="0" * 64)
    keys.append(world.key())
    tree = write(world.root / "mine", TREE)
    keys.append(world.key(source=tree))
    (tree / "src" / "new.cpp").write_text("")
    keys.append(world.key(source=tree))
    assert len(set(keys)) == len(keys)


def test_an_engine_built_elsewhere_is_found_without_a_compiler(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that got its engine from another one has no compiler and needs none."""
    engine = world.build()

    def none(cuda: bool) -> Toolchain:
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(build_module, "find_toolchain", none)
    assert engine_for(world.request()) == engine
    assert engine_for(world.request(stock=True)) is None
    with pytest.raises(BuildError, match="no C"):
        world.build(stock=True)


def test_no_disk_space_is_said_before_anything_is_fetched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little room: how much is needed, how much is there, what to do."""
    usage = shutil.disk_usage(world.root)
    monkeypatch.setattr(toolchain.shutil, "disk_usage", lambda folder: usage._replace(free=100_000_000))
    with pytest.raises(BuildError, match=r"needs 0\.5 GB in .*, 0\.1 GB are free.*MOE_PROXY_CACHE_DIR"):
        world.build()
    assert world.index.served == []


def test_a_cache_that_cannot_be_written_is_said(world: World) -> None:
    """No traceback for a cache directory that cannot be made."""
    (world.root / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot build in .*MOE_PROXY_CACHE_DIR"):
        world.build(cache_dir=world.root / "file" / "cache")


def test_a_compile_error_shows_the_compilers_words(world: World) -> None:
    """The error holds what the compiler said and where the log is, and not its command line."""
    world.switch("ninja-fails")
    with pytest.raises(BuildError) as caught:
        world.build()
    text = str(caught.value)
    assert "b.cpp:1:1: error: it is wrong" in text
    assert "0000" not in text
    log = Path(text.rpartition(" ")[2])
    assert "error: it is wrong" in log.read_text()
    world.switch("ninja-fails", on=False)
    world.build()


def test_a_configure_error_shows_cmakes_words(world: World) -> None:
    """The same for cmake."""
    world.switch("cmake-always-fails")
    with pytest.raises(BuildError, match=r"could not be configured\n  CMake Error at x: no header"):
        world.build()


def test_ctrl_c_ends_the_compilers_and_the_next_call_resumes(world: World) -> None:
    """Interrupted while compiling: nothing runs on, and what was compiled is kept."""
    world.switch("ninja-hangs")

    def interrupt(stage: str, fraction: float) -> None:
        if stage == "compile":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(world.request(), interrupt)
    [pid] = world.calls("ninja")
    assert start_time_of(int(pid)) is None
    [work] = (world.cache / "engine").glob(".work-*")
    assert (work / "build" / "a.o").exists()
    world.switch("ninja-hangs", on=False)
    world.build()
    assert world.stages == ["configure", "compile", "finish"]


def test_stale_configuration_is_made_anew(world: World) -> None:
    """A build folder that cmake no longer accepts is thrown away, once."""
    work = world.cache / "engine" / f".work-{world.key()}"
    write(work, {"build/stale": "", "tree/CMakeLists.txt": ""})
    world.switch("cmake-fails")
    world.build()
    assert len(world.calls("cmake")) == 2


def test_a_half_made_tree_is_made_anew(world: World) -> None:
    """Killed while unpacking or patching: the tree is begun from nothing."""
    work = world.cache / "engine" / f".work-{world.key()}"
    write(work, {"tree.partial/CMakeLists.txt": "half", "build/old.o": ""})
    world.build()
    assert "patch" in world.stages


KILLED = """
import sys
from pathlib import Path
from moe_proxy.engine.program import run_logged
run_logged([sys.argv[1], "-C", sys.argv[2]], folder=Path(sys.argv[2]), log=Path(sys.argv[2]) / "log")
"""


def test_kill_9_ends_the_compilers(world: World, tmp_path: Path) -> None:
    """kill -9 of the building process takes ninja along."""
    world.switch("ninja-hangs")
    argv = [sys.executable, "-c", KILLED, str(world.toolchain.ninja), str(tmp_path)]
    with subprocess.Popen(argv) as process:
        until(lambda: bool(world.calls("ninja")))
        process.send_signal(signal.SIGKILL)
    until(lambda: start_time_of(int(world.calls("ninja")[0])) is None)


def test_two_builds_at_once_make_one(world: World) -> None:
    """The second waits for the first, says so, and takes what it made."""
    world.switch("ninja-hangs")
    first = threading.Thread(target=world.build)
    first.start()
    until(lambda: bool(world.calls("ninja")))
    stages: list[str] = []
    results: list[build_module.EngineBuild] = []

    def second_build() -> None:
        results.append(build_engine(world.request(), lambda stage, fraction: stages.append(stage)))

    second = threading.Thread(target=second_build)
    second.start()
    until(lambda: stages == ["wait"])
    # Let the first one go on: its stub waits for a sleep that ends now.
    [pid] = world.calls("ninja")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert (len(world.calls("ninja")), stages) == (1, ["wait"])
    assert results == [engine_for(world.request())]


def test_an_engine_without_its_record_is_built_again(world: World) -> None:
    """Only a folder with build.json counts as finished."""
    engine = world.build()
    (engine.folder / "build.json").unlink()
    assert engine_for(world.request()) is None
    assert world.build() == engine
    assert (engine.folder / "build.json").exists()


def test_a_server_that_does_not_start_is_not_kept(world: World) -> None:
    """What cannot run is no engine."""
    program = world.toolchain.ninja
    program.write_text(program.read_text().replace("echo devices", "exit 3"))
    with pytest.raises(BuildError, match="does not start"):
        world.build()
    assert engine_for(world.request()) is None


def test_a_patch_edited_meanwhile_never_ends_under_the_wrong_key(world: World) -> None:
    """What is in the tree is what the key says: an edit between hashing and reading ends the build."""
    patch = world.root / "data" / "patches" / "0001-x.patch"

    def edit(stage: str, fraction: float) -> None:
        if stage == "unpack":
            patch.write_text(patch.read_text().replace("made-up", "newer"))

    with pytest.raises(BuildError, match="changed while they were read"):
        build_engine(world.request(), edit)
    assert not list((world.cache / "engine").glob(".work-*"))
    world.build()
