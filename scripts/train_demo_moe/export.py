"""Owns the weights file that ships: routers and routed experts, and reading it back for evaluation.

The file is a GGUF in parts, each for some of the layers, so that no part is larger than 16 MB. Experts are
Q4_0, routers half precision. What belongs to the dense model is not in it.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from model import Experts, Upcycled

NAME = "smollm2-moe-demo"
ARCHITECTURE = "deepseek"
PARTS = 2
_NAMES = {
    "router": "ffn_gate_inp",
    "expert_gate": "ffn_gate_exps",
    "expert_up": "ffn_up_exps",
    "expert_down": "ffn_down_exps",
}


def part_path(folder: Path, part: int) -> Path:
    """Path of part ``part`` (from 1)."""
    return folder / f"{NAME}-{part}-of-{PARTS}.gguf"


def export(model: Upcycled, folder: Path) -> None:
    """Write all parts into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = list(model.layers)
    share = -(-len(layers) // PARTS)
    for part in range(1, PARTS + 1):
        writer = gguf.GGUFWriter(part_path(folder, part), ARCHITECTURE)
        writer.add_name(NAME)
        writer.add_description("Routers and routed experts for SmolLM2-135M-Instruct; not a model by itself")
        writer.add_license("apache-2.0")
        writer.add_leading_dense_block_count(model.experts.dense_layers)
        writer.add_expert_count(model.experts.count)
        writer.add_expert_used_count(model.experts.used)
        writer.add_expert_feed_forward_length(model.experts.width)
        writer.add_expert_weights_scale(model.experts.scale)
        for layer in layers[(part - 1) * share : part * share]:
            for ours, theirs in _NAMES.items():
                array = model.trained[f"{ours}_{layer}"].detach().float().cpu().numpy()
                name = f"blk.{layer}.{theirs}.weight"
                if ours == "router":
                    writer.add_tensor(name, array.astype(np.float16))
                else:
                    kind = gguf.GGMLQuantizationType.Q4_0
                    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def shape_of(folder: Path) -> Experts:
    """The routed part's shape, from the first part's own keys."""
    fields = gguf.GGUFReader(part_path(folder, 1)).fields

    def value(key: str) -> float:
        return fields[f"{ARCHITECTURE}.{key}"].contents()

    return Experts(
        dense_layers=int(value("leading_dense_block_count")),
        count=int(value("expert_count")),
        used=int(value("expert_used_count")),
        width=int(value("expert_feed_forward_length")),
        scale=float(value("expert_weights_scale")),
    )


def restore(model: Upcycled, folder: Path) -> None:
    """Put the weights of all parts into ``model``, as llama.cpp will see them (half precision)."""
    ours = {theirs: name for name, theirs in _NAMES.items()}
    for part in range(1, PARTS + 1):
        for tensor in gguf.GGUFReader(part_path(folder, part)).tensors:
            _, layer, kind, _ = tensor.name.split(".")
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
            with torch.no_grad():
                model.trained[f"{ours[kind]}_{layer}"].copy_(torch.from_numpy(array.astype(np.float32)))
