"""Where the source comes from, and how patches are applied to it."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_proxy.engine import source
from moe_proxy.engine.build import engine_for
from moe_proxy.engine.source import llama_cpp_tree, unpack
from moe_proxy.engine.tree import apply_patch
from moe_proxy.errors import BuildError
from tests.support.build_world import FOLDER, PATCH, TREE, World, made_up_world, write


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A made-up world."""
    with made_up_world(tmp_path, monkeypatch) as made:
        yield made


def test_a_wrong_hash_is_refused_with_both_hashes(world: World) -> None:
    """An archive that is not the pinned one: one message with both hashes, and the file is gone."""
    world.index.archive += b"x"
    found = hashlib.sha256(world.index.archive).hexdigest()
    with pytest.raises(BuildError) as caught:
        world.build()
    assert found in str(caught.value)
    assert world.pin.sha256 in str(caught.value)
    assert [path.name for path in world.archive.parent.iterdir()] == [".lock"]


def test_a_corrupted_cached_archive_is_fetched_again(world: World) -> None:
    """What lies in the cache is verified before it is used; an intact one is not fetched again."""
    world.archive.parent.mkdir(parents=True)
    world.archive.write_bytes(b"half")
    world.build()
    assert len(world.index.served) == 2
    world.build(stock=True)
    assert len(world.index.served) == 2


def test_a_broken_download_leaves_nothing(world: World) -> None:
    """A connection that breaks half-way is said, leaves no half file, and the next try works."""
    world.index.length_lie = 10
    with pytest.raises(BuildError, match="the connection broke after"):
        world.build()
    assert not world.archive.exists()
    world.index.length_lie = 0
    world.build()


def test_an_html_index_is_understood(world: World) -> None:
    """Mirrors that know no JSON."""
    world.index.kind = "html"
    world.build()


def test_git_is_the_way_when_no_index_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same commit from git; when that fails as well both reasons are given, and what can be done."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(BuildError) as caught:
        world.build()
    for part in ("127.0.0.1:9", "refused", "git fetch", "PIP_INDEX_URL", "--source", world.pin.archive):
        assert part in str(caught.value)
    repository = write(world.root / "git", TREE)
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *arguments], cwd=repository, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True)
    world.pin = dataclasses.replace(world.pin, commit=head.stdout.decode().strip())
    world.stages.clear()
    world.build()
    assert world.stages[0] == "git"


def test_a_named_source_is_used_and_left_alone(world: World) -> None:
    """--source: the tree is copied, not touched; one that is not llama.cpp is refused."""
    mine = write(world.root / "mine", TREE)
    before = source.tree_hash(mine)
    world.build(source=mine)
    assert source.tree_hash(mine) == before
    assert world.index.served == []
    (mine / "tools" / "server" / "CMakeLists.txt").unlink()
    with pytest.raises(BuildError, match=r"is not a llama\.cpp source tree: it has no tools/server"):
        engine_for(world.request(source=mine))


@pytest.mark.parametrize("without_git", [False, True])
def test_patches_apply_inside_another_repository_and_without_fuzz(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_git: bool
) -> None:
    """Inside a foreign repository's ignored folder every hunk is applied; shifted context is refused."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    write(tmp_path, {".gitignore": "/cache/\n", "CMakeLists.txt": TREE["CMakeLists.txt"], "x.patch": PATCH})
    tree = write(tmp_path / "cache" / "tree", TREE)
    if without_git:
        real = shutil.which
        monkeypatch.setattr(
            shutil, "which", lambda name, **more: None if name == "git" else real(name, **more)
        )
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    apply_patch(tmp_path / "x.patch", tree)
    assert "add_subdirectory(native)" in (tree / "CMakeLists.txt").read_text()
    assert (tmp_path / "CMakeLists.txt").read_text() == TREE["CMakeLists.txt"]
    (tree / "CMakeLists.txt").write_text("one\ntwo\nthree\nFOUR\nfive\n")
    with pytest.raises(BuildError, match=r"patch x\.patch does not apply: "):
        apply_patch(tmp_path / "x.patch", tree)
    assert "native" not in (tree / "CMakeLists.txt").read_text()


def test_a_series_that_names_a_missing_patch_is_refused(world: World) -> None:
    """Said before anything is built."""
    (world.root / "data" / "patches" / "0001-x.patch").unlink()
    with pytest.raises(BuildError, match=r"names 0001-x\.patch, which is not there"):
        engine_for(world.request())


def test_unpacking_never_leaves_its_folder(tmp_path: Path) -> None:
    """Names with .. and links in an archive are passed over."""
    (tmp_path / "good").write_text("good")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "good", f"{FOLDER}/good")
        tar.add(tmp_path / "good", f"{FOLDER}/../../../evil")
        link = tarfile.TarInfo(f"{FOLDER}/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    unpack(tmp_path / "a.tar", FOLDER, tmp_path / "out" / "deep" / "er")
    assert [path.name for path in (tmp_path / "out").rglob("*") if not path.is_dir()] == ["good"]
    assert not list(tmp_path.rglob("evil"))
    (tmp_path / "a.tar").write_bytes(b"no archive")
    with pytest.raises(BuildError, match="cannot unpack"):
        unpack(tmp_path / "a.tar", FOLDER, tmp_path / "out2")


def test_the_pristine_tree_is_unpacked_once(world: World) -> None:
    """llama_cpp_tree gives the pinned source without patches, from the same cached archive."""
    tree = llama_cpp_tree(world.cache)
    assert (tree / "CMakeLists.txt").read_text() == TREE["CMakeLists.txt"]
    assert llama_cpp_tree(world.cache) == tree
    assert len(world.index.served) == 2
