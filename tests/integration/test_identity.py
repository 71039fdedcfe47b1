"""The pager changes where weights are read from, never what is computed."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.resources import data_path
from moe_proxy.routing.prior import mixture_prior
from moe_proxy.routing.router_map import load
from tests.support.engine_process import engine_process
from tests.support.text import CODE, MATH, STORY, call, greedy

pytestmark = pytest.mark.engine

PROMPTS = (CODE, STORY, MATH)
PLACED = ("--cpu-moe", "--load-mode", "mmap")


@pytest.fixture(scope="module")
def stock_texts(stock_engine: EngineBuild, planted_model: Path) -> list[str]:
    """Greedy texts of unpatched llama-server with its default placement."""
    with engine_process(stock_engine.server, planted_model) as socket:
        texts = [greedy(socket, prompt) for prompt in PROMPTS]
    assert len(set(texts)) == len(texts), "the prompts must lead to different texts, or the test says nothing"
    return texts


def test_pager_off_is_stock(engine: EngineBuild, planted_model: Path, stock_texts: list[str]) -> None:
    """Off means stock behaviour: the patched server without MOE_PAGER gives stock's text."""
    with engine_process(engine.server, planted_model) as socket:
        assert [greedy(socket, prompt) for prompt in PROMPTS] == stock_texts


@pytest.mark.parametrize("percent", [0, 30, 100])
def test_pager_on_gives_stock_text(
    engine: EngineBuild, planted_model: Path, stock_texts: list[str], percent: int
) -> None:
    """Greedy text with the pager on, at RAM budgets of 0, 30 and 100 %, equals that of stock."""
    budget = layout_of(read_header(planted_model)).total_expert_bytes * percent // 100
    flags = PLACED if percent < 100 else ()
    with engine_process(
        engine.server, planted_model, *flags, MOE_PAGER="1", MOE_PAGER_RAM_BYTES=str(budget)
    ) as socket:
        assert [greedy(socket, prompt) for prompt in PROMPTS] == stock_texts
        ram = call(socket, "GET", "/experts")["tiers"]["ram"]
        stats = call(socket, "GET", "/experts/stats")
    # An inert pager would give stock's text as well.
    assert ram["budget_bytes"] == budget
    assert stats["picks"] > 0
    if percent < 100:
        assert ram["home"] == "mmap"
        assert stats["misses"] > 0
        assert stats["given_back_bytes"] > 0
    if percent == 30:
        assert stats["promotions"] > 0
        assert stats["hits"] > 0
    if percent == 0:
        assert stats["hits"] == 0


def test_text_stays_while_the_table_changes(
    engine: EngineBuild, planted_model: Path, stock_texts: list[str]
) -> None:
    """The text is stock's while priors of different domains move experts in the middle of generations."""
    router_map = load(data_path("maps") / "planted-moe.json")
    budget = layout_of(read_header(planted_model)).total_expert_bytes * 30 // 100
    with engine_process(
        engine.server, planted_model, *PLACED, MOE_PAGER="1", MOE_PAGER_RAM_BYTES=str(budget)
    ) as socket:
        finished = threading.Event()

        def disturb() -> None:
            for domain in itertools.cycle(router_map.domains):
                prior = mixture_prior(router_map, ({domain: 1.0},), kappa=4096.0)
                assert prior is not None
                call(socket, "POST", "/experts/prior", prior.to_json())
                if finished.wait(0.01):
                    return

        disturber = threading.Thread(target=disturb)
        disturber.start()
        texts = [greedy(socket, prompt) for prompt in PROMPTS]
        finished.set()
        disturber.join()
        assert call(socket, "GET", "/experts/stats")["demotions"] > 0
    assert texts == stock_texts
