"""What a model takes beside its experts, from the shapes of its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_proxy.errors import ConfigError
from moe_proxy.model.footprint import Footprint, footprint_of
from moe_proxy.model.gguf_header import GgufHeader, TensorInfo, read_header
from moe_proxy.model.layout import ModelLayout, layout_of

MIB = 2**20
LAYOUT = ModelLayout("a", "m", (0,), 8, 2, {0: 100}, 1000, "ab" * 32)


def header(metadata: dict[str, int], **tensors: tuple[int, ...]) -> GgufHeader:
    """A model of architecture ``a`` and width 64 whose tensors have these shapes; ``__`` stands for a dot."""
    path = Path("m.gguf")
    infos = tuple(
        TensorInfo(f"{name.replace('__', '.')}.weight", shape, "F16", 7, 0, path)
        for name, shape in tensors.items()
    )
    values = {f"a.{key}": value for key, value in metadata.items()}
    return GgufHeader(
        (path,), "a", "m", "", 0, 0, "F16", 4096, 64, 1, 8, 2, "", False, 10, 0.0, values, infos
    )


def footprint(metadata: dict[str, int] | None = None, **tensors: tuple[int, ...]) -> Footprint:
    """Footprint of such a model."""
    return footprint_of(header(metadata or {}, **tensors), LAYOUT)


@pytest.mark.parametrize(("tokens", "kv_mib", "compute_mib"), [(2048, 6.0, 7.01), (8192, 24.0, 13.01)])
def test_the_planted_model_against_the_engine(
    planted_model: Path, tokens: int, kv_mib: float, compute_mib: float
) -> None:
    """KV cache and compute buffers beside what llama-server says it takes: the one equal, the other above."""
    read = read_header(planted_model)
    found = footprint_of(read, layout_of(read))
    assert found.kv_bytes(tokens) == kv_mib * MIB
    assert compute_mib <= found.compute_bytes(tokens, 512) / MIB <= 1.5 * compute_mib
    assert not found.tied
    assert found.device_bytes == found.dense_bytes - found.table_bytes


def test_attention_of_several_kinds() -> None:
    """Keys and values are told from the shapes of each layer: grouped, fused, latent, none."""
    grouped = footprint(blk__0__attn_k=(64, 32), blk__0__attn_v=(64, 16), blk__1__attn_k=(64, 8))
    assert (grouped.key_width, grouped.value_width) == (40, 24)
    latent = footprint(blk__0__attn_kv_a_mqa=(64, 36), blk__0__attn_k_b=(8, 8, 2))
    assert (latent.key_width, latent.value_width) == (36, 0)
    unfolded = {"attention.head_count": 4, "attention.key_length": 24, "attention.value_length": 16}
    older = footprint(unfolded, blk__0__attn_kv_a_mqa=(64, 36), blk__0__attn_kv_b=(8, 8))
    assert (older.key_width, older.value_width) == (96, 64)
    fused = footprint({"attention.head_count": 4, "attention.head_count_kv": 2}, blk__0__attn_qkv=(64, 128))
    assert (fused.key_width, fused.value_width) == (32, 32)


def test_recurrent_layers_keep_a_state_and_no_cache() -> None:
    """A layer with a state space takes the same for any context, once per sequence."""
    sizes = {"ssm.inner_size": 32, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.conv_kernel": 4}
    found = footprint(sizes, blk__0__ssm_in=(64, 64), blk__0__attn_qkv=(64, 96), blk__1__attn_k=(64, 32))
    assert found.key_width == 32
    state = (3 * (32 + 2 * 2 * 16) + 16 * 32) * 4
    one, two = found.kv_bytes(256), found.kv_bytes(256, sequences=2)
    assert two - one == state
    assert found.kv_bytes(512) - one == 256 * 64 * 2


def test_types_of_the_cache() -> None:
    """A quantised cache takes what its blocks take; cells come in blocks; no other type is known."""
    found = footprint(blk__0__attn_k=(64, 32))
    assert found.kv_bytes(1) == found.kv_bytes(256) == 256 * 64 * 2
    assert found.kv_bytes(256, "q8_0", "f16") == 256 * 32 * 34 // 32 + 256 * 32 * 2
    with pytest.raises(ConfigError, match="'q3' is no type"):
        found.kv_bytes(256, "q3")
