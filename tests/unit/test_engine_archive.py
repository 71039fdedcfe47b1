"""Engines as files: what one machine exports another takes in, and nothing that it should not."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_proxy.engine import archive as archive_module
from moe_proxy.engine import recipe, toolchain
from moe_proxy.engine.archive import export_engine, import_engine
from moe_proxy.engine.build import engine_for
from moe_proxy.engine.cache import EngineBuild
from moe_proxy.engine.compatibility import refusal
from moe_proxy.engine.recipe import key_of
from moe_proxy.errors import BuildError, ConfigError
from moe_proxy.hardware import Gpu, Hardware
from tests.support.build_world import World, made_up_world

CPU = "x86_64 GenuineIntel 6 1 avx avx2 bmi2 f16c fma sse4_2"
Change = Callable[[dict[str, Any]], None]


def _quiet(stage: str, fraction: float) -> None:
    assert 0 <= fraction <= 1


def _machine(monkeypatch: pytest.MonkeyPatch, world: World, cpu: str, *capabilities: str) -> None:
    """From here on, the machine is this one."""
    cards = tuple(Gpu(index, "Card", 1, 1, one) for index, one in enumerate(capabilities))
    world.cpu = cpu
    monkeypatch.setattr(archive_module, "this_cpu", lambda: cpu)
    for module in (archive_module, recipe):
        monkeypatch.setattr(module, "probe", lambda: Hardware(1, 1, 1, None, cards))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A made-up world on a machine without a card."""
    with made_up_world(tmp_path, monkeypatch) as made:
        _machine(monkeypatch, made, CPU)
        monkeypatch.setattr(archive_module, "_glibc", lambda: "2.36")
        yield made


@pytest.fixture
def exported(world: World) -> tuple[EngineBuild, Path, str]:
    """An engine, its archive and that one's SHA-256."""
    engine = world.build(portable=True)
    path = world.root / "engine.tar.gz"
    return engine, path, export_engine(engine, path, _quiet)


def _elsewhere(world: World) -> Path:
    """The cache of another machine."""
    return world.root / "elsewhere"


def _leftovers(cache: Path) -> list[str]:
    """What lies in the engines' folder but locks."""
    return [path.name for path in (cache / "engine").iterdir() if not path.name.startswith(".lock-")]


def test_an_engine_travels(world: World, exported: tuple[EngineBuild, Path, str]) -> None:
    """build --export and --import: the same files under the same key, where start finds them."""
    engine, path, sha256 = exported
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    taken = import_engine(str(path), sha256, _elsewhere(world), _quiet)
    assert taken.key == engine.key
    assert _leftovers(_elsewhere(world)) == [engine.key]
    for file in engine.folder.rglob("*"):
        twin = taken.folder / file.relative_to(engine.folder)
        assert twin.is_symlink() == file.is_symlink()
        if file.is_file() and file.name != "build.json":
            assert twin.read_bytes() == file.read_bytes()
            assert twin.stat().st_mode & 0o777 in (0o644, 0o755)
    assert engine_for(world.request(cache_dir=_elsewhere(world))) == taken
    assert import_engine(str(path), sha256, _elsewhere(world), _quiet) == taken


def test_two_exports_are_the_same_bytes(world: World, exported: tuple[EngineBuild, Path, str]) -> None:
    """An archive can be checked by making it again."""
    engine, _, sha256 = exported
    assert export_engine(engine, world.root / "again.tar.gz", _quiet) == sha256


def test_from_an_address(world: World, exported: tuple[EngineBuild, Path, str]) -> None:
    """--import takes an address; one that has nothing is an error that names it."""
    engine, path, sha256 = exported
    world.index.archive = path.read_bytes()
    base = f"http://127.0.0.1:{_port()}/files"
    taken = import_engine(f"{base}/{world.pin.archive}", sha256, _elsewhere(world), _quiet)
    assert taken.key == engine.key
    with pytest.raises(BuildError, match=r"nothing-here.*Not Found"):
        import_engine(f"{base}/nothing-here", sha256, _elsewhere(world), _quiet)
    with pytest.raises(BuildError, match="not an http"):
        import_engine("ftp://127.0.0.1/x", sha256, _elsewhere(world), _quiet)


def _port() -> int:
    """The made-up index's port."""
    import os

    return int(os.environ["PIP_INDEX_URL"].split(":")[2].split("/")[0])


def test_the_hash_comes_first(world: World, exported: tuple[EngineBuild, Path, str]) -> None:
    """sha256 is verified before unpacking: one changed byte, and nothing of it is looked at."""
    _, path, sha256 = exported
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BuildError, match="has SHA-256"):
        import_engine(str(path), sha256, _elsewhere(world), _quiet)
    assert _leftovers(_elsewhere(world)) == []
    with pytest.raises(ConfigError, match="no SHA-256"):
        import_engine(str(path), "abc", _elsewhere(world), _quiet)


def _packed(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def _member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Any:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size, member.mode = kind, link, len(content), 0o4755
    return member, content


def _header(exported: tuple[EngineBuild, Path, str]) -> dict[str, Any]:
    with tarfile.open(exported[1]) as tar:
        first = tar.next()
        assert first is not None
        content = tar.extractfile(first)
        assert content is not None
        body: dict[str, Any] = json.load(content)
        return body


def _taken(world: World, content: bytes) -> EngineBuild:
    """Import ``content``, of which the hash is known: somebody was deceived."""
    path = world.root / "hostile.tar.gz"
    path.write_bytes(content)
    return import_engine(str(path), hashlib.sha256(content).hexdigest(), _elsewhere(world), _quiet)


SERVER = _member("bin/llama-server", b"#!/bin/sh\necho devices\n")


@pytest.mark.parametrize(
    "member",
    [
        _member("../outside", b"x"),
        _member("bin/../../outside", b"x"),
        _member("/tmp/outside", b"x"),
        _member("..", b"x"),
        _member("bin/..", b"x"),
        _member("./bin/x", b"x"),
        _member("bin//x", b"x"),
        _member("bin/deep/x", b"x"),
        _member("elsewhere/x", b"x"),
        _member("bin", b"x"),
        _member("bin/link", kind=tarfile.SYMTYPE, link="../../../../../outside"),
        _member("bin/link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        _member("bin/link", kind=tarfile.SYMTYPE, link=".."),
        _member("bin/link", kind=tarfile.SYMTYPE, link="nowhere"),
        _member("bin/link", kind=tarfile.SYMTYPE, link="link"),
        _member("link", kind=tarfile.SYMTYPE, link="bin"),
        _member("bin/hard", kind=tarfile.LNKTYPE, link="bin/llama-server"),
        _member("bin/hard", kind=tarfile.LNKTYPE, link="/etc/passwd"),
        _member("bin/device", kind=tarfile.CHRTYPE),
        _member("bin/pipe", kind=tarfile.FIFOTYPE),
        _member("bin", kind=tarfile.DIRTYPE),
        _member("bin/llama-server", b"twice"),
        _member("bin/large", b"x" * 100_000),
    ],
    ids=lambda member: f"{member[0].name} {member[0].linkname}".strip(),
)
def test_a_hostile_archive_leaves_nothing(
    world: World, exported: tuple[EngineBuild, Path, str], member: Any
) -> None:
    """No path outside, no link that leads away, no device, no file twice, no more than announced."""
    text = json.dumps(_header(exported)).encode()
    before = {path for path in world.root.rglob("*") if "elsewhere" not in path.parts}
    with pytest.raises(BuildError, match=r"hostile\.tar\.gz"):
        _taken(world, _packed([_member("engine.json", text), SERVER, member]))
    assert _leftovers(_elsewhere(world)) == []
    after = {path for path in world.root.rglob("*") if "elsewhere" not in path.parts}
    assert after - before == {world.root / "hostile.tar.gz"}


def test_nothing_is_written_through_a_link(world: World, exported: tuple[EngineBuild, Path, str]) -> None:
    """A link that is there before the file it names: the file is made, and the link leads to it."""
    text = json.dumps(_header(exported)).encode()
    link = _member("bin/libllama.so", kind=tarfile.SYMTYPE, link="libllama.so.1")
    engine = _taken(
        world, _packed([_member("engine.json", text), link, _member("bin/libllama.so.1", b"lib"), SERVER])
    )
    assert (engine.folder / "bin" / "libllama.so").read_bytes() == b"lib"
    assert (engine.folder / "bin" / "libllama.so.1").stat().st_mode & 0o7777 == 0o755


def _with(name: str, value: Any) -> Change:
    def change(header: dict[str, Any]) -> None:
        header["inputs"][name] = value
        header["key"] = key_of(header["inputs"])

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with("source", "archive sha256 0"), "another llama.cpp"),
        (_with("additions", "0" * 64), "other patches"),
        (_with("recipe", 0), "other steps"),
        (_with("flags", ["-DOTHER=ON"]), "other flags"),
        (_with("cpu", "aarch64 PORTABLE"), "aarch64"),
        (_with("cpu", f"{CPU} avx512f"), "avx512f"),
        (_with("cuda", "yes"), "unsound"),
        (lambda header: header.update(glibc="2.99"), "glibc 2.99"),
        (lambda header: header.update(key="0" * 20), "unsound"),
        (lambda header: header.update(format="moe-proxy-engine/9"), "moe-proxy-engine/9"),
        (lambda header: header.update(unpacked_bytes=1 << 50), "would take"),
        (lambda header: header.update(unpacked_bytes=float("inf")), "unsound"),
        (lambda header: header.pop("inputs"), "unsound"),
    ],
)
def test_what_is_not_for_here_is_refused(
    world: World, exported: tuple[EngineBuild, Path, str], change: Change, said: str
) -> None:
    """Engine key and platform are checked before anything is unpacked: sources, flags, CPU, glibc."""
    header = _header(exported)
    change(header)
    with pytest.raises(BuildError, match=said):
        _taken(world, _packed([_member("engine.json", json.dumps(header).encode()), SERVER]))
    assert _leftovers(_elsewhere(world)) == []


DAMAGED = gzip.compress(b"x" * 1000)[:10] + b"\xff" * 1000


@pytest.mark.parametrize(
    "content", [b"", b"no archive", gzip.compress(b"no tar"), DAMAGED, _packed([SERVER])], ids=range(5)
)
def test_what_is_no_archive(world: World, content: bytes) -> None:
    """A file that is none, or cut off, is an error that says what to take instead."""
    with pytest.raises(BuildError, match="--export"):
        _taken(world, content)


def test_an_archive_that_is_cut_off(world: World, exported: tuple[EngineBuild, Path, str]) -> None:
    """Half an archive leaves nothing behind."""
    content = exported[1].read_bytes()
    with pytest.raises(BuildError, match=r"hostile\.tar\.gz"):
        _taken(world, content[: len(content) // 2])
    assert _leftovers(_elsewhere(world)) == []


def test_an_engine_that_does_not_start_is_not_taken(
    world: World, exported: tuple[EngineBuild, Path, str]
) -> None:
    """It is run once before it counts: what it lacks is said."""
    broken = _member("bin/llama-server", b"#!/bin/sh\necho libgomp.so.1: cannot open >&2\nexit 127\n")
    text = json.dumps(_header(exported)).encode()
    with pytest.raises(BuildError, match=r"does not start here: libgomp\.so\.1"):
        _taken(world, _packed([_member("engine.json", text), broken]))
    assert _leftovers(_elsewhere(world)) == []


def test_one_build_for_many_cards(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """--cuda-arch all: every architecture of CUDA 13 from sm_75 on; a machine with any such card takes it."""
    monkeypatch.setattr(archive_module, "runtime_libraries", lambda folder: {})
    engine = world.build(cuda=True, cuda_architectures="all", portable=True)
    (flags,) = [call for call in world.calls("cmake") if "CUDA_ARCHITECTURES" in call]
    assert "=75-real;80-real;86-real;87-real;88-real;89-real;90-real;100-real;" in flags
    path = world.root / "cuda.tar.gz"
    sha256 = export_engine(engine, path, _quiet)
    for capability in ("7.5", "8.6", "8.9", "12.0", "13.0"):
        _machine(monkeypatch, world, f"{CPU} avx512f", capability)
        cache = world.root / f"with-{capability}"
        taken = import_engine(str(path), sha256, cache, _quiet)
        assert engine_for(world.request(cache_dir=cache, cuda=True)) == taken
        assert engine_for(world.request(cache_dir=cache)) is None
    _machine(monkeypatch, world, CPU, "7.0")
    with pytest.raises(BuildError, match=r"compute capability 7\.0"):
        import_engine(str(path), sha256, world.root / "old", _quiet)


def test_the_toolkits_libraries_travel_along(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine without a toolkit needs none: the CUDA runtime that the engine loads is in the archive."""
    engine = world.build(cuda=True, cuda_architectures="89", portable=True)
    library = tmp_path / "libcudart.so.13"
    library.write_text("cudart")
    lines = (
        f"\tlibcudart.so.13 => {library} (0x00007f)\n\tlibcuda.so.1 => not found\n\tlibc.so.6 => /c (0x1)\n"
    )
    monkeypatch.setattr(toolchain, "output_of", lambda argv, environment=None: lines)
    path = world.root / "cuda.tar.gz"
    sha256 = export_engine(engine, path, _quiet)
    taken = import_engine(str(path), sha256, _elsewhere(world), _quiet)
    assert (taken.folder / "bin" / "libcudart.so.13").read_text() == "cudart"
    monkeypatch.setattr(
        toolchain, "output_of", lambda argv, environment=None: "libcublas.so.13 => not found\n"
    )
    with pytest.raises(BuildError, match=r"libcublas\.so\.13, which is not found"):
        export_engine(engine, path, _quiet)


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("86-real", "8.6", True),
        ("86-real", "8.9", True),
        ("86-real", "8.0", False),
        ("86-real", "9.0", False),
        ("86-virtual", "9.0", True),
        ("86", "12.0", True),
        ("120a-real", "12.0", True),
        ("120a-real", "12.1", False),
        ("native", "8.6", False),
    ],
)
def test_which_cards_code_runs_on(architectures: str, capability: str, runs: bool) -> None:
    """CUDA's own rules: machine code within a major version, PTX on everything later, (a) on one alone."""
    inputs = {"cuda": True, "cpu": CPU, "flags": [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]}
    assert (refusal(inputs, inputs, CPU, [capability]) == "") is runs
