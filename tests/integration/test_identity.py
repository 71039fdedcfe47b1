"""The pager changes where weights are read from, never what is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from tests.support.engine_process import engine_process
from tests.support.text import CODE, MATH, STORY, greedy

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
