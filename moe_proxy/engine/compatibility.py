"""Owns whether an engine that was built elsewhere, or for other cards, does what a request wants here.

Pure: it compares what went into a build (the ``inputs`` of recipe.py) and never looks at the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# In the inputs where a native build names its CPU. No feature is written in capitals.
PORTABLE = "PORTABLE"
# What llama.cpp compiles for on x86-64 when it is not told to compile for this very machine.
PORTABLE_X86_SETS = ("avx", "avx2", "bmi2", "f16c", "fma", "sse4_2")
# Flags in which two engines may differ and yet do the same, each compared in its own way below.
_NATIVE, _CARDS = "-DGGML_NATIVE=", "-DCMAKE_CUDA_ARCHITECTURES="
# What must be the same, and what it is called towards a person.
_SAME = {
    "recipe": "by other steps",
    "source": "from another llama.cpp",
    "commit": "from another llama.cpp",
    "additions": "with other patches or another pager",
    "stock": "with or without the pager",
    "cuda": "with or without CUDA",
}
_FEATURE = re.compile(r"[a-z][a-z0-9_]*")
_ARCHITECTURE = re.compile(r"(\d{2,3})([af]?)(-real|-virtual)?")


def portable_cpu(machine: str) -> str:
    """What names the CPU in the inputs of an engine that is to run on most CPUs of ``machine``'s kind."""
    sets = PORTABLE_X86_SETS if machine == "x86_64" else ()
    return " ".join((machine, PORTABLE, *sets))


def is_portable(inputs: Mapping[str, object]) -> bool:
    """Whether it was built to run on other machines too."""
    return PORTABLE in str(inputs.get("cpu")).split()


def refusal(
    built: Mapping[str, object], wanted: Mapping[str, object], cpu: str, capabilities: Iterable[str]
) -> str:
    """Why an engine of inputs ``built`` does not serve ``wanted`` here; "" when it does.

    ``cpu`` is this machine's, as the inputs name it; ``capabilities`` those of its cards ("8.9").
    """
    for name, words in _SAME.items():
        if built.get(name) != wanted.get(name):
            return f"it was built {words}, unlike what this moe-proxy builds"
    if _other_flags(built) != _other_flags(wanted):
        return "it was built with other flags, unlike what this moe-proxy builds"
    machine, here = cpu.split(" ")[0], set(cpu.split(" "))
    built_for = str(built.get("cpu"))
    if built_for.split(" ")[0] != machine:
        return f"it is for {built_for.split(' ')[0]}, and this machine is {machine}"
    lacking = sorted(set(filter(_FEATURE.fullmatch, built_for.split(" ")[1:])) - here)
    if lacking:
        return f"it uses {', '.join(lacking[:5])}, which this CPU does not have"
    architectures = cuda_architectures(built)
    for capability in capabilities:
        if built.get("cuda") and not any(_covers(one, capability) for one in architectures):
            return (
                f"it was built for CUDA architectures {', '.join(architectures)},"
                f" and a card here has compute capability {capability}"
            )
    return ""


def cuda_architectures(inputs: Mapping[str, object]) -> list[str]:
    """The CUDA architectures that it was built for, as CMake names them ("89-real")."""
    flags = inputs.get("flags")
    for flag in flags if isinstance(flags, list) else []:
        if str(flag).startswith(_CARDS):
            return [name for name in str(flag).removeprefix(_CARDS).split(";") if name]
    return []


def capabilities_of(inputs: Mapping[str, object]) -> list[str]:
    """The compute capabilities ("8.9") that a build was asked for."""
    found = (_ARCHITECTURE.fullmatch(name) for name in cuda_architectures(inputs))
    return [f"{match[1][:-1]}.{match[1][-1]}" for match in found if match]


def _other_flags(inputs: Mapping[str, object]) -> list[str]:
    flags = inputs.get("flags")
    return [
        str(flag)
        for flag in (flags if isinstance(flags, list) else [])
        if not str(flag).startswith((_NATIVE, _CARDS))
    ]


def _covers(architecture: str, capability: str) -> bool:
    """Whether code for ``architecture`` runs on a card, by the CUDA programming guide's compatibility rules.

    Machine code runs within a major version from its own minor version on, and PTX (virtual, or no suffix)
    on everything later; neither does so if it is specific to one architecture (a).
    """
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return False
    major, minor = int(match[1][:-1]), int(match[1][-1])
    card_major, _, card_minor = capability.partition(".")
    card = (int(card_major), int(card_minor or 0))
    if match[2] == "a":
        return card == (major, minor)
    if match[2] == "f" or match[3] == "-real":
        return card[0] == major and card[1] >= minor
    return card >= (major, minor)
