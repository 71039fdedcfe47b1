"""The layout: which layers have experts, how large one is, which model it is."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from moe_proxy.errors import NotGgufError, NotMoeError, TruncatedError
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import ModelLayout, layout_of
from tests.support.moe_file import EXPERTS, write_moe


def layout(path: Path) -> ModelLayout:
    """Layout of a file."""
    return layout_of(read_header(path))


@pytest.mark.parametrize("fused", [False, True])
def test_layers_and_bytes(tmp_path: Path, fused: bool) -> None:
    """MoE layers, bytes of one expert with all its slabs, and the rest; dense layers have no row."""
    found = layout(write_moe(tmp_path / "m.gguf", fused=fused))
    one = 3 * 8 * 32 * 2
    assert found.layers == (1, 2)
    assert (found.experts, found.experts_used) == (EXPERTS, 2)
    assert found.expert_bytes == {1: one, 2: one}
    assert found.total_expert_bytes == 2 * EXPERTS * one
    assert found.dense_bytes == (3 + 8 + 2 * EXPERTS) * 32 * 4 + 2 * 8 * 32 * 2


def test_fingerprint_is_of_the_model(tmp_path: Path) -> None:
    """It follows architecture, shapes, tokenizer and router weights, not the name or the experts' types."""
    fingerprint = layout(write_moe(tmp_path / "a.gguf")).fingerprint
    assert len(fingerprint) == 64
    assert set(fingerprint) <= set("0123456789abcdef")
    assert layout(write_moe(tmp_path / "b.gguf", name="other")).fingerprint == fingerprint
    assert layout(write_moe(tmp_path / "c.gguf", dtype=np.float32)).fingerprint == fingerprint
    assert layout(write_moe(tmp_path / "d.gguf", router=2.0)).fingerprint != fingerprint
    assert layout(write_moe(tmp_path / "e.gguf", fused=True)).fingerprint != fingerprint


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    """A GGUF that is no MoE: the message says what this program serves."""
    path = tmp_path / "dense.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.ones((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(NotMoeError, match=r"llama.*no expert tensors.*Mixture-of-Experts"):
        layout(path)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    """Tensors that contradict the header are a damaged file."""
    with pytest.raises(NotGgufError, match="8 experts"):
        layout(write_moe(tmp_path / "a.gguf", header_experts=8))
    with pytest.raises(NotGgufError, match="5 of 4 experts"):
        layout(write_moe(tmp_path / "b.gguf", experts_used=5))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """Router weights that are gone by the time they are read are a truncated file."""
    path = write_moe(tmp_path / "m.gguf")
    header = read_header(path)
    with path.open("r+b") as file:
        file.truncate(header.tensors[0].offset_bytes)
    with pytest.raises(TruncatedError, match="ffn_gate_inp"):
        layout_of(header)
