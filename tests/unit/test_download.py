"""Fetching a model from a hub: which files, going on after a break, hashes, room, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from moe_proxy.errors import ConfigError, DownloadError
from moe_proxy.loop_thread import LoopThread
from moe_proxy.model import download as fetching
from moe_proxy.model.download import RemoteFile, chosen, download, find
from moe_proxy.model.hub_name import HubName, parse_hub_name
from tests.fakes.fake_hub import FakeHub
from tests.support.command_line import run_main
from tests.support.moe_file import write_moe

REPO = "owner/Some-MoE-GGUF"
FILE = "Some-MoE-Q4_K_M.gguf"
CHUNK = 16 << 10
CONTENT = random.Random(8).randbytes(40 * CHUNK)
NAME = HubName(REPO, "Q4_K_M")

pytestmark = pytest.mark.usefixtures("own_folders")


async def _serve(hub: FakeHub) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(hub.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    """A loop for the hub: the library blocks."""
    thread = LoopThread("hub")
    yield thread
    thread.close()


@pytest.fixture
def hub(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one model, at the library's endpoint."""
    fake = FakeHub({REPO: {FILE: CONTENT, "README.md": b"read me"}})
    runner, url = loop.run(_serve(fake))
    from huggingface_hub import constants, file_download

    # Read from HF_ENDPOINT when the library is loaded; that it is, another test holds.
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    yield fake
    loop.run(runner.cleanup())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The models folder."""
    return tmp_path / "models"


class Report(list[tuple[str, int, int]]):
    """What was reported."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Remember it."""
        self.append((what, done, total))


def left(folder: Path) -> list[str]:
    """All files below the models folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_model_is_fetched(hub: FakeHub, folder: Path) -> None:
    """The file lies in a folder of its repository's name, alone, and progress ends at the whole."""
    report = Report()
    path = download(find(NAME), folder, report)
    assert path == folder / REPO / FILE
    assert path.read_bytes() == CONTENT
    assert left(folder) == [f"{REPO}/{FILE}"]
    assert report[-1] == (FILE, len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in report] == sorted(done for _, done, _ in report)
    assert not (folder / ".unfinished").exists()


def test_what_is_there_is_checked_and_not_fetched(hub: FakeHub, folder: Path) -> None:
    """A whole file is hashed, not fetched; one with other bytes is fetched again."""
    path = download(find(NAME), folder, Report())
    report = Report()
    assert download(find(NAME), folder, report) == path
    assert [what for what, _, _ in report] == [f"checking {FILE}"]
    assert len(hub.sent) == 1
    path.write_bytes(CONTENT[:-1] + b"?")
    download(find(NAME), folder, Report())
    assert path.read_bytes() == CONTENT


def test_a_connection_that_breaks_goes_on(hub: FakeHub, folder: Path) -> None:
    """Cut off in the middle of the file, the rest is asked for from where it ended; the hash still holds."""
    hub.cuts = [5 * CHUNK, 7 * CHUNK]
    path = download(find(NAME), folder, Report())
    assert path.read_bytes() == CONTENT
    starts = [start for _, start in hub.sent]
    assert starts == [0, 5 * CHUNK, 12 * CHUNK]


def test_another_call_goes_on(hub: FakeHub, folder: Path) -> None:
    """What came before a failure stays, out of sight, and the next call asks for the rest alone."""
    hub.cuts, model = [5 * CHUNK], find(NAME)
    hub.statuses = []

    def fail_from_now_on(what: str, done: int, total: int) -> None:
        if done == 5 * CHUNK:
            hub.statuses = [500]

    with pytest.raises(DownloadError, match=f"status 500; {5 * CHUNK} of {len(CONTENT)} bytes .* goes on"):
        download(model, folder, fail_from_now_on)
    assert not (folder / REPO).exists()
    assert len(left(folder)) == 1
    report = Report()
    assert download(model, folder, report).read_bytes() == CONTENT
    assert hub.sent[-1] == (FILE, 5 * CHUNK)
    assert report[0] == (f"checking {FILE}", 5 * CHUNK, len(CONTENT))
    assert left(folder) == [f"{REPO}/{FILE}"]


def test_a_hub_that_knows_no_ranges(hub: FakeHub, folder: Path) -> None:
    """Where the rest cannot be had alone, the file comes anew and is whole."""
    hub.cuts, hub.whole = [5 * CHUNK], True
    assert download(find(NAME), folder, Report()).read_bytes() == CONTENT
    assert [start for _, start in hub.sent] == [0, 0]


def test_a_wrong_hash_is_thrown_away(hub: FakeHub, folder: Path) -> None:
    """A file that is not what the hub states is never seen in the models folder, and nothing of it stays."""
    hub.misstated = {FILE}
    with pytest.raises(DownloadError, match=r"SHA-256 .* thrown away"):
        download(find(NAME), folder, Report())
    assert left(folder) == []


def test_without_a_hash_nothing_is_fetched(hub: FakeHub, folder: Path) -> None:
    """What cannot be checked is not taken."""
    hub.unstated = {FILE}
    with pytest.raises(DownloadError, match="states no SHA-256"):
        download(find(NAME), folder, Report())
    assert hub.sent == []


def test_a_split_model_comes_whole(hub: FakeHub, folder: Path) -> None:
    """All files of a set are fetched, and appear only when the last is there."""
    names = [f"BF16/big-BF16-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    hub.repos[REPO] |= {name: CONTENT[: (i + 1) * CHUNK] for i, name in enumerate(names)}
    model = find(HubName(REPO, "bf16"))
    assert [file.name for file in model.files] == names
    hub.statuses = []

    def fail_at_the_last(what: str, done: int, total: int) -> None:
        if total == 2 * CHUNK == done:
            hub.statuses = [500]

    with pytest.raises(DownloadError):
        download(model, folder, fail_at_the_last)
    assert not (folder / REPO).exists()
    assert download(model, folder, Report()) == folder / REPO / names[0]
    assert left(folder) == [f"{REPO}/{name}" for name in names]
    assert [name for name, _ in hub.sent].count(names[0]) == 1


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        (HubName("owner/none"), None, r"no model owner/none at http://127.*HF_TOKEN"),
        (NAME, "v9", "no such revision"),
        (HubName(REPO, "Q2_K"), None, "has no Q2_K: it has Q4_K_M"),
        (HubName("a--b/c"), None, "no name of a model"),
    ],
)
def test_what_the_hub_does_not_have(hub: FakeHub, name: HubName, revision: str | None, said: str) -> None:
    """Repository, revision, quantisation: each is named, with what to do."""
    with pytest.raises(DownloadError, match=said):
        find(name, revision=revision)


def test_a_gated_model(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token it is said where to accept and what to set; with one it comes."""
    hub.gated = {REPO}
    with pytest.raises(
        DownloadError, match=rf"conditions: accept them at http://127.*/{REPO}, and set HF_TOKEN"
    ):
        download(find(NAME), folder, Report())
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download(find(NAME), folder, Report()).read_bytes() == CONTENT
    assert hub.tokens[-1] == "Bearer hf_secret"


def test_a_hub_that_is_not_there(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is one error that names the hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:9 does not answer.*HF_ENDPOINT"):
        find(NAME)


def test_no_room(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is asked before anything is fetched; what is there already needs no room."""
    model = find(NAME)
    free = {"bytes": 300 * 2**20}
    monkeypatch.setattr(
        fetching.shutil, "disk_usage", lambda path: SimpleNamespace(free=free["bytes"]) if path else None
    )
    download(model, folder, Report())
    free["bytes"] = 0
    download(model, folder, Report())
    (folder / REPO / FILE).unlink()
    with pytest.raises(DownloadError, match=r"the disk of .* has 0 MiB free: make room"):
        download(model, folder, Report())
    assert len(hub.sent) == 1


def test_one_download_at_a_time(hub: FakeHub, folder: Path) -> None:
    """Two that write one file are kept apart."""
    model = find(NAME)
    part = folder / ".unfinished" / REPO / f"{FILE}.{model.files[0].sha256[:12]}"
    part.parent.mkdir(parents=True)
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DownloadError, match="being downloaded already"):
            download(model, folder, Report())


def test_a_name_that_leaves_the_folder(hub: FakeHub, folder: Path) -> None:
    """A hub cannot have anything written elsewhere."""
    evil = RemoteFile("../../evil-Q4_K_M.gguf", 3, "ab" * 32)
    with pytest.raises(DownloadError, match="outside its folder"):
        download(fetching.RemoteModel(REPO, "main", (evil,)), folder, Report())
    assert hub.sent == []


def test_a_folder_that_cannot_be_made(hub: FakeHub) -> None:
    """The message names the folder and the setting."""
    with pytest.raises(ConfigError, match="MOE_PROXY_MODELS_DIR"):
        download(find(NAME), Path("/proc/nowhere"), Report())


def files(*names: str) -> list[RemoteFile]:
    """Files of a repository."""
    return [RemoteFile(name, 1, "ab" * 32) for name in names]


@pytest.mark.parametrize(
    ("name", "file_name", "there", "taken"),
    [
        ("o/r", None, ("m-Q8_0.gguf",), ["m-Q8_0.gguf"]),
        ("o/r", None, ("m-Q8_0.gguf", "m-Q4_K_M.gguf"), ["m-Q4_K_M.gguf"]),
        ("o/r:q8_0", None, ("m-Q8_0.gguf", "m-Q4_K_M.gguf"), ["m-Q8_0.gguf"]),
        ("o/r:UD-Q4_K_XL", None, ("UD/m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf"), ["UD/m-UD-Q4_K_XL.gguf"]),
        ("o/r", None, ("mmproj-F16.gguf", "m.gguf", "x.bin"), ["m.gguf"]),
        ("o/r", "b.gguf", ("a.gguf", "b.gguf"), ["b.gguf"]),
        ("o/r:MXFP4", None, ("gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b-F16.gguf"), ["gpt-oss-20b-mxfp4.gguf"]),
    ],
)
def test_which_file(name: str, file_name: str | None, there: tuple[str, ...], taken: list[str]) -> None:
    """The quantisation that was named, else the only model, else Q4_K_M; projectors are no models."""
    parsed = parse_hub_name(name)
    assert parsed is not None
    assert [file.name for file in chosen(parsed, files(*there), file_name)] == taken


@pytest.mark.parametrize(
    ("name", "file_name", "there", "said"),
    [
        ("o/r", None, ("x.bin",), "holds no GGUF"),
        ("o/r", None, ("m-Q8_0.gguf", "m-Q2_K.gguf"), "add one of :Q2_K, :Q8_0"),
        ("o/r:Q4_0", None, ("m-Q8_0.gguf",), "has no Q4_0: it has Q8_0"),
        ("o/r:Q8_0", None, ("m-Q8_0.gguf", "n-Q8_0.gguf"), "2 models: say which with --file"),
        ("o/r", "z.gguf", ("m-Q8_0.gguf",), "has no file z.gguf"),
        ("o/r:Q8_0", None, ("m-Q8_0-00001-of-00003.gguf",), "lacks 2 of the files"),
    ],
)
def test_no_choice(name: str, file_name: str | None, there: tuple[str, ...], said: str) -> None:
    """What is not there, or not told apart, is said with what there is."""
    parsed = parse_hub_name(name)
    assert parsed is not None
    with pytest.raises(DownloadError, match=said):
        chosen(parsed, files(*there), file_name)


def test_the_command(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It says what comes, how far it is, where it lies, and what serves it; a dry run fetches nothing."""
    hub.repos[REPO][FILE] = write_moe(tmp_path / "m.gguf").read_bytes()
    monkeypatch.setenv("MOE_PROXY_MODELS_DIR", str(folder))
    assert run_main(monkeypatch, "model", "download", REPO, "--dry-run") == 0
    assert FILE in capsys.readouterr().err and hub.sent == []
    assert run_main(monkeypatch, "model", "download", REPO) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(folder / REPO / FILE)
    assert f"{FILE} 100 %" in shown.err
    assert f"moe-proxy start --model {REPO}:Q4_K_M" in shown.err
    assert run_main(monkeypatch, "model", "download", f"{REPO}:Q4_K_M", "--json") == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(folder / REPO / FILE)
    assert run_main(monkeypatch, "model", "list", "--json") == 0
    assert [model["path"] for model in json.loads(capsys.readouterr().out)["models"]] == [
        str(folder / REPO / FILE)
    ]


def test_a_dense_model_is_said(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What was fetched and cannot be served is said so, with exit code 1."""
    assert run_main(monkeypatch, "model", "download", REPO, "--to", str(folder)) == 1
    assert "cannot be served" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.gguf", "name", "a/b/c", "a/b:c:d", ""])
def test_what_is_no_name(monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str) -> None:
    """A file, a bare name, a longer path: refused with the form that is wanted, before any network."""
    assert run_main(monkeypatch, "model", "download", name) == 2
    assert "OWNER/NAME:Q4_K_M" in capsys.readouterr().err


def test_hf_endpoint_names_the_hub(loop: LoopThread, folder: Path) -> None:
    """A mirror is named by HF_ENDPOINT, as for every program that uses the library."""
    fake = FakeHub({REPO: {FILE: CONTENT}})
    runner, url = loop.run(_serve(fake))
    env = os.environ | {"HF_ENDPOINT": url, "NO_PROXY": "127.0.0.1", "MOE_PROXY_MODELS_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "moe_proxy", "model", "download", REPO],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    loop.run(runner.cleanup())
    assert (folder / REPO / FILE).read_bytes() == CONTENT, done.stderr


def test_serving_does_not_load_the_library() -> None:
    """The memory of a serving process does not grow by what only a download needs."""
    code = "import sys, moe_proxy.cli, moe_proxy.app; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
