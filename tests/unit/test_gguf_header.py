"""GGUF headers: facts, split models, and every way in which a file can be no model."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_proxy.errors import ModelFileError, MoeProxyError, NotGgufError, ShardMissingError, TruncatedError
from moe_proxy.model.gguf_header import read_header


def write_model(path: Path, extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    """A small MoE model file with one value of each kind that headers hold."""
    writer = gguf.GGUFWriter(path, "testmoe")
    writer.add_name("A test model")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_float32("testmoe.rope.freq_base", 1e6)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_chat_template("{{ messages }}")
    writer.add_token_list(["a", "b", "<|fim_prefix|>"])
    writer.add_array("testmoe.list", [1, 2, 3])
    extra(writer)
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.ones((4, 8, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model file, written once."""
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny-Q4_K_M.gguf")


def write_split(directory: Path, count: int = 3) -> list[Path]:
    """A model of one tensor per file; the facts stand in the first."""
    paths = []
    for number in range(count):
        path = directory / f"big-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, "testmoe")
        if number == 0:
            writer.add_context_length(512)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", count)
        writer.add_tensor(f"tensor.{number}", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_facts_of_a_model(model: Path) -> None:
    """A header gives the facts that the model file states."""
    header = read_header(model)
    assert (header.architecture, header.name, header.quantization) == ("testmoe", "A test model", "Q4_K_M")
    assert (header.context_length, header.embedding_length, header.block_count) == (512, 32, 1)
    assert (header.expert_count, header.expert_used_count) == (4, 2)
    assert (header.vocabulary_size, header.has_fim, header.chat_template) == (3, True, "{{ messages }}")
    assert header.parameter_count == 3 * 32 + 4 * 8 * 32
    assert header.size_bytes == model.stat().st_size
    assert header.modified_at_s == model.stat().st_mtime
    assert header.stem == "tiny-Q4_K_M"
    assert header.metadata["testmoe.rope.freq_base"] == 1e6
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert "testmoe.list" not in header.metadata


def test_tensors_are_where_the_library_finds_them(model: Path) -> None:
    """Shapes, types, sizes and offsets agree with the gguf library's own reader."""
    ours = {tensor.name: tensor for tensor in read_header(model).tensors}
    for theirs in gguf.GGUFReader(model).tensors:
        tensor = ours.pop(theirs.name)
        assert tensor.shape == tuple(int(n) for n in theirs.shape)
        assert tensor.type_name == theirs.tensor_type.name
        assert (tensor.size_bytes, tensor.offset_bytes) == (theirs.n_bytes, theirs.data_offset)
    assert not ours


def test_quantization_without_a_file_type(tmp_path: Path) -> None:
    """Where no file type is stated, the type of most bytes names the quantisation."""
    path = tmp_path / "plain.gguf"
    writer = gguf.GGUFWriter(path, "testmoe")
    writer.add_tensor("large", np.ones((4, 64), np.float16))
    writer.add_tensor("small", np.ones(16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_header(path).quantization == "F16"


@pytest.mark.parametrize("start", range(3))
def test_a_split_model_is_read_from_any_of_its_files(tmp_path: Path, start: int) -> None:
    """All files of a split model are read, in order, whichever is named."""
    paths = write_split(tmp_path)
    header = read_header(paths[start])
    assert header.files == tuple(paths)
    assert [tensor.name for tensor in header.tensors] == ["tensor.0", "tensor.1", "tensor.2"]
    assert [tensor.file for tensor in header.tensors] == paths
    assert header.size_bytes == sum(path.stat().st_size for path in paths)
    assert (header.context_length, header.stem) == (512, "big")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """One shard of several missing: the message names it."""
    paths = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ShardMissingError, match=r"big-00002-of-00003\.gguf"):
        read_header(paths[0])


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    """A shard whose name says nothing of the others: the message says what names they need."""
    other = write_split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ShardMissingError, match="one of 3 files"):
        read_header(other)


def test_shards_of_two_models_are_refused(tmp_path: Path) -> None:
    """Files that contradict each other are not merged."""
    paths = write_split(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(NotGgufError, match="says it is file 2 of 3"):
        read_header(paths[0])


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 something else", b"\x00" * 64])
def test_another_format_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    """A file that is no GGUF: one line that says what and what to do."""
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    with pytest.raises(NotGgufError, match="is not a GGUF file") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")])
def test_unknown_versions_are_refused(tmp_path: Path, version: int, words: str) -> None:
    """A version that this program does not know is named."""
    path = tmp_path / "file.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(NotGgufError, match=words):
        read_header(path)


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    """Missing files and directories are said to be that."""
    with pytest.raises(ModelFileError, match="does not exist"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match=r"is a directory"):
        read_header(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    """A file without the right to read it is said to be that."""
    path = write_model(tmp_path / "model.gguf")
    path.chmod(0)
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_header(path)


def test_damage_is_named(tmp_path: Path) -> None:
    """A value of the wrong kind is refused with its key."""
    path = write_model(tmp_path / "model.gguf", lambda writer: writer.add_string("testmoe.block", "x"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"testmoe.block\x08", b"testmoe.block\x63"))
    with pytest.raises(NotGgufError, match=r"unknown value type 99 for 'testmoe\.block'"):
        read_header(path)


def test_every_truncation_is_recognised(model: Path, tmp_path: Path) -> None:
    """A file cut at any byte of its header, or in its tensors, is truncated or no GGUF, nothing else."""
    data = model.read_bytes()
    header_bytes = min(tensor.offset_bytes for tensor in read_header(model).tensors)
    path = tmp_path / "cut.gguf"
    for length in (*range(header_bytes + 1), len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises((TruncatedError, NotGgufError)):
            read_header(path)
    path.write_bytes(data)
    read_header(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_raise_anything_else(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Random bytes in a header give facts or one of our errors."""
    content = bytearray(model.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 900))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        read_header(path)
    except MoeProxyError as error:
        assert isinstance(error, ModelFileError)
        assert error.hint


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe is refused at once: opening it would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="is no regular file"):
        read_header(tmp_path / "pipe")
