"""Owns what is compiled and how: the CMake definitions, and everything else that decides what comes out.

It runs nothing but probes of this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_proxy.engine.compatibility import portable_cpu
from moe_proxy.engine.source import Pin, check_tree, read_pin, tree_hash
from moe_proxy.engine.toolchain import Toolchain, this_cpu
from moe_proxy.engine.tree import additions_hash
from moe_proxy.errors import BuildError
from moe_proxy.hardware import probe
from moe_proxy.resources import data_path

ALL_ARCHITECTURES = "all"
# Every architecture that CUDA 13 compiles for: machine code for each, and PTX for what comes after them.
_CUDA_13 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
_RECIPE = 1  # part of the key: raise it when the build's steps change what they make


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    ``cuda_architectures`` as CMake takes them ("86;89"), "" for the GPUs present, "all" for all that CUDA 13
    knows. ``portable``: for most CPUs of this kind instead of this very one.
    """

    cache_dir: Path
    source: Path | None = None
    cuda: bool = False
    cuda_architectures: str = ""
    stock: bool = False
    jobs: int | None = None
    portable: bool = False


def inputs_of(request: BuildRequest) -> dict[str, object]:
    """Everything that decides what comes out, but the compiler. Cheap: no network, no build."""
    if request.source is not None:
        check_tree(request.source)
    pin = read_pin()
    return {
        "recipe": _RECIPE,
        "source": _source_name(request.source, pin),
        "commit": pin.commit if request.source is None else "",
        "additions": "" if request.stock else additions_hash(data_path("patches"), data_path("native")),
        "flags": _flags(request),
        "cpu": portable_cpu(os.uname().machine) if request.portable else this_cpu(),
        "stock": request.stock,
        "cuda": request.cuda,
    }


def _source_name(source: Path | None, pin: Pin) -> str:
    return f"archive sha256 {pin.sha256}" if source is None else f"tree sha256 {tree_hash(source)}"


def key_of(inputs: Mapping[str, object]) -> str:
    """The name of the engine that comes of ``inputs``: 20 hex digits."""
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _flags(request: BuildRequest) -> list[str]:
    """CMake's definitions. Nothing may be fetched while building, and bin/ must work wherever it is moved."""
    flags = [
        "-GNinja",
        "-DCMAKE_BUILD_TYPE=Release",
        # The install form: CMake pads the build form with an empty entry, which is the current folder.
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        "-DCMAKE_INSTALL_RPATH=$ORIGIN",
        "-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_APP=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_BUILD_SERVER=ON",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_BUILD_NUMBER=0",
        f"-DGGML_NATIVE={'OFF' if request.portable else 'ON'}",
    ]
    if request.cuda:
        architectures = request.cuda_architectures or _architectures_present()
        if architectures == ALL_ARCHITECTURES:
            architectures = ";".join((*(f"{name}-real" for name in _CUDA_13), f"{_CUDA_13[-1]}-virtual"))
        flags += ["-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF", f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
    return flags


def definitions(inputs: Mapping[str, object]) -> list[str]:
    """CMake's definitions for ``inputs``; the commit they name is what ``--version`` prints."""
    flags = inputs["flags"]
    assert isinstance(flags, list)
    commit = str(inputs["commit"])[:9]
    return [*map(str, flags), *([f"-DLLAMA_BUILD_COMMIT={commit}"] if commit else [])]


def program_definitions(toolchain: Toolchain) -> list[str]:
    """The programs by their full path, so that what was found is what is used. Not part of the key."""
    flags = [
        f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}",
        f"-DCMAKE_C_COMPILER={toolchain.cc}",
        f"-DCMAKE_CXX_COMPILER={toolchain.cxx}",
    ]
    if toolchain.nvcc is not None:
        flags.append(f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc}")
        stubs = toolchain.nvcc.parent.parent / "lib64" / "stubs"
        if stubs.is_dir():
            # Lets a machine without a driver link; the real libcuda is found when the engine runs.
            flags.append(f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,{stubs}")
    return flags


def _architectures_present() -> str:
    """The compute capabilities of this machine's GPUs, as CMake names them."""
    found = sorted({gpu.compute_capability.replace(".", "") for gpu in probe().gpus} - {""})
    if not found:
        raise BuildError(
            "no NVIDIA GPU found to build for",
            "name the architectures, for example --cuda-arch '86;89', or build without --cuda",
        )
    return ";".join(f"{architecture}-real" for architecture in found)
