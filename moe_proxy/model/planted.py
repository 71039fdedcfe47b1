"""Owns the planted model: a small qwen3moe GGUF with routing known by construction; it never runs one.

Nothing in it is trained. The hidden vector is divided into ranges of coordinates, and every weight moves
known quantities between them, so that routing, text and counts can be predicted:

=========  =========================================================================================
``DOMAIN``  one coordinate per domain: ``OWN`` for a word of that domain, plus the share of that
            domain among the domain words seen so far, written by the attention of layer 0
``COMMON``  1 for every token
``LAST``    whether a word is one of the last two of its ring
``CLASS``   one of 16 routing classes of the token, one-hot
``IDENTITY``  which word it is: a row of a Hadamard matrix with the domain's signs
``ANSWER``  what the experts write, and the only thing that they write
=========  =========================================================================================

*Routing* reads ``DOMAIN``, ``COMMON`` and ``CLASS`` only. These are small exact numbers, and the levels of
the router leave a gap between any two experts, so the order of a float sum cannot change which experts are
picked. The scale of the normalisation changes all logits of a token alike and no order.

*Attention* in layer 0 looks at domain words and away from everything else: queries and keys use one rotary
pair that hardly turns over the context. A chat template therefore carries the domain of the prompt on.
Attention of later layers writes nothing.

*Text.* The words of a domain stand on a ring. The head gives the next two words of the ring the same large
logit; the experts' answer decides between them, so a wrong expert changes the text. After the ring comes
``<|im_end|>``.

All values come from integers (SplitMix64 streams keyed by the tensor's name) and exact scalings by powers of
two, so the file is the same, byte for byte, on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from moe_proxy.domains.base import DOMAINS
from moe_proxy.files import replacing
from moe_proxy.model.planted_vocabulary import IM_END, Token, escaped, vocabulary

PLANTED_NAME = "planted-moe"
ARCHITECTURE = "qwen3moe"
PLANTED_SHA256 = "cb2cca76337cf532514fa0244764ee478dc765fb223445b27f71a68da9e51a91"

LAYERS = 6
WIDTH = 256
EXPERTS = 32
EXPERTS_USED = 4
EXPERT_WIDTH = 128
HEADS = 4
KV_HEADS = 2
HEAD_WIDTH = 64
CONTEXT = 4096
RMS_EPSILON = 1e-6
ROPE_BASE = 1e6
PAGE_BYTES = 4096

RING = 128
CLASSES = 16
DOMAIN = slice(0, 8)
COMMON = 8
LAST = 9
CLASS = slice(16, 16 + CLASSES)
IDENTITY = slice(32, 32 + RING)
ANSWER = slice(32 + RING, WIDTH)

OWN = 0.5
"""Domain coordinate of a domain's own words; the context adds up to 1 to it."""
_IDENTITY_UNIT = 0.125
_LAST_UNIT = 0.5

# Router levels, in steps between two neighbouring experts of a class. Cold, hot, common and hot-and-common
# experts stand apart at domain coordinates of 0, 1 and 1.5. In a mixed context the coordinate is a fraction;
# a quadratic irrational stays off whole steps at every fraction of a small denominator: no ties there either.
_LEVEL_STEP = 1.0 / 128.0
_HOT_LEVEL = 12.236068  # 10 + 5 ** 0.5
_COMMON_LEVEL = 8.5
HOT_PER_DOMAIN = 8
COMMON_PER_LAYER = 2

# Head, in units of the identity's own norm: the ring's next words, the context's domain, the experts' answer.
_HEAD_DOMAIN = 3.0
_HEAD_ANSWER = 0.25
_HEAD_END = 8.0
_GATE_UNIT = 2.0**-10
_DOWN_UNIT = 2.0**-13

_F16 = npt.NDArray[np.float16]
_F32 = npt.NDArray[np.float32]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _bits(name: str, count: int) -> npt.NDArray[np.uint64]:
    """``count`` words of the SplitMix64 stream that is keyed by ``name`` (Steele, Lea, Flood 2014)."""
    seed = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], "<u8").astype(np.uint64)
    state = seed + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def _int8(name: str, *shape: int) -> npt.NDArray[np.int8]:
    count = int(np.prod(shape))
    return _bits(name, -(-count // 8)).astype("<u8").view(np.int8)[:count].reshape(shape)


def _signs(name: str, count: int) -> _F32:
    signs: _F32 = np.where(_int8(name, count) < 0, np.float32(-1), np.float32(1))
    return signs


def _shuffle(name: str, count: int) -> npt.NDArray[np.intp]:
    return np.argsort(_bits(name, count), kind="stable")


def _identity(token: Token) -> _F32:
    """±1 per coordinate of ``IDENTITY``. Words of one ring are orthogonal; all forms of a word are one."""
    if token.place is None:
        return _signs(f"identity {token.word}", RING)
    row: _F32 = _hadamard()[token.place] * _signs(f"ring {token.domain}", RING)
    return row


@cache
def _hadamard() -> _F32:
    """Sylvester's matrix of order ``RING``: entries ±1, rows orthogonal."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < RING:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _embedding(tokens: list[Token]) -> _F16:
    rows = np.zeros((len(tokens), WIDTH), np.float32)
    for row, token in zip(rows, tokens, strict=True):
        if token.domain is not None:
            row[token.domain] = OWN
        row[COMMON] = 1
        row[LAST] = _LAST_UNIT if token.place is not None and token.place >= RING - 2 else -_LAST_UNIT
        row[CLASS.start + int(_bits(f"class {token.word}", 1)[0] % np.uint64(CLASSES))] = 1
        row[IDENTITY] = _identity(token) * np.float32(_IDENTITY_UNIT)
    return rows.astype(np.float16)


def _head(tokens: list[Token]) -> _F16:
    """Rows of spoken words: identities of what a word may follow, its domain, its direction of the answer."""
    rows = np.zeros((len(tokens), WIDTH), np.float32)
    ring = {(t.domain, t.place): t for t in tokens if t.spoken}
    newline = next(t for t in tokens if t.text == b"\n")
    for row, token in zip(rows, tokens, strict=True):
        if token.text == IM_END.encode():
            row[DOMAIN] = _HEAD_DOMAIN
            row[LAST] = _HEAD_END
            row[COMMON] = -_HEAD_END * _LAST_UNIT / 4
        elif token.spoken and token.place is not None and token.domain is not None:
            before = [ring[token.domain, (token.place - step) % RING] for step in (1, 2)]
            before += [newline] if token.place < 2 else []
            row[token.domain] = _HEAD_DOMAIN
            row[IDENTITY] = sum(_identity(t) for t in before) * np.float32(_IDENTITY_UNIT)
            row[ANSWER] = _signs(f"answer {token.domain} {token.place}", ANSWER.stop - ANSWER.start)
            row[ANSWER] *= np.float32(_HEAD_ANSWER)
    return rows.astype(np.float16)


def hot_experts(layer: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """``(domains, HOT_PER_DOMAIN)`` experts favoured by each domain in ``layer``, and those favoured by all.

    The domains stand on a circle of experts in an order of the layer's own; neighbours share half their
    experts.
    """
    circle = _shuffle(f"circle {layer}", EXPERTS)
    seat = _shuffle(f"seats {layer}", len(DOMAINS))
    stride = EXPERTS // len(DOMAINS)
    hot = np.array(
        [[circle[(seat[d] * stride + i) % EXPERTS] for i in range(HOT_PER_DOMAIN)] for d in range(8)]
    )
    return hot, _shuffle(f"common {layer}", EXPERTS)[:COMMON_PER_LAYER]


def _router(layer: int) -> _F32:
    hot, common = hot_experts(layer)
    weights: _F32 = np.zeros((EXPERTS, WIDTH), np.float32)
    for domain, experts in enumerate(hot):
        weights[experts, domain] = _HOT_LEVEL
    weights[common, COMMON] = _COMMON_LEVEL
    for number in range(CLASSES):
        weights[:, CLASS.start + number] = _shuffle(f"class {layer} {number}", EXPERTS)
    weights *= np.float32(_LEVEL_STEP)
    return weights


def _attention(layer: int) -> dict[str, _F32]:
    """Query, key, value and output matrices, ``(out, in)``."""
    query = np.zeros((HEADS * HEAD_WIDTH, WIDTH), np.float32)
    key = np.zeros((KV_HEADS * HEAD_WIDTH, WIDTH), np.float32)
    value = np.zeros((KV_HEADS * HEAD_WIDTH, WIDTH), np.float32)
    output = np.zeros((WIDTH, HEADS * HEAD_WIDTH), np.float32)
    slow = HEAD_WIDTH // 2 - 1  # the rotary pair of the lowest frequency
    # After the norm of queries and keys only a sign is left: a key is positive for the words of any domain.
    query[slow::HEAD_WIDTH, COMMON] = 1
    key[slow::HEAD_WIDTH, COMMON] = -OWN
    key[slow::HEAD_WIDTH, DOMAIN] = 2
    if layer == 0:
        # A domain word's value is 1 after the norm. Half precision holds that, and sums of it, exactly.
        squares = OWN**2 + 1 + _LAST_UNIT**2 + 1 + RING * _IDENTITY_UNIT**2
        gain = np.sqrt(np.float32(squares / WIDTH + RMS_EPSILON)) / np.float32(OWN)
        for domain in range(len(DOMAINS)):
            value[domain, domain] = gain
            output[domain, domain] = 1
    return {"attn_q": query, "attn_k": key, "attn_v": value, "attn_output": output}


def _experts(name: str, rows: int, columns: int, unit: float) -> _F16:
    weights: _F16 = _int8(name, EXPERTS, rows, columns).astype(np.float16)
    weights *= np.float16(unit)
    return weights


def _down(name: str) -> _F16:
    weights = np.zeros((EXPERTS, WIDTH, EXPERT_WIDTH), np.float16)
    weights[:, ANSWER] = _experts(name, ANSWER.stop - ANSWER.start, EXPERT_WIDTH, _DOWN_UNIT)
    return weights


def planted_tensors() -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Names and arrays (numpy order: rows first) in the order of the file."""
    tokens = vocabulary()
    yield "token_embd.weight", _embedding(tokens)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            yield f"{block}.{name}.weight", np.ones(WIDTH, np.float32)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"{block}.{name}.weight", np.ones(HEAD_WIDTH, np.float32)
        for name, matrix in _attention(layer).items():
            yield f"{block}.{name}.weight", matrix
        yield f"{block}.ffn_gate_inp.weight", _router(layer)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            full = f"{block}.{name}.weight"
            yield full, _experts(full, EXPERT_WIDTH, WIDTH, _GATE_UNIT)
        yield f"{block}.ffn_down_exps.weight", _down(f"{block}.ffn_down_exps.weight")
    yield "output_norm.weight", np.ones(WIDTH, np.float32)
    yield "output.weight", _head(tokens)


def write_planted_moe(path: Path) -> None:
    """Write the planted model to ``path``. The same bytes everywhere."""
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_name(PLANTED_NAME)
    writer.add_basename(PLANTED_NAME)
    writer.add_description("Planted routing for demonstration and tests; not trained")
    writer.add_custom_alignment(PAGE_BYTES)  # slabs are whole pages of the file
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(EXPERT_WIDTH * EXPERTS_USED)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS_USED)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([escaped(token.text) for token in tokens])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([int(kinds[token.control]) for token in tokens])
    end = next(number for number, token in enumerate(tokens) if token.text == IM_END.encode())
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, array in planted_tensors():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def planted_path(cache_dir: Path) -> Path:
    """Path of the planted model under ``cache_dir``, made when it is not there or not what it should be."""
    path = cache_dir / "models" / f"{PLANTED_NAME}.gguf"
    if not (path.is_file() and _sha256(path) == PLANTED_SHA256):
        with replacing(path) as temporary:
            write_planted_moe(temporary)
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
