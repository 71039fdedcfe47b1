"""Owns what a benchmark found: its file, what it holds for, the medians of each row. It measures nothing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moe_proxy import __version__
from moe_proxy.bench.arms import Arm
from moe_proxy.bench.run import Schedule, Took
from moe_proxy.bench.sample import Sample, medians
from moe_proxy.engine.source import read_pin
from moe_proxy.files import write_text
from moe_proxy.hardware import Hardware, cpu_name
from moe_proxy.served import Served

FORMAT = "moe-proxy-bench/1"


def conditions(
    served: Served, hardware: Hardware, server: Path, schedule: Schedule, command: str
) -> dict[str, Any]:
    """What the figures hold for: machine, model, program, command, date."""
    layout = served.layout
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "version": __version__,
        "engine": str(server),
        "llama_cpp": read_pin().commit,
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_name(),
            "cores": hardware.cores_physical,
            "threads": os.cpu_count(),
            "ram_bytes": hardware.ram_total_bytes,
            "gpus": [{"name": gpu.name, "vram_bytes": gpu.vram_total_bytes} for gpu in hardware.gpus],
        },
        "model": {
            "file": served.model.name,
            "name": layout.name,
            "architecture": layout.architecture,
            "quantization": served.header.quantization,
            "size_bytes": served.header.size_bytes,
            "expert_bytes": layout.total_expert_bytes,
            "experts": layout.experts,
            "experts_used": layout.experts_used,
            "fingerprint": layout.fingerprint,
        },
        "schedule": asdict(schedule),
        "context_length": served.context_length,
        "threads": served.settings.threads,
    }


@dataclass(frozen=True)
class Row:
    """All samples of one arm at one length of prompt."""

    arm: Arm
    prompt_tokens: int
    samples: tuple[Sample, ...]

    @property
    def median(self) -> dict[str, float | None]:
        """Medians of its quantities."""
        return medians(self.samples)


@dataclass
class Result:
    """What is known so far."""

    conditions: dict[str, Any]
    arms: Sequence[Arm]
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    loads_s: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    def take(self, took: Took) -> None:
        """One more thing is known."""
        if took.sample is not None and took.prompt_tokens is not None:
            self.samples.setdefault((took.arm, took.prompt_tokens), []).append(took.sample)
        if took.load_s is not None:
            self.loads_s.setdefault(took.arm, []).append(took.load_s)
        if took.error is not None:
            self.errors[took.arm] = took.error

    def rows(self) -> Iterator[Row]:
        """Those that have samples, by length of prompt, in the order of the arms."""
        for length in sorted({length for _, length in self.samples}):
            for arm in self.arms:
                if (arm.name, length) in self.samples:
                    yield Row(arm, length, tuple(self.samples[arm.name, length]))

    def ratio(self, row: Row, quantity: str = "decode_per_s") -> float | None:
        """``quantity`` of ``row`` as a multiple of that of the stock arm it is compared with."""
        rival = self.samples.get((row.arm.against or "", row.prompt_tokens))
        theirs = medians(rival)[quantity] if rival else None
        ours = row.median[quantity]
        return ours / theirs if ours is not None and theirs else None

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return {
            "format": FORMAT,
            "complete": self.complete,
            "conditions": self.conditions,
            "arms": [
                {
                    "name": arm.name,
                    "kind": arm.kind,
                    "budget": arm.budget,
                    "plan": arm.served.plan.reason,
                    "load_s": self.loads_s.get(arm.name, []),
                    "error": self.errors.get(arm.name),
                }
                for arm in self.arms
            ],
            "rows": [
                {
                    "arm": row.arm.name,
                    "prompt_tokens": row.prompt_tokens,
                    "median": row.median,
                    "decode_by_stock": self.ratio(row),
                    "samples": [sample.to_json() for sample in row.samples],
                }
                for row in self.rows()
            ],
        }

    def write(self, path: Path) -> None:
        """Write the file; readers see the old content or the new one. Raises OSError."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")
