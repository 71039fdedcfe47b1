"""``moe-proxy config``: each value, where it came from, and where the file lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_proxy.config import Settings
from tests.support.command_line import run_main


@pytest.fixture(autouse=True)
def file(own_folders: None, tmp_path: Path) -> Path:
    """The configuration file of this test."""
    return tmp_path / "config.toml"


def test_show_says_where_each_value_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, file: Path
) -> None:
    """File, variable, flag and default are told apart, with the name of the flag, variable or file."""
    file.write_text('ram_budget = "8G"\nthreads = 3\n')
    monkeypatch.setenv("MOE_PROXY_THREADS", "5")
    assert run_main(monkeypatch, "config", "show", "--json", "--ctx-size", "4096") == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == set(Settings.model_fields)
    assert shown["ram_budget"] == {"value": "8G", "source": "file", "where": str(file), "also": []}
    assert shown["threads"] == {"value": 5, "source": "env", "where": "MOE_PROXY_THREADS", "also": ["file"]}
    assert shown["context_length"]["where"] == "--ctx-size"
    assert (shown["port"]["value"], shown["port"]["source"]) == (11435, "default")
    assert run_main(monkeypatch, "config", "show", "--given") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["threads", "5", "env", "MOE_PROXY_THREADS"] in lines
    assert ["ram_budget", "8G", "file", str(file)] in lines
    assert "port" not in [line[0] for line in lines]


def test_show_keeps_a_key_secret(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """That a key is set is shown; the key is not."""
    monkeypatch.setenv("MOE_PROXY_API_KEY", "open-sesame")
    assert run_main(monkeypatch, "config", "show", "--given") == 0
    shown = capsys.readouterr().out
    assert "MOE_PROXY_API_KEY" in shown
    assert "sesame" not in shown


def test_a_table_comes_from_both(monkeypatch: pytest.MonkeyPatch, capsys: Any, file: Path) -> None:
    """A table in a variable adds to the one in the file, and both are named."""
    file.write_text("[set_parameters]\ntop_k = 20\n")
    monkeypatch.setenv("MOE_PROXY_SET_PARAMETERS", '{"seed": 1}')
    assert run_main(monkeypatch, "config", "show", "--given") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("set_parameters"))
    assert json.loads(line[line.index("{") : line.index("}") + 1]) == {"seed": 1, "top_k": 20}
    assert line.endswith("env MOE_PROXY_SET_PARAMETERS and the file")


def test_a_misspelt_variable_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A variable that looks like a setting and is none changes nothing; show says what was meant."""
    monkeypatch.setenv("MOE_PROXY_PROT", "1")
    assert run_main(monkeypatch, "config", "show") == 0
    assert "MOE_PROXY_PROT is no setting: did you mean MOE_PROXY_PORT?" in capsys.readouterr().err


def test_a_wrong_file_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any, file: Path) -> None:
    """An unknown key ends with exit code 2 and one line that names file, key and the nearest setting."""
    file.write_text("vram_buget = 8\n")
    assert run_main(monkeypatch, "config", "show") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(file) in said and "did you mean 'vram_budget'?" in said


def test_path_and_schema(monkeypatch: pytest.MonkeyPatch, capsys: Any, file: Path) -> None:
    """The file's place is printed; its schema knows every setting and no other."""
    assert run_main(monkeypatch, "config", "path") == 0
    assert capsys.readouterr().out.strip() == str(file)
    assert run_main(monkeypatch, "config", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(Settings.model_fields)
    assert schema["additionalProperties"] is False
