"""The planted model: the same bytes everywhere, and the routing that its text promises."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moe_proxy.domains.base import DOMAINS
from moe_proxy.model import planted
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.model.planted_vocabulary import vocabulary

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with the model in it."""
    directory = tmp_path_factory.mktemp("cache")
    planted.planted_path(directory)
    return directory


@pytest.fixture(scope="module")
def weights() -> dict[str, Floats]:
    """All tensors but the experts and the head."""
    return {
        name: np.asarray(array, np.float32)
        for name, array in planted.planted_tensors()
        if "exps" not in name and not name.startswith("output.")
    }


def test_bytes_are_the_same_everywhere(cache: Path) -> None:
    """The file is the same, byte for byte, on every machine and with every version of numpy."""
    path = planted.planted_path(cache)
    assert path == cache / "models" / "planted-moe.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == planted.PLANTED_SHA256
    assert path.stat().st_size < 60e6


def test_it_is_a_moe_with_whole_pages(cache: Path) -> None:
    """Its slabs are whole pages at page boundaries of the file."""
    header = read_header(planted.planted_path(cache))
    layout = layout_of(header)
    assert (header.architecture, header.name, header.quantization) == ("qwen3moe", "planted-moe", "F16")
    assert (layout.layers, layout.experts, layout.experts_used) == (tuple(range(6)), 32, 4)
    for tensor in header.tensors:
        if "_exps" in tensor.name:
            assert tensor.offset_bytes % planted.PAGE_BYTES == 0
            assert tensor.size_bytes // layout.experts % planted.PAGE_BYTES == 0


def test_it_is_made_once_and_healed(cache: Path) -> None:
    """A second call makes nothing; a file that is not what it should be is made anew."""
    path = planted.planted_path(cache)
    before = path.stat().st_mtime_ns
    assert planted.planted_path(cache).stat().st_mtime_ns == before
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    planted.planted_path(cache)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == planted.PLANTED_SHA256
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_vocabulary_covers_all_bytes_once() -> None:
    """Any text can be tokenised, and no two tokens have one text."""
    tokens = vocabulary()
    texts = [token.text for token in tokens]
    assert len(set(texts)) == len(texts)
    assert [token.text for token in tokens[:256]] == [bytes([b]) for b in range(256)]
    spoken = [(token.domain, token.place) for token in tokens if token.spoken]
    assert sorted(spoken) == [(domain, place) for domain in range(8) for place in range(planted.RING)]
    for token in tokens:
        if token.spoken:
            assert token.text.decode().isprintable()


def picks(
    weights: dict[str, Floats], layer: int, own: int | None, context: int | None
) -> tuple[Floats, Floats]:
    """Router logits, sorted from the largest, and the experts in that order, for each routing class."""
    hidden = np.zeros((planted.CLASSES, planted.WIDTH), np.float32)
    hidden[:, planted.COMMON] = 1
    hidden[:, planted.CLASS] = np.eye(planted.CLASSES)
    if own is not None:
        hidden[:, own] += planted.OWN
    if context is not None:
        hidden[:, context] += 1
    logits = hidden @ weights[f"blk.{layer}.ffn_gate_inp.weight"].T
    order = np.argsort(-logits, axis=1, kind="stable")
    return np.take_along_axis(logits, order, axis=1), order


def test_no_two_experts_are_close(weights: dict[str, Floats]) -> None:
    """Routing does not depend on the order of float sums: the last pick is ahead by more than rounding."""
    used = planted.EXPERTS_USED
    for layer in range(planted.LAYERS):
        for context in (None, *range(len(DOMAINS))):
            for own in (None, context):
                logits, _ = picks(weights, layer, own, context)
                assert (logits[:, used - 1] - logits[:, used]).min() > 5e-4


def test_routing_follows_the_domain(weights: dict[str, Floats]) -> None:
    """Domains use clearly different experts, with a common part; most picks are of the domain's hot ones."""
    for layer in range(planted.LAYERS):
        hot, common = planted.hot_experts(layer)
        used_by: list[set[int]] = []
        for domain in range(len(DOMAINS)):
            picked = [
                int(expert)
                for own in (None, domain)
                for expert in picks(weights, layer, own, domain)[1][:, : planted.EXPERTS_USED].ravel()
            ]
            expected = {*hot[domain].tolist(), *common.tolist()}
            assert np.mean([expert in expected for expert in picked]) > 0.75
            top = sorted(set(picked), key=lambda expert: -picked.count(expert))[:10]
            used_by.append(set(top))
        overlaps = [len(a & b) for i, a in enumerate(used_by) for b in used_by[:i]]
        assert np.mean(overlaps) < 5
        assert set().union(*used_by) >= set(range(planted.EXPERTS))


def test_router_reads_nothing_that_experts_write(weights: dict[str, Floats]) -> None:
    """Experts write the answer only, and neither router nor attention reads it."""
    for layer in range(planted.LAYERS):
        assert not weights[f"blk.{layer}.ffn_gate_inp.weight"][:, planted.ANSWER].any()
        for name in ("attn_q", "attn_k", "attn_v"):
            assert not weights[f"blk.{layer}.{name}.weight"][:, planted.ANSWER].any()
    down = next(array for name, array in planted.planted_tensors() if name == "blk.0.ffn_down_exps.weight")
    assert not down[:, : planted.ANSWER.start].any()
    assert down[:, planted.ANSWER].any()
