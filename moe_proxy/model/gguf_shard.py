"""Owns reading the header of one GGUF file; it never reads weights and knows nothing of other files.

Types and block sizes come from the ``gguf`` library. Its reader is not used: it makes an array view of every
element of every list (seconds for a vocabulary of 150,000 tokens) and checks no bound, so that a damaged file
ends in an arbitrary exception or an endless loop. Here lists are stepped over and every access is checked.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf

from moe_proxy.errors import ModelFileError, NotGgufError, TruncatedError

Scalar = str | int | float | bool

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_TOKENS = "tokenizer.ggml.tokens"
_FIM_KEYS = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")
_FIM_TOKENS = (
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<|code_prefix|>",
    "▁<PRE>",
)

_T = gguf.GGUFValueType
_STRUCTS = {
    _T.UINT8: struct.Struct("<B"),
    _T.INT8: struct.Struct("<b"),
    _T.UINT16: struct.Struct("<H"),
    _T.INT16: struct.Struct("<h"),
    _T.UINT32: struct.Struct("<I"),
    _T.INT32: struct.Struct("<i"),
    _T.FLOAT32: struct.Struct("<f"),
    _T.UINT64: struct.Struct("<Q"),
    _T.INT64: struct.Struct("<q"),
    _T.FLOAT64: struct.Struct("<d"),
    _T.BOOL: struct.Struct("<?"),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its ``shape`` in ggml's order (the contiguous dimension first) and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    size_bytes: int
    offset_bytes: int
    file: Path


@dataclass(frozen=True)
class Shard:
    """What one file says: all of a model, or one part of it."""

    path: Path
    size_bytes: int
    modified_at_s: float
    metadata: Mapping[str, Scalar]
    tensors: tuple[TensorInfo, ...]
    vocabulary_size: int
    has_fim: bool


def read_shard(path: Path, *, complete: bool = True) -> Shard:
    """Read the header of ``path``; unless it must be ``complete``, the file may end where the header does.

    Raises ModelFileError, NotGgufError, TruncatedError."""
    if path.is_dir():
        raise ModelFileError(f"{path} is a directory", "name the .gguf file in it")
    # Asked before it is opened: opening a pipe waits for a writer.
    if path.exists() and not path.is_file():
        raise ModelFileError(f"{path} is no regular file", "give a .gguf model")
    try:
        with path.open("rb") as file:
            stat = path.stat()
            if file.read(len(_MAGIC)) != _MAGIC:
                raise NotGgufError(
                    f"{path} is not a GGUF file (it does not begin with GGUF)", "give a .gguf model"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, complete).shard(stat.st_size, stat.st_mtime)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist", "check the path of the model") from None
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read ({error.strerror})", "check the file and its rights"
        ) from error


@dataclass
class _Reader:
    """A position in a mapped file. Every step is checked against its end."""

    path: Path
    data: mmap.mmap
    complete: bool
    at: int = len(_MAGIC)
    metadata: dict[str, Scalar] = field(default_factory=dict)
    vocabulary_size: int = 0
    has_fim: bool = False

    def shard(self, size_bytes: int, modified_at_s: float) -> Shard:
        version = self._unsigned()
        if version not in _VERSIONS:
            swapped = " (or of big-endian byte order)" if version & 0xFFFF == 0 else ""
            raise NotGgufError(
                f"{self.path} is GGUF of version {version}{swapped}",
                f"little-endian versions {_VERSIONS[0]} and {_VERSIONS[1]} can be read; convert it again",
            )
        tensor_count, value_count = self._count(), self._count()
        keys: set[str] = set()
        for _ in range(value_count):
            key = self._name()
            if key in keys:
                raise self._damaged(f"key {key!r} twice")
            keys.add(key)
            self._value(key)
        has_fim = self.has_fim or any(key in self.metadata for key in _FIM_KEYS)
        tensors = self._tensors(tensor_count)
        return Shard(
            self.path, size_bytes, modified_at_s, self.metadata, tensors, self.vocabulary_size, has_fim
        )

    def _tensors(self, count: int) -> tuple[TensorInfo, ...]:
        infos = [self._tensor_info() for _ in range(count)]
        if len({info[0] for info in infos}) != len(infos):
            raise self._damaged("a tensor name twice")
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"an alignment of {alignment!r}")
        start = -(-self.at // alignment) * alignment
        end = max((start + offset + size for _, _, _, size, offset in infos), default=0)
        if self.complete and end > len(self.data):
            raise TruncatedError(
                f"{self.path} has {len(self.data)} bytes and its header describes {end}",
                "the download is incomplete; download it again",
            )
        return tuple(
            TensorInfo(name, shape, type_name, size, start + offset, self.path)
            for name, shape, type_name, size, offset in infos
        )

    def _tensor_info(self) -> tuple[str, tuple[int, ...], str, int, int]:
        name = self._name()
        dimensions = self._unsigned()
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"{dimensions} dimensions for tensor {name!r}")
        shape = tuple(self._count() for _ in range(dimensions))
        number = self._unsigned()
        try:
            kind = gguf.GGMLQuantizationType(number)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self._damaged(f"the unknown type {number} for tensor {name!r}") from None
        if shape[0] % block:
            raise self._damaged(f"rows of {shape[0]} for tensor {name!r} of type {kind.name}")
        return name, shape, str(kind.name), math.prod(shape) // block * block_bytes, self._count()

    def _value(self, key: str) -> None:
        kind = self._type(key)
        if kind == _T.ARRAY:
            self._skip_array(key)
        elif kind == _T.STRING:
            self.metadata[key] = self._bytes(self._count()).decode(errors="replace")
        else:
            self.metadata[key] = self._number(kind)

    def _skip_array(self, key: str) -> None:
        kind, count, start = self._type(key), self._count(), self.at
        if kind == _T.ARRAY:
            raise self._damaged(f"a list of lists for {key!r}")
        if kind == _T.STRING:
            self._need(8 * count)
            unpack, data, at, end = _STRUCTS[_T.UINT64].unpack_from, self.data, self.at, len(self.data) - 8
            for _ in range(count):
                if at > end:
                    raise self._cut()
                at += 8 + unpack(data, at)[0]
            self.at = at
            self._need(0)
        else:
            self._need(_STRUCTS[kind].size * count)
            self.at += _STRUCTS[kind].size * count
        if key == _TOKENS:
            self.vocabulary_size = count
            texts = [token.encode() for token in _FIM_TOKENS]
            self.has_fim = any(
                self.data.find(struct.pack("<Q", len(text)) + text, start, self.at) >= 0 for text in texts
            )

    def _type(self, key: str) -> gguf.GGUFValueType:
        number = self._unsigned()
        try:
            return _T(number)
        except ValueError:
            raise self._damaged(f"the unknown value type {number} for {key!r}") from None

    def _name(self) -> str:
        try:
            return self._bytes(self._count()).decode()
        except UnicodeDecodeError:
            raise self._damaged("a name that is not UTF-8") from None

    def _count(self) -> int:
        return int(self._number(_T.UINT64))

    def _unsigned(self) -> int:
        return int(self._number(_T.UINT32))

    def _number(self, kind: gguf.GGUFValueType) -> int | float | bool:
        layout = _STRUCTS[kind]
        self._need(layout.size)
        value: int | float | bool = layout.unpack_from(self.data, self.at)[0]
        self.at += layout.size
        return value

    def _bytes(self, count: int) -> bytes:
        self._need(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def _need(self, count: int) -> None:
        if self.at + count > len(self.data):
            raise self._cut()

    def _cut(self) -> TruncatedError:
        return TruncatedError(
            f"{self.path} ends inside its header, at byte {len(self.data)}",
            "the download is incomplete; download it again",
        )

    def _damaged(self, what: str) -> NotGgufError:
        return NotGgufError(
            f"{self.path} has {what} near byte {self.at} of its header",
            "the file is damaged or newer than this program; download it again or update moe-proxy",
        )
