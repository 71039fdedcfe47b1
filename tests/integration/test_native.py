"""The pager's own unit tests, built without llama.cpp's libraries and run by ctest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from moe_proxy.engine.tree import native_files

NATIVE = Path(__file__).parents[2] / "native"
TOOLS = Path(sys.executable).parent


def _run(argv: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOE_")}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _has_thread_sanitizer(folder: Path) -> bool:
    """Whether the toolchain can build and run a program under it; some distributions leave it out."""
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n", encoding="utf-8")
    build = ["c++", "-fsanitize=thread", str(source), "-o", str(program)]
    return all(
        subprocess.run(argv, capture_output=True, check=False).returncode == 0
        for argv in (build, [str(program)])
    )


def test_unit_tests_pass(llama_source: Path, tmp_path: Path) -> None:
    """Layout, score, policy, mover, counting and control hold: no data race, no compiler's warning."""
    sanitizer = "thread" if _has_thread_sanitizer(tmp_path) else ""
    build = tmp_path / "build"
    options = [f"-DLLAMA_CPP_SOURCE={llama_source}", f"-DMOE_PAGER_SANITIZE={sanitizer}"]
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}"]
    _run([str(TOOLS / "cmake"), *generator, "-S", str(NATIVE), "-B", str(build), *options])
    assert "warning:" not in _run([str(TOOLS / "cmake"), "--build", str(build)])
    output = _run([str(TOOLS / "ctest"), "--test-dir", str(build), "--output-on-failure"])
    assert re.search(r"100% tests passed.* out of 9", output)


def test_sources_are_formatted() -> None:
    """Sources follow .clang-format, and files stay small enough to read in one go."""
    files = [str(path) for path in sorted(NATIVE.rglob("*")) if path.suffix in (".h", ".cpp")]
    _run([str(TOOLS / "clang-format"), "--dry-run", "--Werror", *files])
    assert all(
        len((NATIVE / name).read_text(encoding="utf-8").splitlines()) <= 350 for name in native_files(NATIVE)
    )
