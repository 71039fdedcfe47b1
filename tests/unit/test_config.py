"""Settings: strength of their sources, and that each is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_proxy.config import Settings, load_settings, origins_of
from moe_proxy.errors import ConfigError
from moe_proxy.live import LIVE

DOCUMENT = Path(__file__).parents[2] / "docs" / "config.md"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty configuration file, and no variable of this machine."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MOE_PROXY_{name.upper()}", raising=False)
    path = tmp_path / "config.toml"
    path.write_text("")
    monkeypatch.setenv("MOE_PROXY_CONFIG", str(path))
    return path


def test_a_flag_beats_a_variable_beats_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag, environment, file, default: in this order of strength."""
    assert load_settings({}).port == 11435
    file.write_text("port = 1\n")
    assert load_settings({}).port == 1
    monkeypatch.setenv("MOE_PROXY_PORT", "2")
    assert load_settings({}).port == 2
    assert load_settings({"port": 3}).port == 3
    assert load_settings({"port": None}).port == 2


def test_a_named_file_must_be_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was named and is not there, or is a folder, is said: its settings would be missed."""
    for wrong in (file.parent, file.with_name("confg.toml")):
        monkeypatch.setenv("MOE_PROXY_CONFIG", str(wrong))
        with pytest.raises(ConfigError, match=f"{wrong}, which is no file"):
            load_settings({})
    for none in ("/dev/null", ""):
        monkeypatch.setenv("MOE_PROXY_CONFIG", none)
        load_settings({})


@pytest.mark.parametrize(
    ("text", "named"),
    [("port = 'many'", "port"), ("prot = 1", "'prot'"), ("port = ", "config.toml"), ("gpu = 3", "gpu")],
)
def test_a_wrong_file_is_named(file: Path, text: str, named: str) -> None:
    """A message says what is wrong, with what value, and where."""
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_settings({})


@pytest.mark.parametrize(
    ("key", "meant"), [("prot", "port"), ("vram-budget", "vram_budget"), ("Treads", "threads")]
)
def test_an_unknown_key_names_the_nearest(file: Path, key: str, meant: str) -> None:
    """A key of the file that is no setting is an error that names the file and the setting most like it."""
    file.write_text(f"{key} = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_settings({})
    assert f"{key!r} in {file}" in str(caught.value)
    assert f"did you mean {meant!r}?" in str(caught.value)
    file.write_text("xyzzy = 1\n")
    with pytest.raises(ConfigError, match=r"'xyzzy'.*remove it"):
        load_settings({})


def test_the_source_of_each_setting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting's source is known, and is the one whose value counts."""
    file.write_text("port = 1\nslots = 2\nThreads = 3\n")
    monkeypatch.setenv("MOE_PROXY_PORT", "4")
    monkeypatch.setenv("moe_proxy_slots", "5")
    monkeypatch.setenv("MOE_PROXY_PROT", "6")
    origins = origins_of({"port": 7, "alias": None})
    assert load_settings({"port": 7}).port == 7
    assert origins.all["port"] == ("flag", "env", "file", "default")
    assert [origins.of(name) for name in ("slots", "threads", "alias")] == ["env", "file", "default"]
    assert origins.strangers == ("MOE_PROXY_PROT",)


def test_home_in_a_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` in the file or in a variable means the user's folder; nobody else would read it so."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("MOE_PROXY_STATE_DIR", "~/state")
    file.write_text('model = "~/m.gguf"\n')
    settings = load_settings({"router_map": Path("map.json")})
    assert settings.model == Path("/home/me/m.gguf")
    assert settings.state_dir == Path("/home/me/state")
    assert settings.router_map == Path("map.json")
    file.write_text('model = "~nobody-of-this-name/m.gguf"\n')
    with pytest.raises(ConfigError, match="model"):
        load_settings({})


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_is_documented(name: str) -> None:
    """docs/config.md names every setting and its variable."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"| `{name}` | `MOE_PROXY_{name.upper()}` |" in text


def test_the_document_names_no_other_setting() -> None:
    """docs/config.md promises nothing that is not there."""
    rows = [
        line.split("`")[1] for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"
    ]
    assert sorted(rows) == sorted(Settings.model_fields)


def test_the_document_says_what_changes_live() -> None:
    """docs/config.md names exactly the settings that a reload changes."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("after it: ")[2].partition(". Others")[0]
    assert set(re.findall("`([a-z_]+)`", text)) == LIVE
