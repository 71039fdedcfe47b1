"""Models on disk: which there are, how they fit, which one ``auto`` means, what ``inspect`` says of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from moe_proxy.cli.models import TESTED
from moe_proxy.config import Settings
from moe_proxy.errors import ConfigError, ModelFileError
from moe_proxy.fit import Fit, best, fit_of
from moe_proxy.hardware import Gpu, Hardware
from moe_proxy.model.folder import MoeModel, Unusable, gguf_files, look_at, of_hub_name
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.hub_name import HubName, parse_hub_name, quant_of
from moe_proxy.model.tensor_class import class_of
from moe_proxy.served import examine, model_file
from tests.support.command_line import run_main
from tests.support.moe_file import write_moe

GIB = 2**30
MACHINE = Hardware(16 * GIB, 12 * GIB, 4, None, ())
CARD = Gpu(0, "NVIDIA Card", 12 * GIB, 11 * GIB, "8.6")

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder: two models of one repository, and what is none."""
    models = tmp_path / "models"
    (models / "owner" / "moe").mkdir(parents=True)
    monkeypatch.setenv("MOE_PROXY_MODELS_DIR", str(models))
    write_moe(models / "owner" / "moe" / "moe-Q4_K_M.gguf")
    write_moe(models / "owner" / "moe" / "moe-F32.gguf", dtype=np.float32)
    (models / ".unfinished").mkdir()
    (models / ".unfinished" / "part.gguf").write_bytes(b"GGUF")
    (models / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (models / "broken.gguf").write_bytes(b"GGUF")
    return models


def split(folder: Path, parts: int) -> list[Path]:
    """A model with a layer in each of its ``parts`` files."""
    paths = []
    for number in range(parts):
        path = folder / f"big-Q8_0-{number + 1:05}-of-{parts:05}.gguf"
        writer = gguf.GGUFWriter(path, "testmoe")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        if number == 0:
            writer.add_name("big")
            writer.add_expert_count(4)
            writer.add_expert_used_count(2)
        for kind in ("gate", "up", "down"):
            writer.add_tensor(f"blk.{number}.ffn_{kind}_exps.weight", np.ones((4, 8, 32), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_which_models_there_are(folder: Path) -> None:
    """Each GGUF once, in all folders below; not what is hidden, and no projector."""
    parts = split(folder, 3)
    assert gguf_files([folder, folder / "none"]) == [
        parts[0],
        folder / "broken.gguf",
        folder / "owner" / "moe" / "moe-F32.gguf",
        folder / "owner" / "moe" / "moe-Q4_K_M.gguf",
    ]
    with pytest.raises(ConfigError, match="is no folder"):
        gguf_files([folder / "broken.gguf"])


def test_what_cannot_be_served_says_why(folder: Path) -> None:
    """A damaged file, a model without experts and an incomplete set are listed with the reason."""
    broken = look_at(folder / "broken.gguf")
    assert isinstance(broken, Unusable) and "broken.gguf" in broken.reason
    first, second, _ = split(folder, 3)
    second.unlink()
    lacking = look_at(first)
    assert isinstance(lacking, Unusable) and second.name in lacking.reason
    whole = look_at(folder / "owner" / "moe" / "moe-F32.gguf")
    assert isinstance(whole, MoeModel) and whole.layout.experts == 4


def model(folder: Path, name: str, expert_gib: float, dense_gib: float = 1) -> MoeModel:
    """A model of such sizes; the more experts, the more parameters."""
    found = look_at(write_moe(folder / f"{name}.gguf"))
    assert isinstance(found, MoeModel)
    expert_bytes = dict.fromkeys(found.layout.layers, int(expert_gib * GIB / 8))
    dense = int(dense_gib * GIB)
    return replace(
        found,
        header=replace(found.header, parameter_count=int(expert_gib * GIB)),
        layout=replace(found.layout, expert_bytes=expert_bytes, dense_bytes=dense),
        footprint=replace(found.footprint, dense_bytes=dense, staged_bytes=2**20),
    )


@pytest.mark.parametrize(
    ("expert_gib", "dense_gib", "on_cpu", "on_gpu"),
    [
        (4, 1, "RAM", "VRAM"),
        (9.5, 1, "disk", "VRAM and RAM"),
        (40, 1, "disk", "disk"),
        (8, 13, "nowhere", "nowhere"),
    ],
)
def test_how_a_model_fits(
    folder: Path, expert_gib: float, dense_gib: float, on_cpu: str, on_gpu: str
) -> None:
    """In VRAM, with hot experts there, in RAM, from disk, or not at all: by the planner's own answer."""
    found = model(folder, "m", expert_gib, dense_gib)
    assert fit_of(found, MACHINE, gpu=False, tokens=4096).place == on_cpu
    assert fit_of(found, replace(MACHINE, gpus=(CARD,)), gpu=True, tokens=4096).place == on_gpu


def test_the_best_model(folder: Path) -> None:
    """The largest whose experts all fit, of equals the most bytes; else the smallest from disk; else none."""
    small, large, huge = (model(folder, f"m{size}", size) for size in (2, 8, 40))
    better = replace(large, header=replace(large.header, size_bytes=large.header.size_bytes + 1))

    def fits(*models: MoeModel) -> list[Fit]:
        return [fit_of(found, MACHINE, gpu=False, tokens=4096) for found in models]

    chosen, why = best(fits(small, better, large, huge))
    assert chosen.model == better
    assert why == "the largest of 4 that fits (all of it in RAM)"
    chosen, why = best(fits(huge, model(folder, "m60", 60)))
    assert chosen.model == huge and "none of 2 fits wholly" in why
    with pytest.raises(ConfigError, match="none of the 1 models fits"):
        best(fits(model(folder, "dense", 1, dense_gib=20)))


def test_auto(folder: Path) -> None:
    """`--model auto` takes one of the downloaded models, and the note says which and why."""
    settings = Settings(model=Path("auto"), models_dir=folder)
    served = examine(settings, hardware=MACHINE)
    assert served.model == folder / "owner" / "moe" / "moe-F32.gguf"
    assert served.notes[0] == (
        f"Chosen by --model auto: {served.model}, the largest of 2 that fits (all of it in RAM)."
    )
    with pytest.raises(ConfigError, match=r"no MoE model in .*none"):
        examine(Settings(model=Path("auto"), models_dir=folder / "none"), hardware=MACHINE)


def test_a_downloaded_model_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REPO:QUANT is the file in the models folder; without it, the command that fetches it is said."""
    there = folder / "owner" / "moe"

    def found(text: str) -> Path:
        return model_file(Settings(model=Path(text), models_dir=folder))

    assert found("owner/moe:q4_k_m") == there / "moe-Q4_K_M.gguf"
    with pytest.raises(ModelFileError, match="say which: owner/moe:F32, owner/moe:Q4_K_M"):
        found("owner/moe")
    with pytest.raises(ModelFileError, match=r"downloaded unasked: .* moe-proxy model download a/b:Q8_0"):
        found("a/b:Q8_0")
    (there / "moe-F32.gguf").unlink()
    assert of_hub_name(folder, HubName("owner/moe")) == there / "moe-Q4_K_M.gguf"
    monkeypatch.chdir(folder)
    assert found("owner/moe") == Path("owner/moe")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", HubName("Qwen/Qwen3-30B-A3B-GGUF", "Q4_K_M")),
        ("a/b", HubName("a/b")),
        ("a/b.gguf", None),
        ("b", None),
        ("/a/b", None),
        ("../b", None),
        ("a/b/c", None),
        ("~/b", None),
    ],
)
def test_names_on_a_hub(text: str, name: HubName | None) -> None:
    """OWNER/NAME with a quantisation or without; a path is no such name."""
    assert parse_hub_name(text) == name


@pytest.mark.parametrize(
    ("file_name", "quant"),
    [
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"),
        ("UD-Q4_K_XL/x-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m.IQ3_XXS.gguf", "IQ3_XXS"),
        ("BF16/m-00001-of-00002.gguf", "BF16"),
        ("Qwen3-Coder.gguf", None),
    ],
)
def test_quantisation_in_a_name(file_name: str, quant: str | None) -> None:
    """As those who publish GGUFs write it, in the file's name or its folder's."""
    assert quant_of(file_name) == quant


def test_list(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Every model with its sizes and how it fits; what cannot be served with its reason."""
    assert run_main(monkeypatch, "model", "list", "--cpu", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folders"][0] == str(folder)
    by_name = {Path(entry["path"]).name: entry for entry in told["models"]}
    assert set(by_name) == {"moe-F32.gguf", "moe-Q4_K_M.gguf"}
    entry = by_name["moe-F32.gguf"]
    header = read_header(folder / "owner" / "moe" / "moe-F32.gguf")
    assert entry["parameters"] == header.parameter_count
    assert (entry["experts"], entry["experts_used"], entry["moe_layers"]) == (4, 2, 2)
    assert entry["all_expert_bytes"] == 2 * 4 * 3 * 8 * 32 * 4
    assert entry["tested"] is False and entry["fits"] == "RAM"
    assert [Path(entry["path"]).name for entry in told["unusable"]] == ["broken.gguf"]
    assert run_main(monkeypatch, "model", "list", "--cpu") == 0
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if "moe-F32.gguf" in line)
    assert row[:2] == ["owner/moe/moe-F32.gguf", "testmoe"]
    assert row[6:9] == ["4", "2", "RAM"]
    assert "own tests: testmoe." in shown and "Cannot be served" in shown
    assert "\x1b" not in shown


def test_list_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An empty folder is no failure; one that is not there is."""
    monkeypatch.setenv("MOE_PROXY_MODELS_DIR", str(tmp_path / "none"))
    assert run_main(monkeypatch, "model", "list") == 0
    assert "model download" in capsys.readouterr().out
    assert run_main(monkeypatch, "model", "list", str(tmp_path / "nowhere")) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_tested_is_what_the_tests_serve(planted_model: Path) -> None:
    """The architectures of the two models that ship, which the integration tests serve."""
    assert read_header(planted_model).architecture in TESTED
    assert {"qwen3moe", "deepseek"} == TESTED


def test_inspect(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Layers, experts, dense and active bytes, types by class of tensor, and the files of a split model."""
    file = folder / "owner" / "moe" / "moe-F32.gguf"
    assert run_main(monkeypatch, "model", "inspect", "--json", str(file)) == 0
    facts = json.loads(capsys.readouterr().out)
    classes = facts["tensor_classes"]
    assert classes["experts"] == {"size_bytes": 2 * 4 * 3 * 8 * 32 * 4, "types": {"F32": 6}}
    assert classes["router"]["types"] == {"F32": 2}
    size_bytes = sum(kind["size_bytes"] for kind in classes.values())
    assert size_bytes == facts["dense_bytes"] + facts["all_expert_bytes"]
    assert facts["tensors"] == sum(sum(kind["types"].values()) for kind in classes.values())
    # The embeddings are the output too, so that a token reads all of them.
    assert facts["active_bytes_per_token"] == facts["dense_bytes"] + 2 * 2 * facts["expert_bytes"][0]
    parts = split(folder, 2)
    assert run_main(monkeypatch, "model", "inspect", str(parts[1])) == 0
    shown = capsys.readouterr().out
    assert all(part.name in shown for part in parts)
    assert "6 F16" in shown


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blk.0.ffn_gate_exps.weight", "experts"),
        ("blk.0.ffn_down_shexp.weight", "shared experts"),
        ("blk.0.ffn_gate_inp.weight", "router"),
        ("blk.0.exp_probs_b.bias", "router"),
        ("blk.0.attn_q_norm.weight", "norms"),
        ("blk.0.attn_kv_a_mqa.weight", "attention"),
        ("blk.0.ssm_in.weight", "recurrent"),
        ("blk.0.ffn_down.weight", "dense feed-forward"),
        ("token_embd.weight", "embeddings"),
        ("output.weight", "output"),
        ("rope_freqs.weight", "other"),
    ],
)
def test_classes_of_tensors(name: str, kind: str) -> None:
    """Each tensor belongs to one part of the model."""
    assert class_of(name) == kind
