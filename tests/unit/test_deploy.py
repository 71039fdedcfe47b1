"""deploy/: what stands there fits the program, as far as that can be told without running it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_proxy.config import DEFAULT_PORT, Settings
from moe_proxy.proxy.context import SecurityPolicy
from moe_proxy.proxy.security import check_key
from moe_proxy.proxy.server import ROUTES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*/*.yaml"))
SETTINGS = {f"MOE_PROXY_{name.upper()}" for name in Settings.model_fields}
DRAIN_S = Settings.model_fields["drain_s"].default


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture
def pod() -> Any:
    """The pod that the manifests start."""
    return _yaml(DEPLOY / "kubernetes/cpu/deployment.yaml")["spec"]["template"]["spec"]


@pytest.mark.parametrize("path", MANIFESTS, ids=[str(path.relative_to(DEPLOY)) for path in MANIFESTS])
def test_manifests_are_yaml(path: Path) -> None:
    """One object a file, with version and kind; what a kustomization names is there."""
    body = _yaml(path)
    assert body["apiVersion"]
    assert body["kind"]
    named = [*body.get("resources", []), *(patch["path"] for patch in body.get("patches", []))]
    assert [name for name in named if not (path.parent / name).exists()] == []


def test_probes_ask_routes_that_need_no_key(pod: Any) -> None:
    """Probes: /livez for the process, /health for the model; both answer without a key."""
    (container,) = pod["containers"]
    asked = {
        name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    }
    assert asked == {"startup": "/health", "readiness": "/health", "liveness": "/livez"}
    for path in asked.values():
        assert "GET" in ROUTES[path]
        check_key({}, path, SecurityPolicy(key_digests=(b"k",)))
    # The model may take as long to load as the proxy itself allows.
    startup = container["startupProbe"]
    assert (
        startup["periodSeconds"] * startup["failureThreshold"]
        >= Settings.model_fields["ready_timeout_s"].default
    )


def test_the_pod_may_do_little(pod: Any) -> None:
    """No root, read-only root file system, no capability, limits on memory, time for streams to finish."""
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_manifests_set_settings(pod: Any) -> None:
    """Each variable is a setting of the program, and the port is the one it listens on."""
    (card,) = _yaml(DEPLOY / "kubernetes/gpu/card.yaml")["spec"]["template"]["spec"]["containers"]
    (container,) = pod["containers"]
    assert {variable["name"] for variable in container["env"] + card["env"]} <= SETTINGS
    assert card["name"] == container["name"]
    assert container["ports"][0]["containerPort"] == DEFAULT_PORT
    assert _yaml(DEPLOY / "kubernetes/cpu/service.yaml")["spec"]["ports"][0]["port"] == DEFAULT_PORT


def _stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, by name."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    parts = re.split(r"^FROM \S+ AS (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_image_is_made_in_stages() -> None:
    """Multi-stage: what builds stays behind; the stage for the CPU is the one that a plain build makes."""
    stages = _stages()
    assert list(stages) == ["build-cpu", "build-cuda", "cuda", "cpu"]
    for name in ("cpu", "cuda"):
        assert "g++" not in stages[name]
        assert f"COPY --from=build-{name} /opt/engine /opt/engine" in stages[name]
        assert re.search(r"^USER 10001:10001$", stages[name], re.MULTILINE)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_image_sets_settings(name: str) -> None:
    """Each variable is a setting; all that is written to lies in the one volume; the port is ours."""
    variables = dict(re.findall(r"(MOE_PROXY_\w+)=(\S+)", _stages()[name]))
    assert set(variables) <= SETTINGS
    for folder in ("CACHE_DIR", "STATE_DIR", "RUNTIME_DIR"):
        assert variables[f"MOE_PROXY_{folder}"].startswith("/var/lib/moe-proxy/")
    assert re.search(rf"^EXPOSE {DEFAULT_PORT}$", _stages()[name], re.MULTILINE)


def test_the_two_images_differ_in_the_card_alone() -> None:
    """What is said twice says the same."""
    cpu, cuda = _stages()["cpu"], _stages()["cuda"]
    cuda = cuda.replace("build-cuda", "build-cpu").replace("    MOE_PROXY_GPU=true \\\n", "")
    cuda = cuda.replace("\n# The last stage is what a build without --target makes.\n", "")
    assert cuda.strip() == cpu.strip()


def test_what_the_wheel_needs_is_in_the_build_context() -> None:
    """.dockerignore lets through what pyproject.toml packs."""
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    packed = re.findall(r'^"(\S+)" = "moe_proxy/_data/', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"moe_proxy", "pyproject.toml", "README.md", "LICENSE", *packed} == kept


def test_the_unit_waits_for_the_model_and_for_streams() -> None:
    """Type=notify, no time-out while the model loads, more time to stop than streams have to finish."""
    unit = (DEPLOY / "moe-proxy.service").read_text(encoding="utf-8")
    lines = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert lines["Type"] == "notify"
    assert lines["ExecStart"].endswith("/moe-proxy start")
    assert lines["TimeoutStartSec"] == "infinity"
    assert float(lines["TimeoutStopSec"]) > DRAIN_S
