"""Owns llama-server's command line and environment: the only place that knows its flags.

Pure: it reads no file, no environment and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_proxy.engine.supervisor import Launch
from moe_proxy.errors import ConfigError
from moe_proxy.planner import PAGED_BATCH, VramPlan

_ALL_LAYERS = 99
_LISTENING = "clients reach the proxy: use --host and --port before the --"
_MODEL = "use --model before the --"
_ENGINE_KEY = "only the proxy can reach the engine's socket; it needs no key of its own"
_NETWORK = "the engine never touches the network"
# What we set and rely on. Flags are as llama-server spells them, with dashes.
_OURS: Mapping[str, str] = {
    "--host": _LISTENING,
    "--port": _LISTENING,
    "--reuse-port": _LISTENING,
    "--api-prefix": _LISTENING,
    "--ssl-key-file": _LISTENING,
    "--ssl-cert-file": _LISTENING,
    "--api-key": _ENGINE_KEY,
    "--api-key-file": _ENGINE_KEY,
    "-m": _MODEL,
    "--model": _MODEL,
    "-mu": _MODEL,
    "--model-url": _MODEL,
    "-hf": _MODEL,
    "-hfr": _MODEL,
    "--hf-repo": _MODEL,
    "-hff": _MODEL,
    "--hf-file": _MODEL,
    "-dr": _MODEL,
    "--docker-repo": _MODEL,
    "--models-dir": _MODEL,
    "--models-preset": _MODEL,
    "-a": "use --alias before the --",
    "--alias": "use --alias before the --",
    "-c": "use --ctx-size before the --",
    "--ctx-size": "use --ctx-size before the --",
    "-np": "use --slots before the --",
    "--parallel": "use --slots before the --",
    "-t": "use --threads before the --",
    "--threads": "use --threads before the --",
    "-hft": _NETWORK,
    "--hf-token": _NETWORK,
    "--no-metrics": "moe-proxy reads the engine's metrics",
    "--no-slots": "moe-proxy reads the engine's slots",
    "--log-disable": "moe-proxy shows the engine's last lines when it fails",
    "--log-file": "use moe-proxy logs",
}
# Variables that llama-server obeys. One set for another llama-server must not change this one: what is wanted
# here goes after the --. Nor is anything of ours for its eyes: clients' keys may be among it.
_FOREIGN_PREFIXES = ("LLAMA_ARG_", "LLAMA_SERVER_", "AIP_", "MOE_PROXY_", "MOE_PAGER_RAM_", "MOE_PAGER_VRAM_")
_FOREIGN = frozenset({"LLAMA_API_KEY", "MOE_PAGER", "MOE_PAGER_POLICY"})


@dataclass(frozen=True)
class LaunchInputs:
    """Everything that decides how llama-server is started.

    ``vram`` is None for a run without a GPU. ``context_length`` is in tokens per slot; None for it, ``slots``
    or ``threads`` leaves the choice to llama-server. ``extra`` are arguments of the user, passed on last.
    ``environment`` is ours, whole. ``thread_wait`` is what threads do that wait for each other.
    """

    server: Path
    model: Path
    alias: str
    socket: Path
    context_length: int | None
    slots: int | None
    threads: int | None
    pager: bool
    ram_budget_bytes: int
    expert_bytes: int
    policy: str
    vram: VramPlan | None
    extra: tuple[str, ...]
    environment: Mapping[str, str]
    thread_wait: Literal["spin", "sleep"] | None = None


def launch_of(inputs: LaunchInputs) -> Launch:
    """Argv and environment for ``inputs``. Raises ConfigError when ``extra`` names a flag that is ours."""
    refuse_our_flags(inputs.extra)
    argv = [str(inputs.server), "--host", str(inputs.socket), "--model", str(inputs.model)]
    argv += ["--alias", inputs.alias, "--jinja", "--metrics", "--slots", "--offline"]
    argv += _size_flags(inputs)
    argv += _placement_flags(inputs)
    argv += inputs.extra
    return Launch(argv=tuple(argv), env=_environment(inputs), socket=inputs.socket)


def refuse_our_flags(extra: tuple[str, ...]) -> None:
    """Raise ConfigError for the first argument that sets what moe-proxy itself sets."""
    for argument in extra:
        flag = argument.partition("=")[0]
        # llama-server takes underscores for dashes in long flags.
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in _OURS:
            raise ConfigError(f"llama-server's {argument} is set by moe-proxy", _OURS[flag])


def value_of(arguments: Sequence[str], *flags: str) -> str | None:
    """The value that llama-server would take for an option spelt as any of ``flags``: the last one given."""
    found = None
    for index, argument in enumerate(arguments):
        flag, joined, value = argument.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in flags:
            found = value if joined else next(iter(arguments[index + 1 : index + 2]), None)
    return found


def cache_types(arguments: Sequence[str]) -> tuple[str, str]:
    """Types of the keys and of the values in the KV cache under these arguments."""
    keys = value_of(arguments, "-ctk", "--cache-type-k")
    values = value_of(arguments, "-ctv", "--cache-type-v")
    return keys or "f16", values or "f16"


def batch_of(arguments: Sequence[str]) -> int | None:
    """Tokens that these arguments have computed at once; None where they do not say."""
    given = value_of(arguments, "-ub", "--ubatch-size")
    return int(given) if given and given.isdecimal() and int(given) > 0 else None


def _size_flags(inputs: LaunchInputs) -> list[str]:
    flags: list[str] = []
    if inputs.slots is not None:
        flags += ["--parallel", str(inputs.slots)]
    if inputs.context_length is not None:
        # A given number of slots shares the context out; without one, each slot may use all of it.
        flags += ["--ctx-size", str(inputs.context_length * (inputs.slots or 1))]
    if inputs.threads is not None:
        flags += ["--threads", str(inputs.threads)]
    return flags


def _placement_flags(inputs: LaunchInputs) -> list[str]:
    """Where weights live. llama-server's own fitting is off: it does not know of the pager's memory."""
    flags = ["--fit", "off"]
    if inputs.vram is None:
        flags += ["--gpu-layers", "0", "--device", "none"]
    else:
        flags += ["--gpu-layers", str(_ALL_LAYERS)]
        if inputs.vram.placement == "all":
            return flags
        if inputs.pager and inputs.vram.placement == "paged":
            return [*flags, "--load-mode", "mmap", "--ubatch-size", str(PAGED_BATCH)]
        if not inputs.pager and inputs.vram.layers_on_cpu is not None:
            return [*flags, "--n-cpu-moe", str(inputs.vram.layers_on_cpu)]
    under_budget = inputs.pager and inputs.ram_budget_bytes < inputs.expert_bytes
    if inputs.vram is not None or under_budget:
        flags.append("--cpu-moe")
    if under_budget:
        # Pages can be given back only while the file is their home: no repacking, no copies.
        flags += ["--load-mode", "mmap"]
    return flags


def _environment(inputs: LaunchInputs) -> dict[str, str]:
    environment = {
        name: value
        for name, value in inputs.environment.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    if inputs.thread_wait is not None:
        # How OpenMP, with which ggml computes, is told. Who set the variable knows what for.
        environment.setdefault("OMP_WAIT_POLICY", "passive" if inputs.thread_wait == "sleep" else "active")
    if inputs.pager:
        environment["MOE_PAGER"] = "1"
        environment["MOE_PAGER_RAM_BYTES"] = str(inputs.ram_budget_bytes)
        environment["MOE_PAGER_POLICY"] = inputs.policy
        if inputs.vram is not None and inputs.vram.placement == "paged":
            environment["MOE_PAGER_VRAM_BYTES"] = str(inputs.vram.budget_bytes)
            environment["MOE_PAGER_VRAM_OTHERS_BYTES"] = str(inputs.vram.others_bytes)
    return environment
