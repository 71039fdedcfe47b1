"""Owns small GGUF files of models with experts, for tests that read headers; none of them can be run."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

EXPERTS = 4


def write_moe(
    path: Path,
    *,
    fused: bool = False,
    dtype: type[np.floating] = np.float16,
    router: float = 1.0,
    experts_used: int = 2,
    header_experts: int = EXPERTS,
    name: str = "test",
) -> Path:
    """Layer 0 dense, layers 1 and 2 with experts of 8x32 and a shared expert."""
    writer = gguf.GGUFWriter(path, "testmoe")
    writer.add_name(name)
    writer.add_block_count(3)
    writer.add_expert_count(header_experts)
    writer.add_expert_used_count(experts_used)
    writer.add_tokenizer_model("rwkv")
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", np.ones((8, 32), np.float32))
    for layer in (1, 2):
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", np.full((EXPERTS, 32), router, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_up_shexp.weight", np.ones((8, 32), np.float16))
        names = ("gate_up", "down") if fused else ("gate", "up", "down")
        for part in names:
            rows = 16 if part == "gate_up" else 8
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ones((EXPERTS, rows, 32), dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
