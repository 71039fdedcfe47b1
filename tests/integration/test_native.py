"""The pager's own unit tests, built without llama.cpp's libraries and run by ctest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_proxy.engine.toolchain import find_toolchain
from moe_proxy.engine.tree import native_files

NATIVE = Path(__file__).parents[2] / "native"
TOOLS = Path(sys.executable).parent


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


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_unit_tests_pass(llama_source: Path, tmp_path: Path, sanitizer: str) -> None:
    """Layout, score, policy, mover, counting and control hold: no data race, no bad access, no warning."""
    if not _has_sanitizer(tmp_path, sanitizer):
        pytest.skip(f"this toolchain cannot run -fsanitize={sanitizer}")
    build = tmp_path / "build"
    options = [f"-DLLAMA_CPP_SOURCE={llama_source}", f"-DMOE_PAGER_SANITIZE={sanitizer}"]
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}"]
    _run([str(TOOLS / "cmake"), *generator, "-S", str(NATIVE), "-B", str(build), *options])
    assert "warning:" not in _run([str(TOOLS / "cmake"), "--build", str(build)])
    output = _run([str(TOOLS / "ctest"), "--test-dir", str(build), "--output-on-failure"])
    assert re.search(r"100% tests passed.* out of 12", output)


def test_sources_are_formatted() -> None:
    """Sources follow .clang-format, and files stay small enough to read in one go."""
    files = [str(path) for path in sorted(NATIVE.rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    _run([str(TOOLS / "clang-format"), "--dry-run", "--Werror", *files])
    assert all(
        len((NATIVE / name).read_text(encoding="utf-8").splitlines()) <= 350 for name in native_files(NATIVE)
    )
