"""Mode of a container, by configuration and request, as seen in what gpu-py writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import steps
from machines import gpu, machine

from gpuhook.base.config.loader import loads
from gpuhook.base.errors import ConfigError, RequestError
from gpuhook.base.oci.spec import Spec

Case = dict[str, Any]

# NVIDIA's result -> gpuhook's nearest; docs/engineering/differences.md says why.
NEAREST = {"legacy": "hook", "jit-cdi": "hook", "csv": "hook", "cdi": "CDI devices"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of gpu-py's programs, on a host with two GPUs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gpuhook-prestart").touch(mode=0o755)
    (tmp_path / "rootfs").mkdir()
    found = machine(gpu(0, 0), gpu(1, 1))
    monkeypatch.setattr("gpuhook.core.inventory.cache.get_inventory", lambda *_, **__: found)
    return tmp_path / "bin"


def way(programs: Path, config: str, env: list[str], mounts: list[str]) -> str:
    """Return what gpu-py does for a container: nothing, hook, spec, or the reason to refuse it."""
    data = {
        "process": {"env": env},
        "root": {"path": "rootfs"},
        "mounts": [{"source": "/dev/null", "destination": path} for path in mounts],
        "linux": {"namespaces": [{"type": "mount"}]},
    }
    spec = Spec(str(programs.parent / "config.json"), json.dumps(data))
    try:
        edited = steps.edit(spec, loads(config), str(programs))
    except RequestError as error:
        return "CDI devices" if "CDI devices can't be used" in error.cause else error.cause
    if edited is None:
        return "nothing"
    hooked = bool(edited.hooks("prestart"))
    written = len(edited.data["mounts"]) > len(mounts)
    assert hooked != written
    assert "devices" in edited.data["linux"]["resources"]
    assert written == ("devices" in edited.data["linux"])
    return "hook" if hooked else "spec"


@pytest.mark.vectors("mode", "mode.resolve")
def test_the_mode_is_resolved_as_in_the_vectors(case: Case, programs: Path) -> None:
    given = case["input"]
    accept = str(given["accept_volume_mounts"]).lower()
    text = f"""
        accept-nvidia-visible-devices-as-volume-mounts = {accept}
        [nvidia-container-runtime]
        mode = "{given["mode"]}"
    """
    if given["mode"] == "not-auto":  # NVIDIA's runtime fails only when it creates a container
        with pytest.raises(ConfigError, match=r"line 4: .*mode must be one of"):
            loads(text)
        return
    mounts = given["devnull_mounts"]
    # NVIDIA's result for a container without a request is gpuhook's for one that requests GPUs.
    env = given["env"] if given["env"] or mounts else {"NVIDIA_VISIBLE_DEVICES": "all"}
    found = way(programs, text, [f"{name}={value}" for name, value in env.items()], mounts)
    nearest = NEAREST[case["expected"]["mode"]]
    # Names of gpuhook's own kinds come from the inventory, in all modes but cdi.
    assert found == ("hook" if nearest == "CDI devices" and given["mode"] != "cdi" else nearest)


@pytest.mark.parametrize(
    ("mode", "devices", "expected"),
    [
        ("hook", "0", "hook"),
        ("spec", "0", "spec"),
        ("spec", "none", "spec"),
        ("auto", "0", "hook"),
        ("legacy", "0", "hook"),
        ("csv", "0", "hook"),
        ("jit-cdi", "0", "spec"),
        ("cdi", "runtime.nvidia.com/gpu=0", "spec"),
        ("cdi", "none", "hook"),
        ("cdi", "0", "CDI devices"),
        ("hook", "nvidia.com/gpu=0,1", "hook"),
        ("spec", "nvidia.com/gpu=0", "spec"),
        ("auto", "nvidia.com/gpu=all", "hook"),
        ("cdi", "nvidia.com/gpu=0", "CDI devices"),
        *[(mode, "a.b/c=0", "CDI devices") for mode in ("hook", "spec", "auto", "cdi")],
        *[(mode, "void", "nothing") for mode in ("hook", "spec", "auto", "cdi")],
    ],
)
def test_the_configured_mode_and_the_request_decide_the_mode_used(
    mode: str, devices: str, expected: str, programs: Path
) -> None:
    text = f'nvidia-container-runtime.mode = "{mode}"\n'
    text += 'gpuhook.cdi-kinds-from-environment = ["a.b/c"]\n'
    assert way(programs, text, [f"NVIDIA_VISIBLE_DEVICES={devices}"], []) == expected
