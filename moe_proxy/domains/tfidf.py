"""Owns the trained classifier: hashed word and character n-grams, a linear model, calibrated probabilities.

Inference is numpy alone; scikit-learn is needed to train (``scripts/train_tfidf.py``). A model is a
``.npz`` of plain arrays, read without pickle: loading one runs no code. It keeps no text.

Features. The text is lower-cased, digits become 0, runs of space become one. A feature is a run of 2 to 4
characters, a Han character, a word, or two neighbouring words. Each is a polynomial hash modulo 2^64 of
its code points, taken from differences of one prefix sum, so that all features of a text cost a few
numpy operations; the top bits of the mixed hash are its column. Term frequency is ``1 + log``, times the
column's inverse document frequency, scaled to length 1.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_proxy.domains.base import Classification
from moe_proxy.errors import ConfigError

FORMAT = "moe-tfidf/1"
COLUMN_BITS = 17
"""Columns of the model: 2^17 keep collisions rare and the file small."""
EDGE_CHARACTERS = 2000
"""Characters read from each end of a long text: an order stands at its beginning or at its end."""

_MAX_MODEL_BYTES = 64 << 20
_CHARACTER_RUNS = (2, 3, 4)
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 2**64)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_SECOND_WORD = np.uint64(0xA0761D6478BD642F)
_KIND = tuple(np.uint64(n * 0x632BE59BD9B4E019 % 2**64) for n in range(1, 8))

Floats = npt.NDArray[np.float32]
Columns = npt.NDArray[np.uint32]


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    values, power = [], 1
    for _ in range(count):
        values.append(power)
        power = power * base % 2**64
    return np.array(values, np.uint64)


_LONGEST = 2 * EDGE_CHARACTERS + 2
_POWER = _powers(_BASE, _LONGEST + 1)
_INVERSE_POWER = _powers(_INVERSE, _LONGEST + 1)

# What a code point is: 0 space and controls, 1 punctuation, 2 part of a word, 3 a word of its own (Han).
_SPACE, _MARK, _LETTER, _HAN = range(4)


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    kinds = np.empty(0x10000, np.uint8)
    for point in range(0x10000):
        character = chr(point)
        if 0x3400 <= point <= 0x9FFF:
            kinds[point] = _HAN
        elif character.isalnum() or character == "_":
            kinds[point] = _LETTER
        else:
            kinds[point] = _SPACE if character.isspace() or point < 32 else _MARK
    return kinds


def columns_of(text: str) -> tuple[Columns, Floats]:
    """Distinct columns of a text's features, ascending, and how often each occurs (uint32, float32)."""
    if len(text) > 2 * EDGE_CHARACTERS:
        text = f"{text[:EDGE_CHARACTERS]}\n{text[-EDGE_CHARACTERS:]}"
    points = np.frombuffer(
        f" {text.lower()} ".encode("utf-32-le", "surrogatepass")[: 4 * _LONGEST], np.uint32
    ).copy()
    points[points > 0xFFFF] = 0xFFFF
    kinds = _kinds()[points]
    points[kinds == _SPACE] = 32
    points[(points >= 48) & (points <= 57)] = 48
    repeated_space = (kinds[1:] == _SPACE) & (kinds[:-1] == _SPACE)
    if repeated_space.any():
        keep = np.concatenate(([True], ~repeated_space))
        points, kinds = points[keep], kinds[keep]
    size = len(points)
    prefix = np.zeros(size + 1, np.uint64)
    np.cumsum((points.astype(np.uint64) + np.uint64(1)) * _POWER[:size], out=prefix[1:])

    hashes = []
    for run in _CHARACTER_RUNS:
        if size >= run:
            hashes.append((prefix[run:] - prefix[:-run]) * _INVERSE_POWER[: size - run + 1] + _KIND[run])
    han = np.flatnonzero(kinds == _HAN)
    hashes.append(points[han].astype(np.uint64) * _MIX + _KIND[0])
    letters = np.concatenate(([False], kinds == _LETTER, [False]))
    starts = np.flatnonzero(letters[1:] & ~letters[:-1])
    ends = np.flatnonzero(~letters[1:] & letters[:-1])
    words = (prefix[ends] - prefix[starts]) * _INVERSE_POWER[starts]
    hashes.append(words + _KIND[5])
    hashes.append(words[:-1] * _SECOND_WORD + words[1:] + _KIND[6])

    mixed = np.concatenate(hashes) * _MIX
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX
    found = (mixed >> np.uint64(64 - COLUMN_BITS)).astype(np.uint32)
    found.sort()
    first = np.flatnonzero(np.concatenate(([len(found) > 0], found[1:] != found[:-1])))
    counts = np.diff(np.concatenate((first, [len(found)])))
    return found[first], counts.astype(np.float32)


@dataclass(frozen=True)
class TfidfModel:
    """A trained model. ``idf``: (columns,); ``weights``: (columns, labels), temperature included;

    ``bias``: (labels,).
    """

    labels: tuple[str, ...]
    idf: npt.NDArray[np.float16]
    weights: npt.NDArray[np.float16]
    bias: Floats
    made: Mapping[str, object]

    def save(self, path: Path) -> None:
        """Write the model as arrays that load without pickle."""
        about = json.dumps({"format": FORMAT, "labels": self.labels, "made": dict(self.made)})
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                about=np.frombuffer(about.encode(), np.uint8),
                idf=self.idf,
                weights=self.weights,
                bias=self.bias,
            )


def load_model(path: Path) -> TfidfModel:
    """Read a model. Raises ConfigError naming the file and what is wrong with it; never unpickles."""
    try:
        data = path.read_bytes()
        if len(data) > _MAX_MODEL_BYTES:
            raise ValueError(f"{len(data)} bytes are more than any model has")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            labels = tuple(about["labels"])
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']!r}")
            model = TfidfModel(labels, arrays["idf"], arrays["weights"], arrays["bias"], about["made"])
        shapes = (model.idf.shape, model.weights.shape, model.bias.shape)
        columns = 2**COLUMN_BITS
        if not labels or shapes != ((columns,), (columns, len(labels)), (len(labels),)):
            raise ValueError(f"its arrays have shapes {shapes}")
        if not all(isinstance(label, str) and label for label in labels):
            raise ValueError("a label is no text")
        if not all(
            np.issubdtype(array.dtype, np.floating) and np.isfinite(array).all()
            for array in (model.idf, model.weights, model.bias)
        ):
            raise ValueError("it holds what is no finite number")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "check the path of the classifier's model") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path} is no model of the tfidf classifier ({error})", "train one with scripts/train_tfidf.py"
        ) from error
    return model


class TfidfClassifier:
    """Calibrated probabilities of a linear model; never abstains by itself but on a text without letters."""

    name = "tfidf"
    slow = False

    def __init__(self, model: TfidfModel) -> None:
        # Stays in half precision: a text's few hundred columns are widened as they are needed.
        self._model = model

    @classmethod
    def shipped(cls) -> TfidfClassifier:
        """The classifier that ships, loaded once."""
        return _shipped()

    @property
    def inverse_frequencies(self) -> Floats:
        """Weight of each column (columns,); of one that the model never saw, the largest there is."""
        idf = self._model.idf.astype(np.float32)
        return np.where(idf > 0, idf, idf.max())

    def classify(self, text: str) -> Classification:
        """Distribution over the model's labels."""
        columns, counts = columns_of(text)
        values = (1.0 + np.log(counts)) * self._model.idf[columns].astype(np.float32)
        length = float(np.sqrt(values @ values))
        if length == 0.0 or not any(character.isalnum() for character in text[: 2 * EDGE_CHARACTERS]):
            return Classification({}, self.name)
        weights = self._model.weights[columns].astype(np.float32)
        scores = (values / length) @ weights + self._model.bias
        odds = np.exp(scores - scores.max())
        return Classification(
            dict(zip(self._model.labels, (odds / odds.sum()).tolist(), strict=True)), self.name
        )


@cache
def _shipped() -> TfidfClassifier:
    return TfidfClassifier(load_model(Path(__file__).with_name("tfidf.npz")))
