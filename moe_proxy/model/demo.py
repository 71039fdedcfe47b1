"""Owns how the demonstration model is put together: SmolLM2's own tensors and the routed experts that ship.

The dense model's tensors are copied byte for byte, with its feed-forward networks renamed to shared experts;
routers and routed experts come from the shipped weights. It fetches nothing and runs nothing.

Routed experts are unpacked from Q4_0 to half precision, so that each of their slabs is whole pages of the
file and can be kept in memory by itself. The file is the same, byte for byte, on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from moe_proxy.errors import ModelFileError

DEMO_NAME = "smollm2-moe-demo"
DEMO_SHA256 = "e5d1933776ca8d7bac3f28a777da94eb493a4f8c4f22ba0e5209d92ceb0bfe63"

ARCHITECTURE = "deepseek"
PAGE_BYTES = 4096
_Q4_0_BLOCK = 32
_DENSE_ARCHITECTURE = "llama"
_FFN = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down)\.weight$")
# Facts about the dense model that are not true of this one.
_DROPPED = frozenset(
    {
        "general.architecture",
        "general.name",
        "general.basename",
        "general.finetune",
        "general.size_label",
        "general.file_type",
        "general.alignment",
    }
)
_ROUTED_KEYS = (
    "leading_dense_block_count",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_weights_scale",
)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The parts of the shipped weights, in order. Raises ModelFileError when there are none."""
    parts = tuple(sorted(folder.glob(f"{DEMO_NAME}-*-of-*.gguf")))
    if not parts or len(parts) != int(parts[0].stem.rpartition("-")[2]):
        raise ModelFileError(f"{folder} does not hold all parts of {DEMO_NAME}", "reinstall moe-proxy")
    return parts


def write_demo_moe(dense: Path, weights: Path, target: Path, *, half: bool = False) -> None:
    """Write the model made of the GGUF ``dense`` and the parts in the folder ``weights`` to ``target``.

    ``half`` unpacks the dense part to half precision too: for comparing with the training code, whose
    arithmetic does not round activations to 8 bits. Raises ModelFileError for another kind of dense model.
    """
    base = gguf.GGUFReader(dense)
    architecture = base.fields["general.architecture"].contents()
    if architecture != _DENSE_ARCHITECTURE:
        raise ModelFileError(
            f"{dense} is a {architecture} model, not {_DENSE_ARCHITECTURE}",
            "give SmolLM2-135M-Instruct's GGUF",
        )
    parts = [gguf.GGUFReader(path) for path in weight_files(weights)]
    facts = {key: parts[0].fields[f"{ARCHITECTURE}.{key}"] for key in _ROUTED_KEYS}
    writer = gguf.GGUFWriter(target, ARCHITECTURE)
    writer.add_name(DEMO_NAME)
    writer.add_basename(DEMO_NAME)
    writer.add_description("SmolLM2-135M-Instruct with routed experts beside its feed-forward networks")
    writer.add_custom_alignment(PAGE_BYTES)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.MOSTLY_Q4_1)
    for key, field in base.fields.items():
        if not key.startswith("GGUF.") and key not in _DROPPED:
            _copy(writer, key.replace(f"{_DENSE_ARCHITECTURE}.", f"{ARCHITECTURE}.", 1), field)
    for key, field in facts.items():
        _copy(writer, f"{ARCHITECTURE}.{key}", field)
    width = int(facts["expert_feed_forward_length"].contents())
    shared = int(base.fields[f"{_DENSE_ARCHITECTURE}.feed_forward_length"].contents())
    writer.add_expert_shared_count(shared // width)
    first_moe = int(facts["leading_dense_block_count"].contents())
    for tensor in base.tensors:
        name = _shared_name(tensor.name, first_moe)
        if half and tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, _half(tensor))
        else:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, array in _routed(parts):
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy(writer: gguf.GGUFWriter, key: str, field: gguf.ReaderField) -> None:
    kind = field.types[0]
    item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(key, field.contents(), kind, sub_type=item)


def _shared_name(name: str, first_moe: int) -> str:
    """The dense feed-forward network of a MoE layer is its shared expert."""
    match = _FFN.match(name)
    if match is None or int(match[1]) < first_moe:
        return name
    return f"blk.{match[1]}.ffn_{match[2]}_shexp.weight"


def _routed(parts: list[gguf.GGUFReader]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Routers in single precision, as llama.cpp wants them; experts in half."""
    for part in parts:
        for tensor in part.tensors:
            half = _half(tensor)
            yield tensor.name, half.astype(np.float32) if ".ffn_gate_inp." in tensor.name else half


def _half(tensor: gguf.ReaderTensor) -> npt.NDArray[np.float16]:
    data = np.asarray(tensor.data)  # without the costs of a memory map on every slice
    if tensor.tensor_type != gguf.GGMLQuantizationType.Q4_0:
        half: npt.NDArray[np.float16] = gguf.quants.dequantize(data, tensor.tensor_type).astype(np.float16)
        return half
    # The library's own way is row by row, which is slow for many short rows.
    blocks = data.reshape(-1, 2 + _Q4_0_BLOCK // 2)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    packed = blocks[:, 2:]
    levels = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32) - 8
    levels *= scale
    rows: npt.NDArray[np.float16] = levels.astype(np.float16).reshape(*data.shape[:-1], -1)
    return rows
