"""Writes the routing of a planted large model, of which it makes only embedding, head and routers.

What a layer adds to a token is nearly silent in that model (scripts/gpu_check/planted_large.py), so a token's
picks follow from its own embedding, and the next token from the head. The prompt's tokens are drawn by rank.

Usage: python scripts/simulate_policies/planted_trace.py VOCABULARY.gguf OUT.trace
Needs numpy, gguf and 2 GB of memory, and takes minutes; the vocabulary is models/ggml-vocab-qwen2.gguf of
llama.cpp's source. The first 772 batches warm up.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from demo_trace import write_trace
from gguf import GGUFReader

WIDTH, LAYERS, EXPERTS, USED, SKEW = 2048, 48, 128, 8, 1.2
DOMAINS = 4
PREFILL_TOKENS, PROMPT_TOKENS, ANSWER_TOKENS, ANSWERS = 2040, 25, 256, 8
# llama-server's own sampling, at the temperature of gpu_check
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 40, 0.95, 0.05


def domain_of(token: str) -> int:
    """As in planted_large.py, which needs torch: code, numbers, or by the token's checksum."""
    if any(character in "_{}();=<>[]#/\\|&*" for character in token):
        return 0
    if any(character in "0123456789+-^%" for character in token):
        return 1
    return (3, 3, 3, 3, 3, 0, 1, 2)[zlib.crc32(token.encode()) % 8]


class Plant:
    """The parts of a planted large model that decide its routing."""

    def __init__(self, tokens: list[str]) -> None:
        self.random = np.random.default_rng(11)
        self.domain = np.array([domain_of(token) for token in tokens])
        self.directions = np.linalg.qr(self._normal(WIDTH, DOMAINS + 1))[0].T.copy()
        self.embedding = np.empty((len(tokens), WIDTH), np.float16)
        for rows in np.array_split(np.arange(len(tokens)), 32):
            vectors = self._normal(len(rows), WIDTH) / WIDTH**0.5
            vectors += 0.7 * self.directions[self.domain[rows]] + 0.7 * self.directions[-1]
            self.embedding[rows] = vectors
        # Only code's: a text never leaves its domain.
        self.code = np.flatnonzero(self.domain == 0)
        self.head = 0.5 * self._normal(len(self.code), WIDTH) / WIDTH**0.5 + 0.5 * self.directions[0]
        self.routers = np.concatenate([self._router() for _ in range(LAYERS)])

    def _normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32)

    def _router(self) -> np.ndarray:
        rows = self._normal(EXPERTS, WIDTH) * np.float32((2 / WIDTH) ** 0.5)
        rows -= (rows @ self.directions.T) @ self.directions
        strength = self._normal(EXPERTS, DOMAINS + 1) * np.float32(2 * SKEW / WIDTH**0.5)
        strength[:, :-1] *= 0.8
        strength[:, -1] *= 0.6
        return rows + strength @ self.directions

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        """Of each token, after RMSNorm: (tokens, width)."""
        vectors = self.embedding[tokens].astype(np.float32)
        return vectors / np.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-6)

    def picks(self, tokens: np.ndarray) -> np.ndarray:
        """(tokens, layers, used)."""
        logits = (self.hidden(tokens) @ self.routers.T).reshape(-1, LAYERS, EXPERTS)
        return np.argsort(-logits, -1)[..., :USED]

    def answer(self, first: int, seed: int) -> Iterator[int]:
        """Tokens sampled one after the other, each from the one before."""
        random, token = np.random.default_rng(seed), first
        for _ in range(ANSWER_TOKENS):
            logits = self.head @ self.hidden(np.array([token]))[0]
            top = np.argsort(-logits)[:TOP_K]
            chances = np.exp(logits[top] - logits[top[0]])
            kept = np.searchsorted(np.cumsum(chances / chances.sum()), TOP_P) + 1
            top = top[:kept][chances[:kept] >= MIN_P * chances[0]]
            weights = np.exp((logits[top] - logits[top[0]]) / TEMPERATURE)
            token = int(self.code[random.choice(top, p=weights / weights.sum())])
            yield token


def ubatches(plant: Plant) -> Iterator[np.ndarray]:
    """Picks of one long prompt, then of short ones of code with their answers."""
    random = np.random.default_rng(1)
    chance = 1 / np.arange(10, len(plant.domain) + 10)
    yield plant.picks(random.choice(len(chance), PREFILL_TOKENS, p=chance / chance.sum()))
    code = chance * (plant.domain == 0)
    for seed in range(ANSWERS):
        prompt = random.choice(len(chance), PROMPT_TOKENS, p=code / code.sum())
        yield plant.picks(prompt)
        for token in plant.answer(int(prompt[-1]), seed):
            yield plant.picks(np.array([token]))


def main() -> None:
    """Write the trace."""
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: planted_trace.py VOCABULARY.gguf OUT.trace")
    tokens = GGUFReader(sys.argv[1]).fields["tokenizer.ggml.tokens"].contents()
    write_trace(Path(sys.argv[2]), ubatches(Plant(tokens)), EXPERTS)


if __name__ == "__main__":
    main()
