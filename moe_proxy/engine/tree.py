"""Owns the working tree of a build: pristine source, then patches with no fuzz, then native/ beside it.

It never changes a source that was named by a person, and never builds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from moe_proxy.engine.source import (
    Pin,
    Progress,
    check_tree,
    copy_tree,
    pinned_source,
)
from moe_proxy.errors import BuildError

_UNBUILT_NATIVE = frozenset({"simulator", "tests", "__pycache__"})


def read_series(patches: Path) -> list[Path]:
    """The patches that ``series`` names, in order. Raises BuildError when one is missing."""
    try:
        lines = (patches / "series").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BuildError(
            f"cannot read {patches / 'series'}: {error.strerror}", "reinstall moe-proxy"
        ) from error
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    for name in names:
        if not (patches / name).is_file():
            raise BuildError(f"{patches / 'series'} names {name}, which is not there", "reinstall moe-proxy")
    return [patches / name for name in names]


def native_files(native: Path) -> Iterator[Path]:
    """All files of native/ that are built with llama.cpp, relative to it, in a fixed order."""
    for folder, folders, names in os.walk(native):
        here = Path(folder).relative_to(native)
        folders[:] = sorted(name for name in folders if name not in _UNBUILT_NATIVE)
        yield from (here / name for name in sorted(names))


def additions_hash(patches: Path, native: Path) -> str:
    """SHA-256 over the names and bytes of every patch in the series and every file of native/."""
    digest = hashlib.sha256()
    files = [(path.name, path) for path in read_series(patches)]
    files += [(f"native/{name}", native / name) for name in native_files(native)]
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def prepare_tree(
    tree: Path,
    *,
    pin: Pin,
    source: Path | None,
    downloads: Path,
    patches: Path | None,
    native: Path | None,
    progress: Progress,
) -> None:
    """Make ``tree`` from the pinned source (or the folder ``source``); nothing is left of it on failure.

    ``patches`` and ``native`` are folders, or None for stock llama.cpp. Raises BuildError.
    """
    partial = tree.with_name(tree.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if source is not None:
        copy_tree(source, partial)
    else:
        pinned_source(partial, pin, downloads, progress)
    check_tree(partial)
    progress("patch", 0.0)
    for path in read_series(patches) if patches is not None else []:
        apply_patch(path, partial)
    if native is not None:
        for name in native_files(native):
            target = partial / "native" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(native / name, target)
    partial.rename(tree)


def apply_patch(patch: Path, tree: Path) -> None:
    """Apply one patch with -p1; context that does not match exactly raises BuildError."""
    tree = tree.resolve()
    git, program = shutil.which("git"), shutil.which("patch")
    if git is not None:
        # Inside another repository git would take the names as relative to its root, skip what lies elsewhere
        # and report success: so it must find none. The reverse check then proves that every hunk is there.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
        apply = [git, "apply", "-p1", "--whitespace=nowarn", str(patch.resolve())]
        _run(apply, tree, environment, patch)
        _run([*apply[:2], "--reverse", "--check", *apply[2:]], tree, environment, patch)
    elif program is not None:
        options = ["-p1", "--fuzz=0", "--batch", "--forward", "--no-backup-if-mismatch"]
        _run([program, *options, "-i", str(patch.resolve())], tree, dict(os.environ), patch)
    else:
        raise BuildError("neither git nor patch is installed", "install git (apt-get install git)")


def _run(argv: list[str], tree: Path, environment: dict[str, str], patch: Path) -> None:
    done = subprocess.run(argv, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
        raise BuildError(
            f"patch {patch.name} does not apply: {lines[0]}",
            "patches belong to the pinned llama.cpp; use that source, or build a --source with --stock",
        )
