"""Owns what a model takes beside its experts: dense weights, KV cache, recurrent state, compute buffers.

The one place of these estimates. They come from the tensors' shapes, which tell layers apart where a header
gives lists; what cannot be told is estimated from above: a sliding window counts as all of the context.
Nothing is read but the header.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import gguf

from moe_proxy.errors import ConfigError
from moe_proxy.model.gguf_header import GgufHeader, TensorInfo
from moe_proxy.model.layout import EXPERT_TENSOR, ModelLayout

_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)\.weight$")
_CELLS = 256
"""llama.cpp rounds the cells of a KV cache up to a multiple of this."""
_STATE_BYTES = 4  # recurrent state is kept in float32
_MASK_BYTES = 2  # the mask of flash attention is float16
_FLOAT_BYTES = 4

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Types of a KV cache that llama-server takes."""


@dataclass(frozen=True)
class Footprint:
    """Sizes of one model that do not depend on how it is served.

    ``table_bytes``: the token embeddings; they stay in RAM, and a token reads one row. ``tied``: they are the
    output matrix too. ``key_width``, ``value_width``: numbers cached per token, over all layers.
    ``state_width``: numbers of recurrent state per sequence. ``activation_width``: numbers that a token of a
    batch needs while it is computed. ``staged_bytes``: the largest tensor of experts.
    """

    dense_bytes: int
    table_bytes: int
    tied: bool
    key_width: int
    value_width: int
    state_width: int
    activation_width: int
    staged_bytes: int

    @property
    def device_bytes(self) -> int:
        """Dense weights that a GPU holds; a tied table lies in VRAM too."""
        return self.dense_bytes - (0 if self.tied else self.table_bytes)

    @property
    def read_bytes(self) -> int:
        """Dense weights that a token reads: of a table that is nothing else, next to nothing."""
        return self.dense_bytes - (0 if self.tied else self.table_bytes)

    def kv_bytes(
        self, tokens: int, key_type: str = "f16", value_type: str = "f16", sequences: int = 1
    ) -> int:
        """KV cache and recurrent state for ``tokens`` of context in all. Raises ConfigError for a type."""
        cells = -(-tokens // _CELLS) * _CELLS
        cached = self.key_width * _bytes_per_number(key_type) + self.value_width * _bytes_per_number(
            value_type
        )
        return int(cells * cached) + sequences * self.state_width * _STATE_BYTES

    def compute_bytes(self, tokens: int, batch: int) -> int:
        """Compute buffers for batches of ``batch`` tokens, from above: activations and the attention mask."""
        return batch * (self.activation_width * _FLOAT_BYTES + tokens * _MASK_BYTES)


def footprint_of(header: GgufHeader, layout: ModelLayout) -> Footprint:
    """Footprint of the model in ``header``."""
    blocks: defaultdict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for tensor in header.tensors:
        if match := _BLOCK.match(tensor.name):
            blocks[int(match[1])][match[2]] = tensor
    widths = [_cached(header, block) for block in blocks.values()]
    named = {tensor.name: tensor for tensor in header.tensors}
    table = named.get("token_embd.weight")
    return Footprint(
        dense_bytes=layout.dense_bytes,
        table_bytes=table.size_bytes if table else 0,
        tied="output.weight" not in named,
        key_width=sum(key for key, _ in widths),
        value_width=sum(value for _, value in widths),
        state_width=sum(_state(header, block) for block in blocks.values()),
        # What each picked expert gives, before and after its weight, and their sum; three hidden vectors.
        activation_width=3 * (layout.experts_used + 1) * header.embedding_length,
        staged_bytes=max((t.size_bytes for t in header.tensors if EXPERT_TENSOR.match(t.name)), default=0),
    )


def _cached(header: GgufHeader, block: dict[str, TensorInfo]) -> tuple[int, int]:
    """Numbers that one layer's attention caches per token: of keys, and of values."""
    if _is_recurrent(block):
        return 0, 0
    if "attn_k" in block:
        value = block.get("attn_v", block["attn_k"])
        return block["attn_k"].shape[-1], value.shape[-1]
    if "attn_kv_a_mqa" in block and "attn_k_b" in block:
        # Latent attention: one compressed row, from which keys and values are both made.
        return block["attn_kv_a_mqa"].shape[-1], 0
    heads = _number(header, "attention.head_count")
    key = _number(header, "attention.key_length") or header.embedding_length // max(heads, 1)
    value_length = _number(header, "attention.value_length") or key
    if "attn_kv_a_mqa" in block:
        return heads * key, heads * value_length
    if "attn_qkv" in block:
        kv_heads = _number(header, "attention.head_count_kv") or heads
        return kv_heads * key, kv_heads * value_length
    return 0, 0


def _is_recurrent(block: dict[str, TensorInfo]) -> bool:
    return any(name.startswith("ssm_") for name in block)


def _state(header: GgufHeader, block: dict[str, TensorInfo]) -> int:
    """Numbers of state that one recurrent layer keeps per sequence: convolution and state space."""
    if not _is_recurrent(block):
        return 0
    inner, size = _number(header, "ssm.inner_size"), _number(header, "ssm.state_size")
    taps = max(_number(header, "ssm.conv_kernel") - 1, 0)
    return taps * (inner + 2 * _number(header, "ssm.group_count") * size) + size * inner


def _number(header: GgufHeader, key: str) -> int:
    """A count of the header; 0 where it gives none, or a list of them."""
    value = header.metadata.get(f"{header.architecture}.{key}", 0)
    return value if type(value) is int and value > 0 else 0


def _bytes_per_number(name: str) -> float:
    if name not in CACHE_TYPES:
        raise ConfigError(f"{name!r} is no type of a KV cache", f"one of {', '.join(CACHE_TYPES)}")
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    return float(block_bytes) / float(block)
