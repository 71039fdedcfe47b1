"""Owns what a GGUF says about its experts: which layers have them, how large one is, which model it is.

It reads the router weights, for the fingerprint, and no other tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from moe_proxy.errors import ModelFileError, NotGgufError, NotMoeError, TruncatedError
from moe_proxy.model.gguf_header import GgufHeader, TensorInfo

# Shared experts (``_shexp``) are read for every token and belong to the dense part.
EXPERT_TENSOR = re.compile(r"^blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps\.weight$")
_ROUTER = re.compile(r"^blk\.(\d+)\.ffn_gate_inp\.weight$")
_TOKENIZER_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.pre")


@dataclass(frozen=True)
class ModelLayout:
    """Experts of one model.

    ``expert_bytes`` gives, for each MoE layer, the bytes of one expert with all its slabs. ``fingerprint`` is
    empty where the file ends before its router weights.
    """

    architecture: str
    name: str
    layers: tuple[int, ...]
    experts: int
    experts_used: int
    expert_bytes: Mapping[int, int]
    dense_bytes: int
    fingerprint: str

    @property
    def total_expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.experts * sum(self.expert_bytes.values())


def layout_of(header: GgufHeader, *, complete: bool = True) -> ModelLayout:
    """Layout of the model in ``header``; of a file that need not be ``complete``, without a fingerprint.

    Raises NotMoeError for a model without expert tensors, NotGgufError where its tensors contradict its
    header, TruncatedError or ModelFileError where the router weights cannot be read.
    """
    source = header.files[0]
    slabs: defaultdict[int, list[TensorInfo]] = defaultdict(list)
    for tensor in header.tensors:
        if match := EXPERT_TENSOR.match(tensor.name):
            slabs[int(match[1])].append(tensor)
    if not slabs or header.expert_count == 0:
        raise NotMoeError(
            f"{source} ({header.architecture}) has no expert tensors",
            "moe-proxy serves Mixture-of-Experts models: give a GGUF with ffn_*_exps tensors",
        )
    for tensor in (tensor for layer in slabs.values() for tensor in layer):
        if tensor.shape[-1] != header.expert_count or len(tensor.shape) != 3:
            raise NotGgufError(
                f"{source}: {tensor.name} has shape {list(tensor.shape)} and the header says"
                f" {header.expert_count} experts",
                "the file is damaged; convert or download it again",
            )
    if not 0 < header.expert_used_count <= header.expert_count:
        raise NotGgufError(
            f"{source} uses {header.expert_used_count} of {header.expert_count} experts for a token",
            "the file is damaged; convert or download it again",
        )
    expert_bytes = {
        layer: sum(tensor.size_bytes for tensor in slabs[layer]) // header.expert_count
        for layer in sorted(slabs)
    }
    all_experts = header.expert_count * sum(expert_bytes.values())
    return ModelLayout(
        architecture=header.architecture,
        name=header.name,
        layers=tuple(expert_bytes),
        experts=header.expert_count,
        experts_used=header.expert_used_count,
        expert_bytes=expert_bytes,
        dense_bytes=sum(tensor.size_bytes for tensor in header.tensors) - all_experts,
        fingerprint=_fingerprint(header) if complete else "",
    )


def _fingerprint(header: GgufHeader) -> str:
    """SHA-256 over architecture, shapes, tokenizer and router weights, as hex.

    Types and sizes of other tensors are left out: quantisations of one model have one fingerprint, and one
    map serves them all, as long as their routers were kept in the same type.
    """
    digest = hashlib.sha256()
    facts = {
        "architecture": header.architecture,
        "shapes": sorted([tensor.name, list(tensor.shape)] for tensor in header.tensors),
        "tokenizer": [
            header.vocabulary_size,
            *(str(header.metadata.get(key, "")) for key in _TOKENIZER_KEYS),
        ],
        "experts_used": header.expert_used_count,
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for router in sorted(
        (t for t in header.tensors if _ROUTER.match(t.name)), key=lambda tensor: tensor.name
    ):
        digest.update(f"{router.name} {router.type_name}".encode())
        digest.update(_bytes_of(router))
    return digest.hexdigest()


def _bytes_of(tensor: TensorInfo) -> bytes:
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset_bytes)
            data = file.read(tensor.size_bytes)
    except OSError as error:
        raise ModelFileError(f"{tensor.file} cannot be read ({error.strerror})", "check the file") from error
    if len(data) != tensor.size_bytes:
        raise TruncatedError(
            f"{tensor.file} ends inside {tensor.name}", "the file changed; download it again"
        )
    return data
