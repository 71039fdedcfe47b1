"""Owns a model of real shape with planted routing: random weights, experts chosen by a token's domain.

The text that it makes means nothing. What is real: the sizes of all tensors, the vocabulary, and how picks
repeat. A token's embedding is a random unit vector, plus a direction of the token's domain, plus one that all
share; each row of a router answers to those directions with random strength, ``skew`` times as strongly as to
the token itself. With the skew of 1.2 an LRU over 40 % of the experts hits about 92 % of the picks, which is
what is reported for Qwen3-30B-A3B.

Usage: python planted_large.py VOCABULARY.gguf OUT.gguf [--shape qwen3-30b-a3b] [--skew 1.2]
Needs torch, numpy and gguf; the vocabulary is models/ggml-vocab-qwen2.gguf of llama.cpp's source.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

_DOMAINS = ("code", "math", "chinese", "prose")
_BLOCK, _BLOCK_BYTES = 256, 144  # of Q4_K: elements and bytes


@dataclass(frozen=True)
class Shape:
    """Dimensions of a qwen3moe model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    experts: int
    used: int
    expert_width: int


SHAPES = {
    "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 128, 128, 8, 768),
    "tiny": Shape(4, 512, 8, 2, 64, 32, 4, 256),
}


@dataclass(frozen=True)
class Planned:
    """A tensor that is written later: name, rows and columns, type, and what makes its data."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    make: Callable[[], np.ndarray]


class Planter:
    """Makes the tensors of one model; the same seed gives the same file on the same kind of device."""

    def __init__(self, shape: Shape, tokens: list[str], skew: float) -> None:
        self.shape, self.skew = shape, skew
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.random = torch.Generator(self.device).manual_seed(11)
        self.domain = torch.tensor([_domain(token) for token in tokens], device=self.device)
        # Orthonormal: one direction for each domain, the last for what all tokens share.
        basis = torch.linalg.qr(self._normal(shape.width, len(_DOMAINS) + 1))[0]
        self.directions = basis.T.contiguous()

    def tensors(self) -> Iterator[Planned]:
        """All tensors in the order in which they are written."""
        s, tokens = self.shape, len(self.domain)
        yield Planned("token_embd.weight", (tokens, s.width), GGMLQuantizationType.F16, self._embedding)
        yield Planned("output.weight", (tokens, s.width), GGMLQuantizationType.F16, self._head)
        yield _ones("output_norm.weight", s.width)
        for layer in range(s.layers):
            block = f"blk.{layer}."
            for name, width in (("attn_norm", s.width), ("ffn_norm", s.width)):
                yield _ones(f"{block}{name}.weight", width)
            for name in ("attn_q_norm", "attn_k_norm"):
                yield _ones(f"{block}{name}.weight", s.head_width)
            yield self._q4(f"{block}attn_q.weight", (s.heads * s.head_width, s.width), 0.02)
            yield self._q4(f"{block}attn_k.weight", (s.kv_heads * s.head_width, s.width), 0.02)
            # Nearly silent: what a layer adds must not drown the planted directions.
            yield self._q4(f"{block}attn_v.weight", (s.kv_heads * s.head_width, s.width), 2e-4)
            yield self._q4(f"{block}attn_output.weight", (s.width, s.heads * s.head_width), 2e-4)
            router = (s.experts, s.width)
            yield Planned(f"{block}ffn_gate_inp.weight", router, GGMLQuantizationType.F32, self._router)
            for name in ("ffn_gate_exps", "ffn_up_exps"):
                yield self._q4(f"{block}{name}.weight", (s.experts, s.expert_width, s.width), 0.01)
            yield self._q4(f"{block}ffn_down_exps.weight", (s.experts, s.width, s.expert_width), 2e-4)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.random)

    def _embedding(self) -> np.ndarray:
        vectors = self._normal(len(self.domain), self.shape.width) / self.shape.width**0.5
        vectors += 0.7 * self.directions[self.domain] + 0.7 * self.directions[-1]
        return vectors.half().cpu().numpy()

    def _head(self) -> np.ndarray:
        vectors = 0.5 * self._normal(len(self.domain), self.shape.width) / self.shape.width**0.5
        return (vectors + 0.5 * self.directions[self.domain]).half().cpu().numpy()

    def _router(self) -> np.ndarray:
        """Rows whose logits have deviation 1 from the token and ``skew`` from what is planted.

        After RMSNorm a token's vector has length sqrt(width); half of that lies along each planted direction.
        """
        s = self.shape
        rows = self._normal(s.experts, s.width) * (2 / s.width) ** 0.5
        rows -= (rows @ self.directions.T) @ self.directions
        strength = self._normal(s.experts, len(_DOMAINS) + 1) * (2 * self.skew / s.width**0.5)
        strength[:, :-1] *= 0.8
        strength[:, -1] *= 0.6
        return (rows + strength @ self.directions).float().cpu().numpy()

    def _q4(self, name: str, shape: tuple[int, ...], deviation: float) -> Planned:
        def make() -> np.ndarray:
            blocks = int(np.prod(shape)) // _BLOCK
            data = torch.randint(
                256, (blocks, _BLOCK_BYTES), dtype=torch.uint8, device=self.device, generator=self.random
            )
            # Scale and offset of the block; the offset makes its values symmetric about 0.
            scales = torch.tensor([deviation / 200, 7.5 * deviation / 200], dtype=torch.float16)
            data[:, :4] = scales.to(self.device).view(torch.uint8)
            return data.cpu().numpy().reshape(*shape[:-1], shape[-1] // _BLOCK * _BLOCK_BYTES)

        return Planned(name, shape, GGMLQuantizationType.Q4_K, make)


def _ones(name: str, width: int) -> Planned:
    return Planned(name, (width,), GGMLQuantizationType.F32, lambda: np.ones(width, np.float32))


def _domain(token: str) -> int:
    """Index into ``_DOMAINS`` by the token's own text; what says nothing is mostly prose."""
    if any(character in "_{}();=<>[]#/\\|&*" for character in token):
        return 0
    if any(character in "0123456789+-^%" for character in token):
        return 1
    return (3, 3, 3, 3, 3, 0, 1, 2)[zlib.crc32(token.encode()) % 8]


def write(vocabulary: Path, out: Path, shape: Shape, skew: float) -> None:
    """Write the model: metadata first, then tensor after tensor, so that only one is in memory."""
    reader = GGUFReader(str(vocabulary))
    writer = GGUFWriter(str(out), "qwen3moe")
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            array = field.types[0] == GGUFValueType.ARRAY
            inner = field.types[-1] if array else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    writer.add_name("planted large")
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.expert_width * shape.used)
    writer.add_expert_feed_forward_length(shape.expert_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_vocab_size(len(tokens))
    planned = list(Planter(shape, tokens, skew).tensors())
    for tensor in planned:
        quantized = tensor.kind == GGMLQuantizationType.Q4_K
        kind = {"F16": np.float16, "F32": np.float32}.get(tensor.kind.name, np.uint8)
        stored = tensor.shape
        if quantized:
            stored = (*stored[:-1], stored[-1] // _BLOCK * _BLOCK_BYTES)
        size = int(np.prod(stored)) * np.dtype(kind).itemsize
        writer.add_tensor_info(tensor.name, stored, np.dtype(kind), size, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in planned:
        writer.write_tensor_data(tensor.make())
    writer.close()


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--skew", type=float, default=1.2)
    arguments = parser.parse_args()
    write(arguments.vocabulary, arguments.out, SHAPES[arguments.shape], arguments.skew)


if __name__ == "__main__":
    main()
