"""What ``moe-proxy demo`` prints, and how it computes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from moe_proxy.cli.demo import _report, _Row
from moe_proxy.errors import ConfigError
from tests.support.command_line import run_main

_ROWS = [
    _Row(
        prompt="Write a Python function that sorts a list of numbers.",
        api="openai",
        domain="codegen 0.97",
        prior="df57864a5be0",
        hit_before="41.2 %",
        hit_after="78.5 %",
        hot="31 12 30 17",
        tokens_per_s=81.4,
        answer="Here is a function [that] sorts.",
    ),
    _Row(
        prompt="如何在 Linux 服务器上安装和配置 Docker 容器？",
        api="ollama",
        domain="creative_write 0.99",
        prior="12a8d4c0c63e",
        hit_before="100.0 %",
        hit_after="100.0 %",
        hot="22 23 24 25",
        tokens_per_s=1234.0,
        answer="您可以使用 Docker。",
    ),
]


def _printed(width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False).print(_report(_ROWS))
    return out.getvalue().splitlines()


def test_each_prompts_figures_stand_in_one_line_of_80_columns() -> None:
    """`make demo` shows a table: at 80 columns a prompt's figures are a whole line."""
    lines = [line.split() for line in _printed(80)]
    assert [
        "1",
        "codegen",
        "0.97",
        "df57864a5be0",
        "41.2",
        "%",
        "78.5",
        "%",
        "31",
        "12",
        "30",
        "17",
        "81",
    ] in lines
    assert [
        "2",
        "creative_write",
        "0.99",
        "12a8d4c0c63e",
        "100.0",
        "%",
        "100.0",
        "%",
        "22",
        "23",
        "24",
        "25",
        "1234",
    ] in lines
    assert ["#", "domain", "prior", "before", "after", "hot", "experts", "tokens/s"] in lines


def test_prompt_and_answer_stand_above_the_figures_unbroken() -> None:
    """`make demo` answers its prompts in readable text: each on lines of its own, brackets kept."""
    lines = [line.strip() for line in _printed(80)]
    asked = lines.index("1. Write a Python function that sorts a list of numbers. (openai API)")
    assert lines[asked + 1] == "Here is a function [that] sorts."
    assert "2. 如何在 Linux 服务器上安装和配置 Docker 容器？ (ollama API)" in lines


@pytest.mark.usefixtures("own_folders")
@pytest.mark.parametrize(("told", "waits"), [(None, "passive"), ("active", "active")])
def test_a_model_that_ships_runs_beside_other_programs(
    monkeypatch: pytest.MonkeyPatch, told: str | None, waits: str
) -> None:
    """The demo serves the trained model whatever is configured for another one, and its threads do not spin
    away the time of other programs, unless they were told to."""
    environments: list[Mapping[str, str]] = []

    def stop_here(settings: object, environment: Mapping[str, str], *_: object) -> None:
        environments.append(environment)
        raise ConfigError("enough")

    module = import_module("moe_proxy.cli.demo")
    monkeypatch.setattr(module, "examined", lambda *_: None)
    monkeypatch.setattr(module, "engine_for_start", lambda *_: Path("/bin/llama-server"))
    monkeypatch.setattr(module, "start_detached", stop_here)
    monkeypatch.setenv("MOE_PROXY_MODEL", "qwen.gguf")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", told)
    assert run_main(monkeypatch, "demo") == 2
    (environment,) = environments
    assert environment["MOE_PROXY_MODEL"] == "smollm2-moe-demo"
    assert environment["OMP_WAIT_POLICY"] == waits
