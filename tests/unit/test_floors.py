"""The floors that import-linter holds: complete, so that no module escapes the rule."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

ROOT = Path(__file__).parents[2]


def _named() -> list[str]:
    """Every name in the contract."""
    settings = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    return [name.strip() for floor in contract["layers"] for name in floor.split("|")]


def _modules() -> list[str]:
    """Every module of the package, without the package's name; the files of packages themselves left out."""
    package = ROOT / "moe_proxy"
    files = (path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py")
    return [".".join(file.with_suffix("").parts) for file in files]


def _holds(name: str, module: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def test_every_module_stands_on_one_floor() -> None:
    """An import may only go to a lower floor: every module is named once, itself or by its package."""
    floors = {module: [name for name in _named() if _holds(name, module)] for module in _modules()}
    assert {module: names for module, names in floors.items() if len(names) != 1} == {}


def test_no_floor_is_empty() -> None:
    """A name in the contract that no module has any more would hold nothing."""
    assert [name for name in _named() if not any(_holds(name, module) for module in _modules())] == []
