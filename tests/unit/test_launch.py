"""llama-server's command line: what is set, what is left to the user, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from moe_proxy.engine.launch import LaunchInputs, batch_of, cache_types, launch_of
from moe_proxy.errors import ConfigError
from moe_proxy.planner import VramPlan

INPUTS = LaunchInputs(
    server=Path("/c/bin/llama-server"),
    model=Path("/m/x.gguf"),
    alias="x",
    socket=Path("/r/engine.sock"),
    context_length=4096,
    slots=2,
    threads=3,
    pager=True,
    ram_budget_bytes=100,
    expert_bytes=100,
    policy="posterior",
    vram=None,
    extra=(),
    environment={"PATH": "/bin", "HOME": "/h"},
)


def value(argv: tuple[str, ...], flag: str) -> str:
    """What follows ``flag``, which stands once."""
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    return argv[argv.index(flag) + 1]


def test_what_is_always_there() -> None:
    """Socket, model, alias and the routes that the proxy reads; no TCP port, no network."""
    launch = launch_of(INPUTS)
    assert launch.argv[0] == "/c/bin/llama-server"
    assert launch.socket == Path("/r/engine.sock")
    assert value(launch.argv, "--host") == "/r/engine.sock"
    assert value(launch.argv, "--model") == "/m/x.gguf"
    assert value(launch.argv, "--alias") == "x"
    assert value(launch.argv, "--fit") == "off"
    assert {"--jinja", "--metrics", "--slots", "--offline"} <= set(launch.argv)
    assert "--port" not in launch.argv


def test_the_context_is_per_slot() -> None:
    """--ctx-size is shared out among a given number of slots; without one each slot may use all of it."""
    argv = launch_of(INPUTS).argv
    assert (value(argv, "--ctx-size"), value(argv, "--parallel"), value(argv, "--threads")) == (
        "8192",
        "2",
        "3",
    )
    argv = launch_of(replace(INPUTS, slots=None, threads=None)).argv
    assert value(argv, "--ctx-size") == "4096"
    assert not {"--parallel", "--threads"} & set(argv)
    assert "--ctx-size" not in launch_of(replace(INPUTS, context_length=None)).argv


def test_cpu_uses_no_device() -> None:
    """--cpu works on a CUDA build too."""
    cpu = launch_of(INPUTS).argv
    assert (value(cpu, "--gpu-layers"), value(cpu, "--device")) == ("0", "none")
    assert "--cpu-moe" not in cpu


def test_a_gpu_that_holds_all_gets_all() -> None:
    """With all experts in VRAM the engine is started as stock llama.cpp would be; the pager counts."""
    launch = launch_of(replace(INPUTS, vram=VramPlan("all", 2**34, 0)))
    assert value(launch.argv, "--gpu-layers") == "99"
    assert "--cpu-moe" not in launch.argv and "--device" not in launch.argv
    assert not [name for name in launch.env if name.startswith("MOE_PAGER_VRAM")]


def test_a_paged_gpu_is_told_its_budget() -> None:
    """The engine measures what is left of the process's VRAM itself; long prompts go in few batches."""
    launch = launch_of(replace(INPUTS, vram=VramPlan("paged", 2**33, 2**30)))
    assert launch.env["MOE_PAGER_VRAM_BYTES"] == str(2**33)
    assert launch.env["MOE_PAGER_VRAM_OTHERS_BYTES"] == str(2**30)
    assert value(launch.argv, "--ubatch-size") == "2048"
    assert "--cpu-moe" not in launch.argv


@pytest.mark.parametrize(
    "inputs",
    [
        replace(INPUTS, vram=VramPlan("none", 2**33, 0)),
        replace(INPUTS, vram=VramPlan("paged", 2**33, 0), pager=False),
    ],
)
def test_without_paging_the_cpu_computes_the_experts(inputs: LaunchInputs) -> None:
    """Too little RAM to pin, or no pager: everything but the experts is on the GPU."""
    launch = launch_of(inputs)
    assert value(launch.argv, "--gpu-layers") == "99"
    assert "--cpu-moe" in launch.argv
    assert not [name for name in launch.env if name.startswith("MOE_PAGER_VRAM")]


def test_stock_with_some_layers_in_vram() -> None:
    """Without a pager, experts of the last layers may be in VRAM: stock llama.cpp's own split."""
    split = VramPlan("paged", 2**33, 0, layers_on_cpu=17)
    stock = launch_of(replace(INPUTS, vram=split, pager=False)).argv
    assert value(stock, "--n-cpu-moe") == "17"
    assert "--cpu-moe" not in stock
    assert "--n-cpu-moe" not in launch_of(replace(INPUTS, vram=split)).argv


def test_under_budget_the_file_is_the_home_of_the_experts() -> None:
    """A budget below all experts needs file pages: --cpu-moe once, and mmap."""
    argv = launch_of(replace(INPUTS, ram_budget_bytes=99)).argv
    assert value(argv, "--load-mode") == "mmap"
    assert argv.count("--cpu-moe") == 1
    assert (
        launch_of(replace(INPUTS, ram_budget_bytes=99, vram=VramPlan("none", 2**33, 0))).argv.count(
            "--cpu-moe"
        )
        == 1
    )
    assert "--load-mode" not in launch_of(INPUTS).argv


def test_the_pager_is_told_by_the_environment_and_off_means_unset() -> None:
    """On: MOE_PAGER, the budget and the policy. Off: none of them, whatever our environment says."""
    on = launch_of(INPUTS).env
    assert (on["MOE_PAGER"], on["MOE_PAGER_RAM_BYTES"], on["PATH"]) == ("1", "100", "/bin")
    assert on["MOE_PAGER_POLICY"] == "posterior"
    noisy = {"MOE_PAGER": "1", "MOE_PAGER_RAM_BYTES": "7", "MOE_PAGER_HALF_LIFE": "64"}
    noisy["MOE_PAGER_POLICY"] = "lru"
    assert launch_of(replace(INPUTS, environment=noisy)).env["MOE_PAGER_POLICY"] == "posterior"
    off = launch_of(replace(INPUTS, pager=False, ram_budget_bytes=1, environment=noisy))
    assert dict(off.env) == {"MOE_PAGER_HALF_LIFE": "64"}
    assert not {"--cpu-moe", "--load-mode"} & set(off.argv)


@pytest.mark.parametrize(("wait", "told"), [("sleep", "passive"), ("spin", "active")])
def test_how_threads_wait(wait: Literal["sleep", "spin"], told: str) -> None:
    """OpenMP is told; who set its variable has the last word, and nobody is told without a choice."""
    waiting = replace(INPUTS, thread_wait=wait)
    assert launch_of(waiting).env["OMP_WAIT_POLICY"] == told
    mine = replace(waiting, environment={"OMP_WAIT_POLICY": "mine"})
    assert launch_of(mine).env["OMP_WAIT_POLICY"] == "mine"
    assert "OMP_WAIT_POLICY" not in launch_of(INPUTS).env


def test_variables_of_other_llama_servers_do_not_reach_ours() -> None:
    """LLAMA_ARG_PORT, LLAMA_API_KEY and their like would change the child behind our back."""
    foreign = {
        "LLAMA_ARG_PORT": "1",
        "LLAMA_API_KEY": "k",
        "LLAMA_SERVER_ROUTER_PORT": "2",
        "AIP_MODE": "PREDICTION",
    }
    env = launch_of(replace(INPUTS, environment={**foreign, "CUDA_VISIBLE_DEVICES": "0"})).env
    assert not foreign.keys() & env.keys()
    assert env["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_users_arguments_come_last() -> None:
    """The last one wins in llama-server, so the user's word on anything that is not ours is final."""
    extra = ("--load-mode", "none", "-fa", "on")
    assert launch_of(replace(INPUTS, extra=extra)).argv[-4:] == extra


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--host", "use --host and --port"),
        ("--port=8080", "use --host and --port"),
        ("-m", "use --model"),
        ("--hf_repo", "use --model"),
        ("--alias", "use --alias"),
        ("-c", "use --ctx-size"),
        ("--parallel", "use --slots"),
        ("--api-key", "needs no key"),
        ("--no-slots", "reads the engine's slots"),
    ],
)
def test_what_is_ours_is_refused_with_our_option(argument: str, hint: str) -> None:
    """A flag that the proxy relies on is a ConfigError that names the way to say it."""
    with pytest.raises(ConfigError) as caught:
        launch_of(replace(INPUTS, extra=("--temp", "0", argument, "x")))
    assert argument in caught.value.message
    assert hint in caught.value.hint


def test_what_arguments_for_the_engine_say() -> None:
    """The last one counts, joined or not, with dashes or underscores; what is not a number says nothing."""
    arguments = ("-ctk", "q8_0", "--cache_type_k=q4_0", "--ubatch-size", "128", "-ub=64", "-ctv")
    assert cache_types(arguments) == ("q4_0", "f16")
    assert batch_of(arguments) == 64
    assert batch_of(("-ub", "many")) is None
    assert batch_of(()) is None
