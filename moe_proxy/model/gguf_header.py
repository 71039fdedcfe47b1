"""Owns the facts of a model's GGUF header, over all its files; it never judges what the facts mean."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf

from moe_proxy.errors import NotGgufError, ShardMissingError
from moe_proxy.model.gguf_shard import Scalar, Shard, TensorInfo, read_shard

__all__ = ["GgufHeader", "TensorInfo", "read_header"]

_GUESSED_FILE_TYPE = 1024
_SHARD_NAME = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True)
class GgufHeader:
    """Facts of a model: of all its files where it is split. Numbers that a file does not state are 0."""

    files: tuple[Path, ...]
    architecture: str
    name: str
    basename: str
    parameter_count: int
    size_bytes: int
    quantization: str
    context_length: int
    embedding_length: int
    block_count: int
    expert_count: int
    expert_used_count: int
    chat_template: str
    has_fim: bool
    vocabulary_size: int
    modified_at_s: float
    metadata: Mapping[str, Scalar]
    tensors: tuple[TensorInfo, ...]

    @property
    def stem(self) -> str:
        """File name without ``.gguf`` and without the number of a shard."""
        return _SHARD_NAME.sub("", self.files[0].stem)


def read_header(path: Path, *, complete: bool = True) -> GgufHeader:
    """Read the header of ``path`` and of the other files of a split model; any of its files may be named.

    Unless they must be ``complete``, the files may end where their headers do.

    Raises ModelFileError for a missing or unreadable file, NotGgufError for another or a damaged format,
    TruncatedError where the header or a tensor ends beyond the file, ShardMissingError for an incomplete set.
    """
    first = read_shard(path, complete=complete)
    shards = [first]
    count = _integer(first, "split.count")
    if count > 1:
        paths = _shard_paths(path, count)
        shards = [first if other == path else read_shard(other, complete=complete) for other in paths]
        _check_set(shards, count)
    return _merged(shards)


def _shard_paths(path: Path, count: int) -> list[Path]:
    match = _SHARD_NAME.search(path.stem)
    if match is None or int(match[2]) != count:
        raise ShardMissingError(
            f"{path} says it is one of {count} files, and its name does not end in -0000N-of-{count:05}.gguf",
            "give the files of a split model the names they were published with",
        )
    stem = path.stem[: match.start()]
    paths = [
        path.with_name(f"{stem}-{number:05}-of-{count:05}{path.suffix}") for number in range(1, count + 1)
    ]
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ShardMissingError(
            f"{path.parent} lacks {missing[0]}{more} of the {count} files of this model",
            "download the missing files into the same directory",
        )
    return paths


def _check_set(shards: Sequence[Shard], count: int) -> None:
    expected = _integer(shards[0], "split.tensors.count")
    for number, shard in enumerate(shards):
        if (_integer(shard, "split.no"), _integer(shard, "split.count")) != (number, count):
            raise NotGgufError(
                f"{shard.path} says it is file {_integer(shard, 'split.no') + 1} of "
                f"{_integer(shard, 'split.count')}, and its name says {number + 1} of {count}",
                "download this file again",
            )
    found = [tensor.name for shard in shards for tensor in shard.tensors]
    if len(set(found)) != len(found) or (expected and expected != len(found)):
        raise NotGgufError(
            f"the {count} files beside {shards[0].path} hold {len(set(found))} different tensors"
            f" in {len(found)} entries instead of {expected or len(found)}",
            "they are not of one download; download all of them again",
        )


def _merged(shards: Sequence[Shard]) -> GgufHeader:
    first = shards[0]
    tensors = tuple(tensor for shard in shards for tensor in shard.tensors)
    architecture = _text(first, "general.architecture")
    if not architecture:
        raise NotGgufError(
            f"{first.path} names no architecture (general.architecture)", "it is no model file"
        )

    def of_model(key: str) -> int:
        return _integer(first, f"{architecture}.{key}")

    return GgufHeader(
        files=tuple(shard.path for shard in shards),
        architecture=architecture,
        name=_text(first, "general.name") or _SHARD_NAME.sub("", first.path.stem),
        basename=_text(first, "general.basename"),
        parameter_count=sum(math.prod(tensor.shape) for tensor in tensors),
        size_bytes=sum(shard.size_bytes for shard in shards),
        quantization=_quantization(first.metadata, tensors),
        context_length=of_model("context_length"),
        embedding_length=of_model("embedding_length"),
        block_count=of_model("block_count"),
        expert_count=of_model("expert_count"),
        expert_used_count=of_model("expert_used_count"),
        chat_template=_text(first, "tokenizer.chat_template"),
        has_fim=first.has_fim,
        vocabulary_size=first.vocabulary_size,
        modified_at_s=max(shard.modified_at_s for shard in shards),
        metadata=first.metadata,
        tensors=tensors,
    )


def _quantization(metadata: Mapping[str, Scalar], tensors: Sequence[TensorInfo]) -> str:
    """Name of the file type; where the file states none that is known, the type of most bytes."""
    stated = metadata.get("general.file_type")
    try:
        name = gguf.LlamaFileType(int(stated) & ~_GUESSED_FILE_TYPE).name if type(stated) is int else ""
    except ValueError:
        name = ""
    if name:
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")
    size_bytes: Counter[str] = Counter()
    for tensor in tensors:
        size_bytes[tensor.type_name] += tensor.size_bytes
    return size_bytes.most_common(1)[0][0] if size_bytes else ""


def _integer(shard: Shard, key: str) -> int:
    value = shard.metadata.get(key, 0)
    if type(value) is not int or value < 0:
        raise NotGgufError(f"{shard.path} has {value!r} for {key}, which is a count", "the file is damaged")
    return value


def _text(shard: Shard, key: str) -> str:
    value = shard.metadata.get(key, "")
    if not isinstance(value, str):
        raise NotGgufError(f"{shard.path} has {value!r} for {key}, which is a text", "the file is damaged")
    return value
