"""The pager's own unit tests and simulator, built without llama.cpp's libraries."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.engine.toolchain import find_toolchain
from moe_proxy.engine.tree import native_files
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from tests.support.engine_process import engine_process
from tests.support.text import CODE, STORY, call, greedy

NATIVE = Path(__file__).parents[2] / "native"
TOOLS = Path(sys.executable).parent
MEMORY = "address,undefined"


def _run(argv: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOE_")}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _has_sanitizer(folder: Path, sanitizer: str) -> bool:
    """Whether the toolchain can build and run a program under it; some distributions leave it out."""
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n", encoding="utf-8")
    compiler = str(find_toolchain(cuda=False).cxx)
    build = [compiler, f"-fsanitize={sanitizer}", str(source), "-o", str(program)]
    return all(
        subprocess.run(argv, capture_output=True, check=False).returncode == 0
        for argv in (build, [str(program)])
    )


@pytest.fixture(scope="module")
def built(llama_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds native/ on its own under a sanitizer, once each; skips where the toolchain has none."""

    @functools.cache
    def build(sanitizer: str) -> Path:
        folder = tmp_path_factory.mktemp("native")
        if not _has_sanitizer(folder, sanitizer):
            pytest.skip(f"this toolchain cannot run -fsanitize={sanitizer}")
        options = [f"-DLLAMA_CPP_SOURCE={llama_source}", f"-DMOE_PAGER_SANITIZE={sanitizer}"]
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}"]
        _run([str(TOOLS / "cmake"), *generator, "-S", str(NATIVE), "-B", str(folder), *options])
        assert "warning:" not in _run([str(TOOLS / "cmake"), "--build", str(folder)])
        return folder

    return build


@pytest.mark.parametrize("sanitizer", ["thread", MEMORY])
def test_unit_tests_pass(built: Callable[[str], Path], sanitizer: str) -> None:
    """Layout, score, policies, mover, counting and control hold: no data race, no bad access, no warning."""
    output = _run([str(TOOLS / "ctest"), "--test-dir", str(built(sanitizer)), "--output-on-failure"])
    assert re.search(r"100% tests passed.* out of 13", output)


@pytest.mark.engine
def test_the_simulator_reproduces_the_engines_hit_rate(
    engine: EngineBuild, demo_model: Path, built: Callable[[str], Path], tmp_path: Path
) -> None:
    """The simulator replays a recorded trace and reproduces the engine's own hit rate within 1 point."""
    trace = tmp_path / "routing.trace"
    budget = layout_of(read_header(demo_model)).total_expert_bytes * 30 // 100
    variables = {"MOE_PAGER": "1", "MOE_PAGER_RAM_BYTES": str(budget), "MOE_PAGER_TRACE": str(trace)}
    # One thread: two that wait for each other take many times as long on a busy machine.
    flags = ("--threads", "1", "--cpu-moe", "--load-mode", "mmap")
    with engine_process(engine.server, demo_model, *flags, **variables) as socket:
        for prompt in (CODE, STORY):
            greedy(socket, prompt, 64)
        engine_says = call(socket, "GET", "/experts/stats")
        assert call(socket, "GET", "/experts")["reasons"] == []
    program = built(MEMORY) / "simulator" / "moe-pager-simulate"
    row = json.loads(_run([str(program), str(trace), "--policy", "posterior", "--share", "30", "--json"]))[0]
    recorded = (row["tokens"], row["picks"], row["recorded_hits"])
    assert recorded == tuple(engine_says[name] for name in ("tokens", "picks", "hits"))
    assert row["hits"] / row["picks"] == pytest.approx(engine_says["hits"] / engine_says["picks"], abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no trace is given"),
        (["nowhere"], "nowhere: cannot open: No such file or directory"),
        (["nowhere", "--share", "101"], "--share '101' is not a number from 0 to 100"),
        (["nowhere", "--sharp", "1"], "--sharp is not known"),
        ([__file__], "not a routing trace of version 1"),
    ],
)
def test_the_simulator_says_what_is_wrong(
    built: Callable[[str], Path], arguments: list[str], says: str
) -> None:
    """Errors name what is wrong and its value."""
    program = str(built(MEMORY) / "simulator" / "moe-pager-simulate")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert says in done.stderr.splitlines()[0]


def test_sources_are_formatted() -> None:
    """Sources follow .clang-format, and files stay small enough to read in one go."""
    files = [str(path) for path in sorted(NATIVE.rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    _run([str(TOOLS / "clang-format"), "--dry-run", "--Werror", *files])
    assert all(
        len((NATIVE / name).read_text(encoding="utf-8").splitlines()) <= 350 for name in native_files(NATIVE)
    )
