"""Owns reading the frozen dense model out of its GGUF file: shapes, weights, tokenizer; it changes none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True)
class Dense:
    """The dense model: ``tensors`` are float32 arrays, rows first, named as in the GGUF file."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    rope_base: float
    epsilon: float
    tensors: dict[str, npt.NDArray[np.float32]]


def read_dense(path: Path) -> Dense:
    """Read a ``llama`` GGUF and dequantise all of it."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    return Dense(
        layers=int(value("block_count")),
        width=int(value("embedding_length")),
        heads=int(value("attention.head_count")),
        kv_heads=int(value("attention.head_count_kv")),
        rope_base=float(value("rope.freq_base")),
        epsilon=float(value("attention.layer_norm_rms_epsilon")),
        tensors={
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            for tensor in reader.tensors
        },
    )


def write_tokenizer(model: Path, target: Path) -> None:
    """Write the tokenizer of a GGUF file with SmolLM's pre-tokenizer as a ``tokenizers`` JSON file."""
    fields = gguf.GGUFReader(model).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    target.write_text(json.dumps(json.loads(tokenizer.to_str())), encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that ``write_tokenizer`` wrote."""
    return Tokenizer.from_file(str(path))
