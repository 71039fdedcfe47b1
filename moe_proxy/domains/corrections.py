"""Owns how corrected labels move the answers of a classifier. Off unless the operator asks for it.

It learns from the labels it is given, never from an answer, and keeps weights of hashed n-grams, no text.

On top of the log-probabilities of the classifier underneath stands a linear model over the features of the
tfidf classifier, which starts at zero. A label is learned by gradient steps on the logarithmic loss of the
sum, until the sum is sure enough of it: so a label that comes out right already changes nothing, and a wrong
one costs as much as it takes to turn it.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from moe_proxy.domains.base import Classification, Classifier
from moe_proxy.domains.cascade import LEAST
from moe_proxy.domains.tfidf import COLUMN_BITS, TfidfClassifier, columns_of
from moe_proxy.errors import ConfigError

FORMAT = "moe-corrections/1"

_SURE = 0.8
_STEPS = 50
_RATE = 4.0
_LEAST_SHIFT = 0.1
"""In nats; below it a text has nothing to do with what was corrected."""
_LEAST_CONFIDENCE = 0.5
"""Below it a moved answer is an abstention."""
_MOST_BYTES = 64 << 20

Floats = npt.NDArray[np.float32]


class Corrections:
    """A classifier that answers as ``base`` does but for what it was told of texts like this one.

    ``labels`` are those that may be learned.
    """

    name = "corrections"

    def __init__(self, base: Classifier, labels: Collection[str]) -> None:
        self._base = base
        self._labels = tuple(sorted(labels))
        self._idf = TfidfClassifier.shipped().inverse_frequencies
        self._weights: Floats = np.zeros((2**COLUMN_BITS, len(self._labels)), np.float32)
        self.learned = 0

    @property
    def slow(self) -> bool:
        """Whether the classifier underneath is."""
        return self._base.slow

    def classify(self, text: str) -> Classification:
        """The answer of the classifier underneath, moved by what was learned of texts like this one."""
        answer = self._base.classify(text)
        if not self.learned:
            return answer
        columns, values = self._features(text)
        shift = values @ self._weights[columns]
        if np.ptp(shift) < _LEAST_SHIFT:
            return answer
        moved = self._moved(answer, shift)
        name = f"{answer.classifier}+{self.name}"
        if max(moved.values()) < _LEAST_CONFIDENCE:
            return Classification({}, name)
        return Classification(moved, name)

    def learn(self, text: str, label: str) -> bool:
        """Take ``label`` for what ``text`` is about; whether that changed anything.

        Raises ValueError for a label that is not one of ``labels``.
        """
        if label not in self._labels:
            raise ValueError(f"{label!r} is none of the labels {', '.join(self._labels)}")
        right = self._labels.index(label)
        answer = self._base.classify(text)
        columns, values = self._features(text)
        changed = False
        for _ in range(_STEPS):
            moved = self._moved(answer, values @ self._weights[columns])
            if moved[label] >= _SURE or not len(columns):
                break
            error = -np.array([moved[name] for name in self._labels], np.float32)
            error[right] += 1.0
            self._weights[columns] += _RATE * np.outer(values, error)
            changed = True
        self.learned += changed
        return changed

    def forget(self) -> None:
        """Answer as the classifier underneath again."""
        self._weights[:] = 0.0
        self.learned = 0

    def dump(self) -> bytes:
        """All that was learned, as arrays that load without pickle; ``restore`` takes them back."""
        columns = np.flatnonzero(self._weights.any(axis=1)).astype(np.uint32)
        about = json.dumps({"format": FORMAT, "labels": self._labels, "learned": self.learned})
        with io.BytesIO() as file:
            np.savez_compressed(
                file,
                about=np.frombuffer(about.encode(), np.uint8),
                columns=columns,
                weights=self._weights[columns],
            )
            return file.getvalue()

    def restore(self, content: bytes, source: str) -> None:
        """Take up what ``dump`` gave; labels that are none any more are left out.

        Raises ConfigError, naming ``source``, and then keeps what it had.
        """
        try:
            if len(content) > _MOST_BYTES:
                raise ValueError(f"{len(content)} bytes are more than anybody corrects")
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                about = json.loads(arrays["about"].tobytes())
                columns, weights = arrays["columns"], arrays["weights"]
            labels, learned = list(about["labels"]), about["learned"]
            if about["format"] != FORMAT or type(learned) is not int or learned < 0:
                raise ValueError("it is of another format")
            if columns.ndim != 1 or weights.shape != (len(columns), len(labels)):
                raise ValueError(f"its arrays have shapes {columns.shape} and {weights.shape}")
            if len(columns) and (columns.dtype != np.uint32 or columns.max() >= len(self._weights)):
                raise ValueError("a column is out of range")
            if not np.issubdtype(weights.dtype, np.floating) or not np.isfinite(weights).all():
                raise ValueError("a weight is no finite number")
            found = np.zeros_like(self._weights)
            for place, label in enumerate(labels):
                if label in self._labels:
                    found[columns, self._labels.index(label)] = weights[:, place]
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{source} holds no corrected labels ({error})", "remove it to start anew"
            ) from error
        self._weights, self.learned = found, learned

    def _features(self, text: str) -> tuple[npt.NDArray[np.uint32], Floats]:
        columns, counts = columns_of(text)
        values = (1.0 + np.log(counts)) * self._idf[columns]
        return columns, (values / (np.sqrt(values @ values) or 1.0)).astype(np.float32)

    def _moved(self, answer: Classification, shift: Floats) -> Mapping[str, float]:
        """Probabilities of all labels: even under an abstention, next to none for one it does not know."""
        known = answer.distribution
        missing = LEAST if known else 1.0
        names = dict.fromkeys((*self._labels, *known))
        by_label = dict(zip(self._labels, shift.tolist(), strict=True))
        logs = np.array(
            [np.log(max(known.get(name, missing), LEAST)) + by_label.get(name, 0.0) for name in names]
        )
        odds = np.exp(logs - logs.max())
        return dict(zip(names, (odds / odds.sum()).tolist(), strict=True))
