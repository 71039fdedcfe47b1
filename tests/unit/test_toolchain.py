"""What a machine can build with, and what is said when it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_proxy.engine import toolchain
from moe_proxy.engine.toolchain import cpu_identity, find_toolchain
from moe_proxy.errors import BuildError


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a C++ compiler: one message that names the packages."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError) as caught:
        find_toolchain(cuda=False)
    assert "no C++ compiler found" in caught.value.message
    for command in ("apt-get install g++", "dnf install gcc-c++", "pacman -S gcc"):
        assert command in caught.value.hint
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX=no-such-compiler is no program on PATH"):
        find_toolchain(cuda=False)


def test_no_cuda_toolkit_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--cuda without nvcc: one message; the CPU build does not look for it."""
    for name in ("c++", "cc"):
        (tmp_path / name).write_text("#!/bin/sh\necho stub 1.0\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    real = shutil.which
    monkeypatch.setattr(
        toolchain.shutil, "which", lambda name, **more: None if "cuda" in name else real(name, **more)
    )
    found = find_toolchain(cuda=False)
    assert (found.cxx, found.compiler_version) == (tmp_path / "c++", "stub 1.0; stub 1.0")
    with pytest.raises(BuildError, match="no CUDA toolkit found"):
        find_toolchain(cuda=True)


def test_the_kind_of_cpu_is_its_instruction_sets() -> None:
    """Flags that kernels add and drop, and clock rates, are not part of it; instruction sets are."""
    base = "vendor_id\t: X\ncpu family\t: 6\nmodel\t\t: 1\ncpu MHz\t\t: 2000\nflags\t\t: fpu avx2 sse4_2 "
    assert cpu_identity(base) == cpu_identity(base.replace("2000", "900").replace("fpu", "fpu ibrs"))
    assert cpu_identity(base) != cpu_identity(base + "avx512f")
    assert "asimd" in cpu_identity("CPU part\t: 0xd40\nFeatures\t: fp asimd\n")
