"""Collecting: labelled prompts in, a router map out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from moe_proxy.domains.base import DOMAINS
from moe_proxy.errors import ConfigError, ControlError, EngineGoneError
from moe_proxy.routing.collect import builtin_prompts, collect, held_out_prompts
from moe_proxy.routing.labelled import Unfinished, read_prompts, work_of
from moe_proxy.routing.router_map import ModelKey, RouterMap, dump, parse

KEY = ModelKey("qwen3moe", "tiny", "ab" * 32, (0, 2), 3, 1)


class Engine:
    """Counts one token per word; every token picks the expert of its length, modulo 3."""

    def __init__(self) -> None:
        self.answered: dict[str, str] = {}

    async def complete(self, text: str, request_id: str) -> None:
        """Remember the prompt of the request."""
        assert request_id not in self.answered
        self.answered[request_id] = text

    async def usage(self, request_id: str) -> Mapping[str, object]:
        """What the prompt's words picked."""
        words = self.answered[request_id].split()
        row = [sum(len(word) % 3 == expert for word in words) for expert in range(3)]
        return {"tokens": len(words), "layers": {"0": row, "2": row}, "picks": 2 * len(words)}


async def test_counts_are_added_up_by_domain() -> None:
    """The counts of each request go to the domain that its prompt is labelled with."""
    seen: list[tuple[int, int]] = []
    found = await collect(
        Engine(),
        {"math": ["a bb", "ccc"], "logic": ["dddd"], "debug": []},
        KEY,
        made={"tool": "test"},
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.domains["math"].tokens == 3
    assert found.domains["math"].layers == {0: (1, 1, 1), 2: (1, 1, 1)}
    assert found.domains["logic"].layers[0] == (0, 1, 0)
    assert found.domains["debug"].layers[0] == (0, 0, 0)
    assert found.made == {"tool": "test", "tokens": 4}
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert parse(dump(found), "test") == found


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ({}, "tokens is None"),
        ({"tokens": -1}, "tokens is -1"),
        ({"tokens": 1, "layers": []}, "2 MoE layers"),
        ({"tokens": 1, "layers": {"0": [1, 0, 0]}}, "2 MoE layers"),
        ({"tokens": 1, "layers": {"0": [1, 0, 0], "2": [1, 0]}}, "layer 2 is not 3 counts"),
        ({"tokens": 1, "layers": {"0": [1, 0, -1], "2": [1, 0, 0]}}, "layer 0"),
        ({"tokens": 1, "layers": {"0": [1, 0, 0.5], "2": [1, 0, 0]}}, "layer 0"),
    ],
)
async def test_counts_that_do_not_fit_are_refused(usage: dict[str, object], words: str) -> None:
    """Counts of another model never get into a map."""

    class Broken(Engine):
        async def usage(self, request_id: str) -> Mapping[str, object]:
            return usage

    with pytest.raises(ControlError, match=words):
        await collect(Broken(), {"math": ["a"]}, KEY, made={})


async def test_an_engine_that_dies_ends_collecting() -> None:
    """An engine's own error is not swallowed: half a map is none."""

    class Dying(Engine):
        async def complete(self, text: str, request_id: str) -> None:
            raise EngineGoneError("gone")

    with pytest.raises(EngineGoneError):
        await collect(Dying(), {"math": ["a"]}, KEY, made={})


def test_shipped_prompts() -> None:
    """Each domain has prompts to collect from and others that are held out."""
    used, held = builtin_prompts(), held_out_prompts()
    assert tuple(used) == tuple(held) == DOMAINS
    for domain in DOMAINS:
        assert len(used[domain]) >= 6
        assert len(held[domain]) >= 6
        assert all(prompt.strip() == prompt and prompt for prompt in used[domain] + held[domain])
    everything = [prompt for half in (used, held) for prompts in half.values() for prompt in prompts]
    assert len(set(everything)) == len(everything)


PROMPTS = {"math": ("a bb", "ccc"), "logic": ("dddd",), "debug": ("a", "e e")}


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("answered", range(6))
async def test_an_interrupted_collection_goes_on(tmp_path: Path, answered: int) -> None:
    """Collecting is resumable: cut after any prompt, it ends with the same map and runs no prompt twice."""
    ran: list[str] = []

    class Cut(Engine):
        async def complete(self, text: str, request_id: str) -> None:
            if len(ran) == answered and not resumed:
                raise EngineGoneError("gone")
            ran.append(text)
            await super().complete(text, request_id)

    resumed = False
    unfinished = Unfinished(tmp_path / "map.json.part", work_of(PROMPTS, 8))

    async def keep(so_far: RouterMap, done: int) -> None:
        unfinished.save(so_far, done)

    async def run() -> RouterMap:
        begun = unfinished.begun(KEY)
        return await collect(Cut(), PROMPTS, KEY, made={"tool": "test"}, begun=begun, keep=keep)

    if answered < 5:
        with pytest.raises(EngineGoneError):
            await run()
    resumed = True
    found = await run()
    assert found == await collect(Engine(), PROMPTS, KEY, made={"tool": "test"})
    assert ran == [text for texts in PROMPTS.values() for text in texts]
    assert _names(tmp_path) == ["map.json.part"]
    unfinished.remove()
    assert not _names(tmp_path)


async def test_another_collection_is_not_gone_on_with(tmp_path: Path) -> None:
    """What is half done of other prompts, of other answers or of another model is not taken up."""
    path = tmp_path / "part"
    unfinished = Unfinished(path, work_of(PROMPTS, 8))
    assert unfinished.begun(KEY) is None
    unfinished.save(await collect(Engine(), PROMPTS, KEY, made={}), 5)
    assert unfinished.begun(KEY) is not None
    assert Unfinished(path, work_of(PROMPTS, 9)).begun(KEY) is None
    assert Unfinished(path, work_of({"math": ("a bb",)}, 8)).begun(KEY) is None
    assert unfinished.begun(ModelKey("qwen3moe", "tiny", "cd" * 32, (0, 2), 3, 1)) is None
    path.write_text("{", encoding="utf-8")
    assert unfinished.begun(KEY) is None


def test_prompts_of_an_operator(tmp_path: Path) -> None:
    """``--prompts`` takes a folder with a file per domain, or a file of JSON lines; any label will do."""
    (tmp_path / "law.txt").write_text("one\ntwo\n----\nthree\n", encoding="utf-8")
    (tmp_path / "math.txt").write_bytes(b"a\r\n----\r\nb")
    (tmp_path / "notes.md").write_text("no prompts", encoding="utf-8")
    assert read_prompts(tmp_path) == {"law": ("one\ntwo", "three"), "math": ("a", "b")}
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"prompt": "a\u2028b", "domain": "law", "lang": "en"}\n\n{"prompt": "c", "domain": "law"}\n',
        encoding="utf-8",
    )
    assert read_prompts(lines) == {"law": ("a\u2028b", "c")}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no labelled prompts"),
        (b"{", "line 1: not JSON"),
        (b'{"prompt": "a", "domain": "b"}\n[]', "line 2: prompt"),
        (b'{"prompt": "a"}', "line 1: domain"),
        (b'{"prompt": " ", "domain": "b"}', "line 1: prompt"),
        (b'{"prompt": "a", "domain": 3}', "line 1: domain"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"\xff", "UTF-8"),
    ],
)
def test_prompts_that_are_none_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """A file of prompts that is malformed is refused with file, line and reason."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        read_prompts(path)
    assert str(path) in str(refused.value)
    with pytest.raises(ConfigError, match="does not exist"):
        read_prompts(tmp_path / "nowhere")
