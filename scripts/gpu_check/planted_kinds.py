"""Owns small models of every kind of expert tensor that the pager meets: random weights, real formats.

A kind is an architecture with its peculiarities (biases, a merged gate and up, dense first layers, shared
experts, a router that is a sigmoid with a bias) and the types of its expert weights, which differ from
layer to layer. Numpy and gguf alone; nothing here says how fast anything is.

Usage: python planted_kinds.py VOCABULARY.gguf FOLDER    writes FOLDER/KIND.gguf for each
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType, GGUFWriter, quants
from gguf import GGMLQuantizationType as Type

_WIDTH, _HEADS, _HEAD_WIDTH, _KV_HEADS = 256, 8, 64, 2
_DEVIATION = 0.05  # of all weights: activations neither vanish nor explode

# Where a block of each type keeps its float16 scale, and its offset (behind it) as a multiple of that scale
# which makes the values symmetric about zero.
_SCALES: dict[Type, tuple[int, float | None]] = {
    Type.Q4_0: (0, None),
    Type.Q4_1: (0, -7.5),
    Type.Q5_0: (0, None),
    Type.Q5_1: (0, -15.5),
    Type.Q8_0: (0, None),
    Type.Q2_K: (80, 1.5),
    Type.Q3_K: (108, None),
    Type.Q4_K: (0, 7.5),
    Type.Q5_K: (0, 15.5),
    Type.Q6_K: (208, None),
    Type.IQ2_XXS: (0, None),
    Type.IQ2_XS: (0, None),
    Type.IQ2_S: (0, None),
    Type.IQ3_XXS: (0, None),
    Type.IQ3_S: (0, None),
    Type.IQ1_S: (0, None),
    Type.IQ4_NL: (0, None),
    Type.IQ4_XS: (0, None),
}


@dataclass(frozen=True)
class Kind:
    """A model: ``types`` are those of gate and up, and of down, of each layer with experts."""

    types: tuple[tuple[Type, Type], ...]
    architecture: str = "qwen3moe"
    experts: int = 32
    used: int = 4
    dense_layers: int = 0
    merged: bool = False
    expert_width: int = 256


def _same(*types: Type) -> tuple[tuple[Type, Type], ...]:
    return tuple((kind, kind) for kind in types)


KINDS = {
    "legacy": Kind(_same(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)),
    "k": Kind(_same(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K)),
    "iq": Kind(_same(Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S)),
    "iq-more": Kind(_same(Type.IQ1_S, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4)),
    "mixed": Kind(((Type.Q4_K, Type.Q6_K), (Type.Q4_K, Type.Q4_K), (Type.Q3_K, Type.Q5_0))),
    "float": Kind(_same(Type.F16, Type.BF16, Type.F32)),
    "merged": Kind(_same(*[Type.Q4_K] * 3), "hy_v3", dense_layers=1, merged=True),
    "biases": Kind(_same(*[Type.MXFP4] * 4), "gpt-oss"),
    "512-experts": Kind(_same(*[Type.Q4_K] * 3), experts=512, used=16),
    "top-1": Kind(_same(*[Type.Q4_K] * 4), used=1),
}  # fmt: skip


class _Weights:
    """Random weights of a given standard deviation, in any type. ``shape`` has the row's length last."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)

    def floats(self, *shape: int, deviation: float = _DEVIATION) -> np.ndarray:
        return (self._random.standard_normal(shape) * deviation).astype(np.float32)

    def of(self, kind: Type, *shape: int) -> np.ndarray:
        if kind in (Type.F32, Type.F16, Type.BF16, Type.MXFP4):
            return quants.quantize(self.floats(*shape), kind)
        block, size = GGML_QUANT_SIZES[kind]
        blocks = self._random.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
        sample = blocks[:64].copy()
        self._set_scale(sample, kind, 1.0)
        unit = quants.dequantize(sample, kind).std()
        self._set_scale(blocks, kind, float(_DEVIATION / unit))
        return blocks.reshape(*shape[:-1], shape[-1] // block * size)

    def _set_scale(self, blocks: np.ndarray, kind: Type, scale: float) -> None:
        at, offset = _SCALES[kind]
        values = [scale] if offset is None else [scale, scale * offset]
        raw = np.array(values, np.float16).view(np.uint8)
        blocks[:, at : at + len(raw)] = raw


def _tensors(kind: Kind, vocabulary: int) -> Iterator[tuple[str, np.ndarray, Type]]:
    weights = _Weights()

    def floats(name: str, *shape: int) -> tuple[str, np.ndarray, Type]:
        return name, weights.floats(*shape), Type.F32

    def ones(name: str, width: int) -> tuple[str, np.ndarray, Type]:
        return name, np.ones(width, np.float32), Type.F32

    def packed(name: str, of: Type, *shape: int) -> tuple[str, np.ndarray, Type]:
        return name, weights.of(of, *shape), of

    biased = kind.architecture == "gpt-oss"
    q_width, kv_width = _HEADS * _HEAD_WIDTH, _KV_HEADS * _HEAD_WIDTH
    yield packed("token_embd.weight", Type.Q8_0, vocabulary, _WIDTH)
    yield packed("output.weight", Type.Q8_0, vocabulary, _WIDTH)
    yield ones("output_norm.weight", _WIDTH)
    for layer in range(kind.dense_layers + len(kind.types)):
        block = f"blk.{layer}."
        yield ones(f"{block}attn_norm.weight", _WIDTH)
        for name, rows, columns in (
            ("attn_q", q_width, _WIDTH), ("attn_k", kv_width, _WIDTH),
            ("attn_v", kv_width, _WIDTH), ("attn_output", _WIDTH, q_width),
        ):  # fmt: skip
            yield packed(f"{block}{name}.weight", Type.Q8_0, rows, columns)
            if biased:
                yield floats(f"{block}{name}.bias", rows)
        if biased:
            yield floats(f"{block}attn_sinks.weight", _HEADS)
        else:
            yield ones(f"{block}attn_q_norm.weight", _HEAD_WIDTH)
            yield ones(f"{block}attn_k_norm.weight", _HEAD_WIDTH)
        yield ones(f"{block}{'post_attention_norm' if biased else 'ffn_norm'}.weight", _WIDTH)
        if layer < kind.dense_layers:
            yield from _ffn(packed, f"{block}ffn", "", Type.Q8_0, Type.Q8_0, (), 2 * kind.expert_width)
            continue
        yield f"{block}ffn_gate_inp.weight", weights.floats(kind.experts, _WIDTH, deviation=0.1), Type.F32
        inner, down = kind.types[layer - kind.dense_layers]
        if kind.merged:
            yield packed(
                f"{block}ffn_gate_up_exps.weight", inner, kind.experts, 2 * kind.expert_width, _WIDTH
            )
            yield packed(f"{block}ffn_down_exps.weight", down, kind.experts, _WIDTH, kind.expert_width)
        else:
            yield from _ffn(packed, f"{block}ffn", "_exps", inner, down, (kind.experts,), kind.expert_width)
        if biased:
            yield floats(f"{block}ffn_gate_inp.bias", kind.experts)
            for name, width in (("gate", kind.expert_width), ("up", kind.expert_width), ("down", _WIDTH)):
                yield floats(f"{block}ffn_{name}_exps.bias", kind.experts, width)
        if kind.architecture == "hy_v3":
            yield floats(f"{block}exp_probs_b", kind.experts)
            yield from _ffn(packed, f"{block}ffn", "_shexp", Type.Q8_0, Type.Q8_0, (), kind.expert_width)


_Packed = Callable[..., tuple[str, np.ndarray, Type]]


def _ffn(
    packed: _Packed, start: str, end: str, inner: Type, down: Type, lead: tuple[int, ...], width: int
) -> Iterator[tuple[str, np.ndarray, Type]]:
    yield packed(f"{start}_gate{end}.weight", inner, *lead, width, _WIDTH)
    yield packed(f"{start}_up{end}.weight", inner, *lead, width, _WIDTH)
    yield packed(f"{start}_down{end}.weight", down, *lead, _WIDTH, width)


def write(vocabulary_file: Path, kind: Kind, out: Path) -> None:
    """Write the model of that kind."""
    vocabulary = GGUFReader(str(vocabulary_file))
    writer = GGUFWriter(str(out), kind.architecture)
    for field in vocabulary.fields.values():
        if field.name.startswith("tokenizer."):
            array = field.types[0] == GGUFValueType.ARRAY
            inner = field.types[-1] if array else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    tokens = len(vocabulary.fields["tokenizer.ggml.tokens"].contents())
    writer.add_context_length(4096)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(kind.dense_layers + len(kind.types))
    writer.add_feed_forward_length(2 * kind.expert_width)
    writer.add_expert_feed_forward_length(kind.expert_width)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD_WIDTH)
    writer.add_value_length(_HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(kind.experts)
    writer.add_expert_used_count(kind.used)
    writer.add_vocab_size(tokens)
    if kind.architecture == "gpt-oss":
        writer.add_sliding_window(128)
    if kind.architecture == "hy_v3":
        writer.add_expert_shared_feed_forward_length(kind.expert_width)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(1.0)
    for name, data, of in _tensors(kind, tokens):
        writer.add_tensor(name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:  # most of the time goes into reading and writing the vocabulary
        jobs = [
            pool.submit(write, arguments.vocabulary, kind, arguments.folder / f"{name}.gguf")
            for name, kind in KINDS.items()
        ]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main()
