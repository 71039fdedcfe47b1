"""Owns what was measured of this machine with one model: its record and its file. It measures nothing."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from moe_proxy.config import Settings
from moe_proxy.files import write_text
from moe_proxy.hardware import Hardware, cpu_name

_log = logging.getLogger(__name__)

FORMAT = "moe-proxy-calibration/1"
_GIB = 2**30


@dataclass(frozen=True)
class Trial:
    """One way to serve, measured; medians.

    ``patient``: threads that have nothing to do sleep; otherwise they spin until there is something.
    ``answer_s`` is what the prompt and the answer of the measurement took, as the engine timed them.
    """

    threads: int
    patient: bool
    pager: bool
    prompt_per_s: float
    decode_per_s: float
    answer_s: float


@dataclass(frozen=True)
class Budgets:
    """What was asked for when it was measured, as it was written; a choice about the pager holds for that."""

    ram: str | None
    vram: str | None


@dataclass(frozen=True)
class Choice:
    """What serves best, with the reason in words. ``trial`` is its measurement."""

    trial: Trial
    reason: str


@dataclass(frozen=True)
class Calibration:
    """What was found.

    ``bandwidths_bytes_per_s`` are of ram, disk, vram and link; None is one that was not measured.
    """

    machine: str
    model: str
    fingerprint: str
    gpu: bool
    date: str
    version: str
    bandwidths_bytes_per_s: Mapping[str, float | None]
    budgets: Budgets
    trials: tuple[Trial, ...]
    choice: Choice
    format: str = FORMAT


def machine_of(hardware: Hardware) -> str:
    """What tells this machine from another one, in words: processor, cores, RAM, GPUs."""
    ram = f"{round(hardware.ram_total_bytes / _GIB)} GiB"
    return ", ".join(
        [cpu_name(), f"{hardware.cores_physical} cores", ram, *(gpu.name for gpu in hardware.gpus)]
    )


def calibration_path(state_dir: Path, hardware: Hardware, fingerprint: str, *, gpu: bool) -> Path:
    """Where the calibration of this machine and the model of ``fingerprint`` is kept."""
    machine = hashlib.sha256(machine_of(hardware).encode()).hexdigest()[:12]
    return state_dir / "calibration" / f"{machine}-{fingerprint[:16]}-{'gpu' if gpu else 'cpu'}.json"


def write(calibration: Calibration, path: Path) -> None:
    """Keep it. Raises OSError."""
    write_text(path, json.dumps(asdict(calibration), indent=1) + "\n")


def read(path: Path, hardware: Hardware, fingerprint: str) -> Calibration | None:
    """What is kept in ``path`` of this machine and model; None, with a warning, for what is none."""
    try:
        found = TypeAdapter(Calibration).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        _log.warning("%s is not used: %s; make it anew with moe-proxy tune", path, first)
        return None
    same = (found.format, found.machine, found.fingerprint) == (FORMAT, machine_of(hardware), fingerprint)
    return found if same else None


def calibrated(settings: Settings, calibration: Calibration) -> Settings:
    """``settings`` with what was measured in the place of what nobody set.

    The pager is switched off where stock llama.cpp won under the budgets that are asked for now.
    """
    best = calibration.choice.trial
    found: dict[str, object] = {"threads": best.threads, "thread_wait": "sleep" if best.patient else "spin"}
    if Budgets(settings.ram_budget, settings.vram_budget) == calibration.budgets and not best.pager:
        found["pager"] = False
    return settings.model_copy(
        update={name: value for name, value in found.items() if name not in settings.model_fields_set}
    )
