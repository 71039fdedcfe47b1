"""An installed wheel does all that a checkout does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.engine.source import fetch_archive
from moe_proxy.model.demo_source import WHEEL, quiet

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a wheel that is installed in a clean virtual environment, away from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(python), *pip[1:], "install", str(wheel)], check=True)
    return folder / "venv" / "bin" / "moe-proxy"


@pytest.fixture
def wheel_env(
    proxy_env: dict[str, str], cache_dir: Path, engine: EngineBuild, tmp_path: Path
) -> dict[str, str]:
    """A cache with what is built or fetched and nothing else: all other data has to come from the wheel."""
    cache = tmp_path / "cache"
    (cache / "source").mkdir(parents=True)
    (cache / "engine").symlink_to(cache_dir / "engine")
    dense = fetch_archive(WHEEL, cache_dir / "source", quiet)
    (cache / "source" / dense.name).symlink_to(dense)
    return proxy_env | {"MOE_PROXY_CACHE_DIR": str(cache)}


def _run(command: Path, env: dict[str, str], *args: str) -> str:
    done = subprocess.run(
        [str(command), *args], env=env, cwd=command.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_builds_the_same_engine(
    installed: Path, wheel_env: dict[str, str], engine: EngineBuild
) -> None:
    """Patches, native and the pin travel in the wheel: it asks for the very engine the checkout builds."""
    assert json.loads(_run(installed, wheel_env, "build", "--json"))["key"] == engine.key


def test_the_dashboard_travels_in_the_wheel(installed: Path) -> None:
    """Its static files are package data."""
    code = (
        "from moe_proxy.proxy.dashboard import _FILES, _content; print(sum(map(bool, map(_content, _FILES))))"
    )
    assert _run(installed.with_name("python"), dict(os.environ), "-c", code) == "4\n"


def test_the_wheel_runs_the_demo(installed: Path, wheel_env: dict[str, str]) -> None:
    """Model, map, rules and engine work from the wheel alone, and nothing is left running.

    `make demo` answers its prompts in readable text, and its table shows different experts hot for different
    domains.
    """
    printed = _run(installed, wheel_env, "demo")
    for words in ("def sort", "hypotenuse", "安装", "lighthouse on the", "Rayleigh scattering"):
        assert words in printed
    hot = {
        row[1]: frozenset(row[8:12])
        for row in map(str.split, printed.splitlines())
        if len(row) == 13 and row[5] == row[7] == "%"
    }
    assert set(hot) == {"codegen", "math", "chinese_tech", "creative_write", "general_qa"}
    assert len(set(hot.values())) == len(hot)
    # Text in another script shares the least with the rest.
    for domain in set(hot) - {"chinese_tech"}:
        assert len(hot[domain] & hot["chinese_tech"]) <= 2
    runtime = Path(wheel_env["MOE_PROXY_RUNTIME_DIR"])
    assert [path.name for path in runtime.rglob("*") if not path.is_dir()] == []
