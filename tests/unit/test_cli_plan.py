"""``moe-proxy plan``, and the short form of it that ``start`` prints."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from rich.console import Console

from moe_proxy.cli.memory_picture import bar, shares
from moe_proxy.cli.serve import describe
from moe_proxy.config import Settings
from moe_proxy.forecast import Memory, Part
from moe_proxy.hardware import Hardware
from moe_proxy.learning import learned_path
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.planner import plan_of
from moe_proxy.routing.learner import Learner
from moe_proxy.routing.router_map import ModelKey
from moe_proxy.served import examine
from tests.support.command_line import run_main

GIB = 2**30
MACHINE = Hardware(16 * GIB, 12 * GIB, 4, None, ())

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 12 GiB available RAM, without a GPU."""
    monkeypatch.setattr(import_module("moe_proxy.cli.plan"), "probe", lambda: MACHINE)


def plan_json(monkeypatch: pytest.MonkeyPatch, capsys: Any, *args: str) -> Any:
    """What ``plan --json`` prints."""
    assert run_main(monkeypatch, "plan", "--json", *args) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("no_gpu")
def test_a_card_that_is_not_here(monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path) -> None:
    """--vram, --ram and --ctx plan for another machine; the commands are those of that start."""
    facts = plan_json(
        monkeypatch, capsys, "--model", str(planted_model), "--vram", "1G", "--ram", "8G", "--ctx", "2048"
    )
    assert facts["context_tokens"] == 2048
    assert facts["memory"]["vram"]["total_bytes"] == GIB
    assert facts["memory"]["ram"]["total_bytes"] == 8 * GIB
    assert facts["memory"]["vram"]["parts"]["KV cache"] == 6 * 2**20
    assert facts["plan"]["vram"]["placement"] == "all"
    start = shlex.split(facts["start_command"])
    assert start == shlex.split(
        f"moe-proxy start --model {planted_model} --gpu --vram-budget 1G --ctx-size 2048"
    )
    engine = shlex.split(facts["engine_command"])
    assert engine[engine.index("--ctx-size") + 1] == "2048"
    assert "MOE_PAGER=1" in engine
    assert [word for word in engine if word.startswith("MOE_PROXY")] == []


@pytest.mark.usefixtures("no_gpu")
def test_the_hit_rate_comes_from_the_shipped_map(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path
) -> None:
    """Planted routing is far from even, and the map of this very file says so."""
    facts = plan_json(monkeypatch, capsys, "--model", str(planted_model), "--ram-budget", "30%")
    hits = facts["hit_rate"]
    assert hits["from_map"]
    assert 0.5 < hits["least"] < hits["mean"] < hits["most"] <= 1
    assert facts["resident_bytes"] == int(0.3 * facts["plan"]["expert_bytes"])
    assert facts["improvements"][0]["change"] == "all experts in RAM: leave --ram-budget out"


@pytest.mark.usefixtures("no_gpu")
def test_what_was_learned_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path, tmp_path: Path
) -> None:
    """What traffic has taught of the experts used is in the estimate; `--no-learn` leaves it out."""
    layout = layout_of(read_header(planted_model))
    learner = Learner(ModelKey.of(layout), None, 1e5)
    counts = np.zeros((len(layout.layers), layout.experts), np.int64)
    counts[:, :4] = 10**6
    learner.learn({"code": 1.0}, 10**6, counts)
    path = learned_path(tmp_path / "state" / "11435", layout.fingerprint)
    path.parent.mkdir(parents=True)
    path.write_text(learner.dump())
    args = ("--model", str(planted_model), "--ram-budget", "20%")
    hits = plan_json(monkeypatch, capsys, *args)["hit_rate"]
    assert hits["most"] > 0.99
    assert hits["most"] > plan_json(monkeypatch, capsys, *args, "--no-learn")["hit_rate"]["most"]
    path.write_text("{}")
    assert plan_json(monkeypatch, capsys, *args)["hit_rate"]["most"] < 0.99


@pytest.mark.usefixtures("no_gpu")
def test_a_header_is_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path, tmp_path: Path
) -> None:
    """A file that ends before its weights is planned as the whole one, but for the map that is its own."""
    reader = gguf.GGUFReader(planted_model)
    head = tmp_path / "head.gguf"
    with planted_model.open("rb") as file:
        head.write_bytes(file.read(reader.data_offset))
    whole = plan_json(monkeypatch, capsys, "--model", str(planted_model), "--ram-budget", "30%")
    alone = plan_json(monkeypatch, capsys, "--model", str(head), "--ram-budget", "30%")
    assert alone["memory"]["ram"]["parts"] == whole["memory"]["ram"]["parts"]
    assert whole["hit_rate"]["from_map"] and not alone["hit_rate"]["from_map"]
    named = plan_json(
        monkeypatch, capsys, "--model", str(head), "--ram-budget", "30%",
        "--router-map", str(Path(__file__).parents[2] / "maps" / "planted-moe.json"),
    )  # fmt: skip
    assert named["hit_rate"] == whole["hit_rate"]


@pytest.mark.usefixtures("no_gpu")
def test_arguments_for_the_engine_count(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path
) -> None:
    """A smaller type of KV cache and another batch make another plan."""
    args = ("--model", str(planted_model), "--ctx", "2048", "--")
    plain = plan_json(monkeypatch, capsys, *args)["memory"]["ram"]["parts"]
    small = plan_json(monkeypatch, capsys, *args, "-ctk", "q8_0", "--cache_type_v=q8_0", "-ub", "128")
    assert small["memory"]["ram"]["parts"]["KV cache"] == plain["KV cache"] * 34 // 64
    assert small["memory"]["ram"]["parts"]["compute buffers"] == plain["compute buffers"] // 4
    assert small["engine_command"].endswith("-ctk q8_0 --cache_type_v=q8_0 -ub 128")


@pytest.mark.usefixtures("no_gpu")
def test_what_a_person_reads(monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path) -> None:
    """Bars in letters where there is no colour, and each estimate named as one, with what it is from."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert run_main(monkeypatch, "plan", "--model", str(planted_model), "--bandwidth", "ram=60") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert re.search(r"^RAM +12\.0 GiB  D+K+C+E+\.+$", shown, re.MULTILINE)
    assert "E experts" in shown and "D dense weights" in shown
    assert "at 60 GB/s" in shown and "as given" in shown
    assert shown.count("estimate") == 2
    assert "moe-proxy start --model" in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpu",), "--vram 8G"),
        (("--vram", "much"), "'much'"),
        (("--ram", "30%"), "--ram 30%"),
        (("--bandwidth", "tape=3"), "tape=3"),
        (("--bandwidth", "ram=fast"), "ram=fast"),
        (("--model", "/nowhere.gguf"), "/nowhere.gguf"),
        (("--", "-ctk", "q3"), "'q3'"),
        (("extra",), "'extra'"),
        (("--", "--port", "1"), "--port"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_what_cannot_be_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path, args: tuple[str, ...], said: str
) -> None:
    """Bad input is one line with the value, and exit code 2."""
    model = () if "--model" in args else ("--model", str(planted_model))
    assert run_main(monkeypatch, "plan", *model, *args) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


def test_cells_of_a_bar() -> None:
    """Cells add up, follow the sizes, and nobody who takes something is without one."""
    assert shares([50, 30, 20], 10) == [5, 3, 2]
    assert shares([10**9, 1, 0], 10) == [9, 1, 0]
    assert shares([1, 1, 1], 2) != [1, 1, 1] and sum(shares([1, 1, 1], 2)) == 2
    assert shares([], 10) == [] and shares([0, 0], 10) == [0, 0]
    for sizes in ([3, 3, 3], [1, 2, 97], [7, 11, 13, 17]):
        assert sum(shares(sizes, 60)) == 60


def test_a_bar_says_what_is_over() -> None:
    """Parts that exceed the memory are drawn to its end, and the rest is named."""
    lines = bar("VRAM", Memory(GIB, (Part("experts", GIB), Part("KV cache", GIB))), 20, letters=True)
    assert lines[0].plain.endswith("E" * 10 + "K" * 10)
    assert "1.0 GiB more than there is" in lines[-1].plain


def test_start_prints_the_short_form(planted_model: Path, capsys: Any) -> None:
    """What runs, where memory goes, and what to expect: three lines."""
    served = examine(Settings(model=planted_model, ram_budget="30%"), hardware=MACHINE)
    assert served.plan == plan_of(served.layout, served.footprint, MACHINE, served.wanted)
    describe(served, Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("RAM 12.0 GiB: experts 10.8 MiB, dense weights")
    assert re.search(r"about \d+% .* of picks resident, at most \d+ t/s; an estimate", lines[2])
