"""Owns the labelled prompts an operator brings, and the file of a map that is not finished.

It runs no prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_proxy.errors import ConfigError, RouterMapError
from moe_proxy.files import write_text
from moe_proxy.routing.router_map import ModelKey, RouterMap, dump, load

SEPARATOR = "\n----\n"
"""Between two prompts of a text file."""
_FORMS = (
    'give a folder of DOMAIN.txt files, prompts apart by a line "----",'
    ' or a file of lines {"prompt": …, "domain": …}'
)


def split(text: str) -> tuple[str, ...]:
    """The prompts of a text file."""
    prompts = (prompt.strip() for prompt in f"\n{text}\n".split(SEPARATOR))
    return tuple(prompt for prompt in prompts if prompt)


def read_prompts(path: Path) -> Mapping[str, tuple[str, ...]]:
    """Prompts by domain from a folder of ``DOMAIN.txt`` or a file of JSON lines.

    Raises ConfigError naming file, line and reason.
    """
    try:
        if path.is_dir():
            found = {file.stem: split(_text(file)) for file in sorted(path.glob("*.txt"))}
        else:
            found = _lines(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", _FORMS) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})", "check its rights") from error
    found = {domain: prompts for domain, prompts in found.items() if prompts}
    if not found:
        raise ConfigError(f"{path} holds no labelled prompts", _FORMS)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", _FORMS) from None


def _lines(path: Path) -> dict[str, tuple[str, ...]]:
    prompts: defaultdict[str, list[str]] = defaultdict(list)
    # Not splitlines: a prompt may hold U+2028, which JSON leaves as it is.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{path}: line {number}: not JSON", _FORMS) from None
        for name in ("prompt", "domain"):
            value = record.get(name) if isinstance(record, dict) else None
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"{path}: line {number}: {name} is missing or no text", _FORMS)
        prompts[record["domain"]].append(record["prompt"])
    return {domain: tuple(texts) for domain, texts in prompts.items()}


@dataclass(frozen=True)
class Unfinished:
    """The map so far of a collection, in ``path``, from where it goes on when it was interrupted.

    ``work`` tells one collection from another: see ``work_of``.
    """

    path: Path
    work: str

    def begun(self, key: ModelKey) -> tuple[RouterMap, int] | None:
        """The map so far and how many prompts are in it; None when there is none of this very work."""
        try:
            found = load(self.path)
        except RouterMapError:
            return None
        done = found.made.get("prompts_done")
        if found.model != key or found.made.get("work") != self.work or type(done) is not int or done < 0:
            return None
        return found, done

    def save(self, so_far: RouterMap, done: int) -> None:
        """Keep the map of the first ``done`` prompts. Raises OSError."""
        made = {**so_far.made, "work": self.work, "prompts_done": done}
        write_text(self.path, dump(RouterMap(so_far.model, made, so_far.domains)))

    def remove(self) -> None:
        """The map is finished."""
        self.path.unlink(missing_ok=True)


def work_of(prompts: Mapping[str, tuple[str, ...]], tokens: int) -> str:
    """Names a collection: equal prompts in equal order and equally long answers have equal names."""
    content = json.dumps([list(prompts.items()), tokens])
    return hashlib.sha256(content.encode()).hexdigest()
