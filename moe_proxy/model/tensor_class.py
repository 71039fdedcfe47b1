"""Owns which part of a model a tensor belongs to, by its name in a GGUF. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moe_proxy.model.gguf_header import TensorInfo

# The first that matches; names are those of llama.cpp.
_CLASSES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("experts", r"ffn_(gate|up|down|gate_up)_exps\.weight$"),
        ("shared experts", r"ffn_\w+_shexp"),
        ("router", r"ffn_gate_inp|exp_probs"),
        ("norms", r"norm"),
        ("attention", r"blk\.\d+\.(attn|indexer)"),
        ("recurrent", r"blk\.\d+\.(ssm|shortconv|time_mix)"),
        ("dense feed-forward", r"blk\.\d+\.ffn_(gate|up|down)\."),
        ("embeddings", r"^token_embd"),
        ("output", r"^output\."),
    )
)


@dataclass(frozen=True)
class TensorClass:
    """All tensors of one kind: their bytes, and how many there are of each type."""

    name: str
    size_bytes: int
    types: tuple[tuple[str, int], ...]


def class_of(name: str) -> str:
    """The part of the model that the tensor of this name belongs to."""
    return next((kind for kind, pattern in _CLASSES if pattern.search(name)), "other")


def tensor_classes(tensors: Iterable[TensorInfo]) -> tuple[TensorClass, ...]:
    """The classes that there are, the largest first."""
    sizes: Counter[str] = Counter()
    types: dict[str, Counter[str]] = {}
    for tensor in tensors:
        kind = class_of(tensor.name)
        sizes[kind] += tensor.size_bytes
        types.setdefault(kind, Counter())[tensor.type_name] += 1
    return tuple(
        TensorClass(kind, size, tuple(types[kind].most_common())) for kind, size in sizes.most_common()
    )
