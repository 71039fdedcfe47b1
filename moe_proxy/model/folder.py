"""Owns which models lie in folders: each GGUF with what its header says, or why it cannot be served.

It reads headers only, and never changes a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_proxy.errors import ConfigError, ModelFileError
from moe_proxy.model.footprint import Footprint, footprint_of
from moe_proxy.model.gguf_header import GgufHeader, read_header
from moe_proxy.model.hub_name import HubName, model_sets, quant_of
from moe_proxy.model.layout import ModelLayout, layout_of


@dataclass(frozen=True)
class MoeModel:
    """A model with experts that lies on disk. ``path`` is its first file; the layout has no fingerprint."""

    path: Path
    header: GgufHeader
    layout: ModelLayout
    footprint: Footprint


@dataclass(frozen=True)
class Unusable:
    """A GGUF that cannot be served, and why."""

    path: Path
    reason: str


def gguf_files(folders: Iterable[Path]) -> list[Path]:
    """The first file of each model in ``folders`` and below, hidden folders left out; sorted.

    A folder that is not there holds none. Raises ConfigError for what is no folder, or cannot be read.
    """
    found: set[Path] = set()
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is no folder", "name the folder that holds the models")
        for root, names, files in os.walk(folder, onerror=_refused):
            names[:] = [name for name in names if not name.startswith(".")]
            found |= {Path(root) / first for first, *_ in model_sets(_visible(files)).values()}
    return sorted(found)


def _visible(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _refused(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror})", "check its rights"
        ) from error


def look_at(path: Path) -> MoeModel | Unusable:
    """What lies at ``path``."""
    try:
        header = read_header(path)
        # Without the fingerprint: for it, the router weights of each model would be read.
        layout = layout_of(header, complete=False)
    except ModelFileError as error:
        return Unusable(path, str(error))
    return MoeModel(path, header, layout, footprint_of(header, layout))


def of_hub_name(models_dir: Path, name: HubName) -> Path:
    """The first file of a downloaded model.

    Raises ModelFileError, with what downloads it or tells it apart from others.
    """
    folder = models_dir / name.repo
    files = gguf_files([folder])
    told = {path: quant_of(str(path.relative_to(folder))) for path in files}
    wanted = [path for path in files if name.quant is None or told[path] == name.quant.upper()]
    if len(wanted) == 1:
        return wanted[0]
    if not wanted:
        raise ModelFileError(
            f"{name} is no file here, nor a model in {models_dir}; nothing is downloaded unasked",
            f"download it with: moe-proxy model download {name}",
        )
    raise ModelFileError(
        f"{name} is {len(wanted)} models in {folder}",
        f"say which: {_choices(name.repo, [told[path] for path in wanted])}",
    )


def _choices(repo: str, quants: Sequence[str | None]) -> str:
    known = sorted({quant for quant in quants if quant})
    return ", ".join(f"{repo}:{quant}" for quant in known) or "name its file"
