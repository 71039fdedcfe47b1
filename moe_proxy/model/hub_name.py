"""Owns how models on a hub are named, ``OWNER/NAME[:QUANT]``, and what their files' names tell. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?::([\w.-]+))?", re.ASCII)
# As llama.cpp and those who publish GGUFs write it: Q4_K_M, UD-Q4_K_XL, IQ3_XXS, MXFP4_MOE, BF16.
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_[A-Z0-9]+)*|BF16|F16|F32))(?=[-./]|$)",
    re.IGNORECASE | re.ASCII,
)
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)", re.IGNORECASE | re.ASCII)
_PROJECTOR = re.compile(r"(?:^|[-._/])mmproj", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class HubName:
    """A repository of models, and the quantisation that is wanted of it, if one was named."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def parse_hub_name(text: str) -> HubName | None:
    """``text`` as the name of a model on a hub; None for what is none, as a file's name is."""
    match = _NAME.fullmatch(text)
    if match is None or text.lower().endswith(".gguf") or ".." in text or "--" in match[1]:
        return None
    return HubName(match[1], match[2])


def quant_of(file_name: str) -> str | None:
    """The quantisation that a file's name (or its folder's) tells, in upper case; the last one it names."""
    found = _QUANT.findall(file_name.removesuffix(".gguf"))
    return found[-1].upper() if found else None


def model_sets(file_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The models among the files of a repository: each with its files, by the name that they share.

    What is no GGUF, and what only belongs to a model (a vision projector), is left out.
    """
    sets: dict[str, list[str]] = {}
    for name in sorted(file_names):
        if name.lower().endswith(".gguf") and not _PROJECTOR.search(name):
            sets.setdefault(_SHARD.sub("", name), []).append(name)
    return {stem: tuple(files) for stem, files in sets.items()}


def missing_shards(files: Iterable[str]) -> int:
    """How many files the set of a split model lacks, by their names."""
    files = tuple(files)
    counts = [int(match[1]) for name in files if (match := _SHARD.search(name))]
    return max(counts) - len(files) if counts else 0
