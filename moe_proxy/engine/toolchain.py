"""Owns what this machine can build with: compilers, cmake, ninja, CUDA, its kind of CPU, free disk.

It only looks and never installs or builds anything. What is missing is one BuildError that says what to do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_proxy.errors import BuildError

_CXX_NAMES = ("c++", "g++", "clang++")
_C_NAMES = ("cc", "gcc", "clang")
_INSTALL_COMPILER = (
    "install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), pacman -S gcc (Arch)"
)
_PROBE_TIMEOUT_S = 20
# Instruction sets that -march=native may compile for; other flags come and go with kernel versions.
_X86_SETS = re.compile(
    r"^(sse|ssse|avx|fma|f16c|bmi|amx|popcnt|movbe|gfni|vaes|vpclmul|aes|adx|sha|pclmul|abm|cx16)"
)
_RELEASE = re.compile(r"release (\d+\.\d+)")
# Redistributable by the toolkit's license; in the lines that ldd prints.
_LOADED = re.compile(
    r"^\s*(lib(?:cudart|cublas|cublasLt)\.so\S*) => (not found|/.*?)(?: \(0x[0-9a-f]+\))?$", re.MULTILINE
)
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU part")
_CPU_SETS = ("flags", "Features")


@dataclass(frozen=True)
class Toolchain:
    """The programs of one build; ``compiler_version`` is the first line of ``--version`` of each compiler."""

    cmake: Path
    ninja: Path
    cc: Path
    cxx: Path
    compiler_version: str
    nvcc: Path | None = None


def find_toolchain(cuda: bool) -> Toolchain:
    """Everything a build needs. Raises BuildError naming the first thing that is missing."""
    cxx = _compiler("CXX", _CXX_NAMES, "C++")
    cc = _compiler("CC", _C_NAMES, "C")
    nvcc = _nvcc() if cuda else None
    programs = [cc, cxx] if nvcc is None else [cc, cxx, nvcc]
    return Toolchain(
        cmake=_wheel_program("cmake", "CMAKE_BIN_DIR"),
        ninja=_wheel_program("ninja", "BIN_DIR"),
        cc=cc,
        cxx=cxx,
        compiler_version="; ".join(_version(program) for program in programs),
        nvcc=nvcc,
    )


def cpu_identity(cpuinfo: str) -> str:
    """The kind of CPU in the text of ``/proc/cpuinfo``: code made for it need not run on another."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    parts = [fields[name] for name in _CPU_FIELDS if name in fields]
    for name in _CPU_SETS:
        words = sorted(fields.get(name, "").split())
        parts += [word for word in words if name == "Features" or _X86_SETS.match(word)]
    return " ".join(parts)


def this_cpu() -> str:
    """``cpu_identity`` of this machine; its architecture alone where the kernel does not say more."""
    try:
        identity = cpu_identity(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        identity = ""
    return f"{os.uname().machine} {identity}".strip()


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise BuildError unless ``folder``'s disk has ``needed_bytes`` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise BuildError(
            f"building needs {needed_bytes / 1e9:.1f} GB in {folder}, {free_bytes / 1e9:.1f} GB are free",
            "free some space, or set MOE_PROXY_CACHE_DIR to a folder on another disk",
        )


def _compiler(variable: str, names: tuple[str, ...], language: str) -> Path:
    named = os.environ.get(variable, "")
    for name in (named,) if named else names:
        found = shutil.which(name)
        if found:
            return Path(found)
    if named:
        raise BuildError(
            f"{variable}={named} is no program on PATH",
            f"unset {variable}, or set it to a {language} compiler",
        )
    raise BuildError(f"no {language} compiler found ({', '.join(names)})", _INSTALL_COMPILER)


def _wheel_program(package: str, folder_name: str) -> Path:
    """The program itself, not the Python script of the wheel: signals have to reach it."""
    try:
        folder = getattr(importlib.import_module(package), folder_name)
    except (ImportError, AttributeError):
        found = shutil.which(package)
    else:
        found = shutil.which(package, path=str(folder)) or shutil.which(package)
    if not found:
        raise BuildError(f"{package} is not installed", f"python -m pip install {package}")
    return Path(found)


def _nvcc() -> Path:
    candidates = [os.environ.get("CUDACXX", "")]
    candidates += [
        f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    candidates += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in filter(None, candidates):
        found = shutil.which(candidate)
        if found:
            return _behind(Path(found))
    raise BuildError(
        "no CUDA toolkit found (nvcc is neither on PATH nor in /usr/local/cuda/bin)",
        "install it from https://developer.nvidia.com/cuda-downloads, set CUDA_HOME, or build without --cuda",
    )


def _behind(nvcc: Path) -> Path:
    """The toolkit's own nvcc, where the one on PATH is a link or a script that calls it."""
    dry_run = output_of(["/bin/sh", "-c", '"$0" --dryrun x.cu 2>&1', nvcc])
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    own = Path(top[1].strip()).resolve() / "bin" / "nvcc" if top else nvcc.resolve()
    return own if own.is_file() else nvcc


def cuda_toolkit() -> tuple[Path, str] | None:
    """The nvcc that a build would use, and the version of its toolkit ("13.0", "" where it does not say)."""
    try:
        nvcc = _nvcc()
    except BuildError:
        return None
    release = _RELEASE.search(output_of([nvcc, "--version"]))
    return nvcc, release[1] if release else ""


def runtime_libraries(folder: Path) -> dict[str, Path]:
    """The CUDA toolkit's libraries that those in ``folder`` load, by the name they ask for.

    The driver's own is not among them: it belongs to the machine. Raises BuildError for one not found.
    """
    search = [os.environ.get("LD_LIBRARY_PATH", "")]
    with contextlib.suppress(BuildError):
        search += [str(_nvcc().parent.parent / name) for name in ("lib64", "lib")]
    environment = {"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": ":".join(filter(None, search))}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.so*")):
        for name, where in _LOADED.findall(output_of(["ldd", file], environment)):
            if where == "not found":
                raise BuildError(
                    f"{file.name} needs {name}, which is not found here",
                    "install the whole CUDA toolkit, or name its folder in LD_LIBRARY_PATH",
                )
            found[name] = Path(where)
    return found


def _version(program: Path) -> str:
    text = output_of([program, "--version"])
    # nvcc's first lines are a copyright notice; the last one names the build.
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise BuildError(f"{program} --version prints nothing", _INSTALL_COMPILER)
    return lines[-1] if program.name.startswith("nvcc") else lines[0]


def output_of(argv: list[str | Path], environment: Mapping[str, str] | None = None) -> str:
    """What a short program prints; "" when it fails or cannot run."""
    try:
        done = subprocess.run(
            argv,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""
