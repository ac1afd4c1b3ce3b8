"""CDI names in a request: gpuhook's own kinds come from the inventory, others from CDI specs."""

import json
from pathlib import Path
from typing import Any

import pytest
import steps
from click.testing import CliRunner
from machines import gpu, machine

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import CdiError, GpuhookError, UnknownDeviceError
from gpuhook.base.oci.spec import Spec
from gpuhook.core.cdi import parse_cache
from gpuhook.core.cdi.folders import FolderContent
from gpuhook.tools.cli import cli

DOCUMENT = {
    "cdiVersion": "0.7.0",
    "kind": "maker.example/card",
    "containerEdits": {"env": ["COMMON=yes"]},
    "devices": [
        {
            "name": name,
            "containerEdits": {
                "env": [f"CARD_{name.upper()}=1"],
                "deviceNodes": [
                    {"path": f"/dev/card-{name}", "type": "c", "major": 240, "minor": minor}
                ],
                "mounts": [{"hostPath": "/opt/maker", "containerPath": "/opt/maker"}],
                "hooks": [{"hookName": "createContainer", "path": "/bin/true", "args": ["true"]}],
                "additionalGids": [44],
            },
        }
        for minor, name in enumerate(["a", "b"])
    ],
}
# An outdated CDI spec of a kind that gpuhook serves itself.
STALE = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"env": ["FROM=document"]}}],
}


class Site:
    """A host with two GPUs and CDI specs, and the bundle of one container."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents = folder / "cdi"
        self.documents.mkdir()
        (self.documents / "maker.json").write_text(json.dumps(DOCUMENT))
        (self.documents / "nvidia.yaml").write_text(json.dumps(STALE))
        (folder / "rootfs").mkdir()
        (folder / "bin").mkdir()
        (folder / "bin/gpuhook-prestart").touch(mode=0o755)

    def config(self, mode: str = "hook") -> str:
        return (
            f'[nvidia-container-runtime]\nmode = "{mode}"\n'
            f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{self.documents}"]\n'
            "[gpuhook]\ncdi-kinds-from-environment = "
            '["maker.example/card", "other.example/card"]\n'
        )

    def spec(self, devices: str) -> Spec:
        data = {
            "process": {"env": ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={devices}"]},
            "root": {"path": "rootfs"},
            "linux": {"namespaces": [{"type": "mount"}]},
        }
        return Spec(str(self.folder / "config.json"), json.dumps(data))

    def edit(self, spec: Spec, mode: str = "hook") -> Spec:
        edited = steps.edit(spec, loads(self.config(mode)), str(self.folder / "bin"))
        assert edited is not None
        return edited

    def edited(self, devices: str, mode: str = "hook") -> dict[str, Any]:
        return self.edit(self.spec(devices), mode).data


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = machine(gpu(0, 3), gpu(1, 1))
    monkeypatch.setattr("gpuhook.core.inventory.cache.get_inventory", lambda *_, **__: found)
    return Site(tmp_path)


def given(data: dict[str, Any]) -> list[str]:
    return [node["path"] for node in data.get("linux", {}).get("devices", [])]


def hooks(data: dict[str, Any], stage: str) -> list[str]:
    return [Path(hook["path"]).name for hook in data.get("hooks", {}).get(stage, [])]


@pytest.mark.parametrize("mode", ["hook", "spec", "auto", "cdi"])
def test_another_vendors_device_comes_from_its_cdi_spec(site: Site, mode: str) -> None:
    data = site.edited("maker.example/card=a", mode)
    assert given(data) == ["/dev/card-a"]
    assert "COMMON=yes" in data["process"]["env"]
    assert "CARD_A=1" in data["process"]["env"]
    assert "CARD_B=1" not in data["process"]["env"]
    assert data["mounts"] == [{"source": "/opt/maker", "destination": "/opt/maker"}]
    assert data["process"]["user"]["additionalGids"] == [44]
    assert {"allow": True, "type": "c", "major": 240, "minor": 0, "access": "rwm"} in (
        data["linux"]["resources"]["devices"]
    )
    assert hooks(data, "createContainer") == ["true"]
    assert data["hooks"]["createContainer"][0]["env"], "else it is the image's"
    assert hooks(data, "prestart") == [], "there is nothing for ours to do"


@pytest.mark.parametrize("mode", ["hook", "auto"])
def test_the_built_in_kind_is_resolved_from_the_inventory(site: Site, mode: str) -> None:
    data = site.edited("nvidia.com/gpu=0", mode)
    assert hooks(data, "prestart") == ["gpuhook-prestart"]
    minors = [rule["minor"] for rule in data["linux"]["resources"]["devices"]]
    assert 3 in minors
    assert "FROM=document" not in data["process"]["env"]


def test_mode_cdi_resolves_all_devices_from_cdi_specs(site: Site) -> None:
    data = site.edited("0,maker.example/card=b", "cdi")
    assert "FROM=document" in data["process"]["env"]
    assert given(data) == ["/dev/card-b"]
    assert hooks(data, "prestart") == []


def test_one_container_gets_nvidia_and_other_vendors_devices(site: Site) -> None:
    data = site.edited("maker.example/card=b,1,maker.example/card=a,maker.example/card=b")
    assert given(data) == ["/dev/card-b", "/dev/card-a"]
    assert hooks(data, "createContainer") == ["true", "true"]
    assert hooks(data, "prestart") == ["gpuhook-prestart"]
    assert 1 in [rule["minor"] for rule in data["linux"]["resources"]["devices"]]


@pytest.mark.parametrize("devices", ["maker.example/card=c", "other.example/card=a,0"])
def test_a_name_in_no_cdi_spec_is_refused(site: Site, devices: str) -> None:
    with pytest.raises(UnknownDeviceError, match="can't be used"):
        site.edited(devices)


@pytest.mark.protects(
    "document-read",
    "the CDI spec that is checked is the one that was read",
    instead="is_same = True",
)
def test_a_cdi_spec_replaced_while_it_is_read_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checked file must be the one that was read; another may have been in its place before."""
    real = parse_cache.read_folders
    trusted = site.documents / "maker.json"

    def look(config: Config, documents: parse_cache.Documents | None) -> FolderContent:
        found = real(config, documents)
        text = trusted.read_text()
        trusted.unlink()
        (site.documents / "new").write_text(text)
        (site.documents / "new").rename(trusted)
        return found

    monkeypatch.setattr(parse_cache, "read_folders", look)
    with pytest.raises(CdiError, match="was changed while it was read"):
        site.edited("maker.example/card=a")


def test_a_broken_cdi_spec_does_not_affect_other_specs(site: Site) -> None:
    (site.documents / "nvidia.yaml").write_text("kind: [\n")
    assert given(site.edited("maker.example/card=a")) == ["/dev/card-a"]
    with pytest.raises(GpuhookError):
        site.edited("nvidia.com/gpu=0", "cdi")


def test_applying_cdi_devices_twice_changes_nothing_more(site: Site) -> None:
    once = site.edit(site.spec("maker.example/card=a,maker.example/card=b"))
    assert site.edit(once).data == once.data


def test_explain_names_the_cdi_spec_file_of_each_device(site: Site) -> None:
    config = site.folder / "config.toml"
    config.write_text(site.config())
    words = ["-e", "NVIDIA_VISIBLE_DEVICES=maker.example/card=a,0", "--format", "json"]
    report = json.loads(
        CliRunner().invoke(cli, ["explain", "--config", str(config), *words]).stdout
    )
    [first, *others] = report["operations"]
    assert (first["kind"], first["name"]) == ("cdi-device", "maker.example/card=a")
    assert first["source"] == str(site.documents / "maker.json")
    assert first["edits"]["env"] == ["COMMON=yes", "CARD_A=1"]
    assert "device" in {each["kind"] for each in others}
    alone = json.loads(
        CliRunner().invoke(cli, ["explain", "--config", str(config), *words, "--hook-alone"]).stdout
    )
    assert [each["kind"] for each in alone["undone"]] == ["cdi-device"]
