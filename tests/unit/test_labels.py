"""Learning for the classifier: from corrected labels alone, off by default, kept without text."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from moe_proxy.config import load_settings
from moe_proxy.domains.base import DOMAINS, Classification
from moe_proxy.domains.choice import default_classifier
from moe_proxy.domains.corrections import Corrections
from moe_proxy.errors import ConfigError
from moe_proxy.labelling import Labelling
from tests.support.surface import eventually, surface

TEXT = "Wozzle the frobnicator for ticket 812, the usual way"
LIKE_IT = "please wozzle the frobnicator for ticket 97"


class Fixed:
    """A base that always says the same, and notes when it is asked."""

    name = "fixed"

    def __init__(self, slow: bool = False, **distribution: float) -> None:
        self.slow = slow
        self.distribution = distribution

    def classify(self, text: str) -> Classification:
        """The fixed answer."""
        return Classification(self.distribution, self.name)


def test_a_corrected_label_turns_the_answer_and_texts_like_it() -> None:
    """Corrected labels are learned from: the text comes out as told, and so do texts like it."""
    corrections = Corrections(Fixed(codegen=0.9, math=0.1), DOMAINS)
    assert corrections.learn(TEXT, "math")
    assert (corrections.classify(TEXT).domain, corrections.classify(LIKE_IT).domain) == ("math", "math")
    assert corrections.classify("What is the capital of France?").domain == "codegen"
    assert corrections.classify(TEXT).classifier == "fixed+corrections"
    assert sum(corrections.classify(TEXT).distribution.values()) == pytest.approx(1.0)


def test_what_the_shipped_classifier_is_sure_of_can_be_corrected() -> None:
    """The label that was told last is the one that holds, whoever was sure of another."""
    corrections = Corrections(default_classifier(), (*DOMAINS, "own domain"))
    text = "print hello world"
    for label in ("math", "translate", "own domain", "codegen"):
        corrections.learn(text, label)
        assert corrections.classify(text).domain == label


def test_nothing_is_learned_from_guesses() -> None:
    """Never from its own guesses: to classify changes nothing, and a label that is right already nothing."""
    corrections = Corrections(Fixed(math=1.0), DOMAINS)
    before = corrections.dump()
    for _ in range(3):
        corrections.classify(TEXT)
    assert not corrections.learn(TEXT, "math")
    assert corrections.dump() == before
    assert corrections.learned == 0


def test_other_answers_stay_as_they_are() -> None:
    """An abstention about something else stays an abstention, in the name of who abstained."""
    corrections = Corrections(Fixed(), DOMAINS)
    corrections.learn(TEXT, "math")
    assert corrections.classify("¿Cuál es la capital?") == Classification({}, "fixed")
    with pytest.raises(ValueError, match="law"):
        corrections.learn(TEXT, "law")
    corrections.forget()
    assert corrections.classify(TEXT) == Classification({}, "fixed")


def test_a_text_without_features_teaches_nothing() -> None:
    """Nothing to go by, nothing learned."""
    corrections = Corrections(Fixed(), DOMAINS)
    assert corrections.learn(TEXT, "math")
    assert corrections.classify("").distribution == {}


async def test_labels_survive_a_restart_without_text(tmp_path: Path) -> None:
    """What was learned is restored after a restart, with equal answers; the file holds none of the text."""
    path = tmp_path / "corrections.npz"
    first = Corrections(Fixed(codegen=1.0), DOMAINS)
    async with Labelling(first, path) as labelling:
        await labelling.learn(TEXT, "math")
    with np.load(path, allow_pickle=False) as arrays:
        assert all(array.dtype.kind in "uf" for array in arrays.values())
        assert b"rob" not in arrays["about"].tobytes()
    second = Corrections(Fixed(slow=True, codegen=1.0), (*DOMAINS, "law"))
    async with Labelling(second, path) as labelling:
        assert (await labelling.classify(TEXT)).distribution["math"] == pytest.approx(
            first.classify(TEXT).distribution["math"], abs=0.01
        )
        assert labelling.report() == {"learned": 1, "file": str(path), "saved": True}
        path.unlink()
        await labelling.learn(LIKE_IT, "logic")
        assert (second.learned, second.classify(LIKE_IT).domain) == (1, "logic")
    assert path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        {"about": {"format": "moe-corrections/2", "labels": ["math"], "learned": 1}},
        {"columns": np.array([1 << 17], np.uint32)},
        {"columns": np.array([1.5])},
        {"weights": np.zeros((1, 2), np.float32)},
        {"weights": np.array([[np.nan]], np.float32)},
        {"about": []},
        {"about": {"format": "moe-corrections/1", "labels": 3, "learned": 1}},
    ],
)
async def test_a_damaged_file_is_left_aside(
    tmp_path: Path, content: object, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be used is named in a warning; it runs no code and fails no request."""
    path = tmp_path / "corrections.npz"
    if isinstance(content, dict):
        arrays = {
            "about": {"format": "moe-corrections/1", "labels": ["math"], "learned": 1},
            "columns": np.array([3], np.uint32),
            "weights": np.ones((1, 1), np.float32),
        } | content
        arrays["about"] = np.frombuffer(json.dumps(arrays["about"]).encode(), np.uint8)
        with io.BytesIO() as file:
            np.savez(file, **arrays)
            content = file.getvalue()
    assert isinstance(content, bytes)
    path.write_bytes(content)
    corrections = Corrections(Fixed(math=1.0), DOMAINS)
    with pytest.raises(ConfigError, match=r"corrections\.npz"):
        corrections.restore(content, str(path))
    with caplog.at_level(logging.WARNING):
        async with Labelling(corrections, path):
            assert corrections.learned == 0
    assert "not used" in caplog.text


async def test_the_route_teaches(tmp_path: Path) -> None:
    """POST /stats/label says before and after; a chat's body is understood as well as a text."""
    corrections = Corrections(Fixed(), DOMAINS)
    async with (
        Labelling(corrections, tmp_path / "c.npz") as labelling,
        surface(classifier=corrections, labelling=labelling) as proxy,
    ):
        body = {"text": TEXT, "domain": "math"}
        status, _, answer = await proxy.post("/stats/label", body)
        said = json.loads(answer)
        assert (status, said["before"]["domain"], said["after"]["domain"]) == (200, None, "math")
        chat = {"messages": [{"role": "user", "content": "Glorp the snark"}], "domain": "logic"}
        assert (await proxy.post("/stats/label", chat))[0] == 200
        assert corrections.classify("Glorp the snark").domain == "logic"
        for wrong in ({"text": TEXT}, {"domain": "law", "text": TEXT}, {"domain": 3, "text": TEXT}):
            status, _, answer = await proxy.post("/stats/label", wrong)
            assert (status, "math" in json.loads(answer)["error"]["message"]) == (400, True)
        for text in ("", "…", None, ["a"]):
            status, _, answer = await proxy.post("/stats/label", {"domain": "math", "text": text})
            assert (status, "no text" in json.loads(answer)["error"]["message"]) == (400, True)
        assert corrections.learned == 2


async def test_a_client_that_knows_teaches(tmp_path: Path) -> None:
    """X-Moe-Domain is a corrected label: with learning on, the next request needs no header."""
    corrections = Corrections(Fixed(), DOMAINS)
    body = {"model": "planted-moe", "messages": [{"role": "user", "content": TEXT}]}
    async with (
        Labelling(corrections, tmp_path / "c.npz") as labelling,
        surface(classifier=corrections, labelling=labelling) as proxy,
    ):
        assert (await proxy.post("/v1/chat/completions", body))[0] == 200
        assert corrections.learned == 0
        headers = {"X-Moe-Domain": "math"}
        assert (await proxy.post("/v1/chat/completions", body, headers=headers))[0] == 200
        await eventually(lambda: corrections.learned == 1)
        assert (await proxy.post("/v1/chat/completions", body))[0] == 200
        told = [classification for _, _, classification in proxy.observer.begun]
        assert [said.domain if said else "" for said in told] == [None, "math", "math"]


async def test_it_is_off_by_default() -> None:
    """Learning for the classifier is off by default, and then the route says how it is switched on."""
    assert load_settings({}).learn_labels is False
    async with surface() as proxy:
        status, _, answer = await proxy.post("/stats/label", {"text": TEXT, "domain": "math"})
        assert status == 501
        assert "--learn-labels" in json.loads(answer)["error"]["message"]
