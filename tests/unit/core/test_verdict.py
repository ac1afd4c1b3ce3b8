"""The gate's verdict, which a start reads before anything in the container's request."""

import json
import os
from pathlib import Path
from typing import Any

import machines
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpuhook import prestart_hook, runtime_shim
from gpuhook.base import state_directory
from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError, UnknownDeviceError
from gpuhook.base.oci.runtime_argv import Arguments
from gpuhook.base.oci.spec import Spec
from gpuhook.cluster.nri.verdicts import Verdicts
from gpuhook.core import edit, verdict
from gpuhook.core.inventory import cache
from gpuhook.core.resolve import resolve
from gpuhook.core.verdict import FOLDER, Verdict
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.variables import CAPABILITIES

ID = "4f0c51"
UUIDS = [f"GPU-{index:08d}-0000-0000-0000-000000000000" for index in range(4)]
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
WITHOUT = "only to containers of pods that gpuhook nri --gate has seen"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    found = Config()
    found.state_dir, found.gate = str(tmp_path / "state"), True
    return found


def machine() -> Any:
    return machines.machine(*(machines.gpu(index, index) for index in range(4)))


def write(config: Config, *places: int, names: tuple[str, ...] = (), container: str = ID) -> None:
    devices = {"nvidia": tuple(UUIDS[place] for place in places)} if places else {}
    Verdicts().write(config.state_dir, container, Verdict(devices, names))


def given_to(config: Config, *env: str, container: str = ID, **more: Any) -> list[str]:
    spec = {"process": {"env": [*env]}, **more}
    found = resolve(
        spec,
        config,
        registry.all_vendors(config),
        container=container,
        inventories={"nvidia": machine()},
    )
    return [] if found is None else [*found.ids]


@pytest.mark.protects(
    "verdict-devices",
    "the NRI gate's verdict overrides the devices that a container requests",
    instead="devices = chooser.select(vendor, request, inventory)",
)
@pytest.mark.parametrize(
    "env",
    [
        ("all",), ("0,1,2,3",), ("1",), ("all", "all"), ("void", "all"), ("all", "3"), ("3", "0"),
        (",".join(UUIDS),), ("nvidia.com/gpu=all",),
    ],
)  # fmt: skip
def test_the_verdict_overrides_the_requested_devices(config: Config, env: tuple[str, ...]) -> None:
    words = [f"{VARIABLE}={each}" for each in env]
    write(config, 2, 0)
    assert given_to(config, *words) == [UUIDS[2], UUIDS[0]], "in the gate's order"
    write(config)
    assert given_to(config, *words) == []
    with pytest.raises(RequestError, match=WITHOUT):
        given_to(config, *words, container="another")
    config.gate = False
    assert given_to(config, *words) != [UUIDS[2], UUIDS[0]]


@pytest.mark.parametrize("word", ["any", "any:3", "nvidia.com/gpu=any", "any,0", "any:0"])
def test_the_verdict_replaces_a_choice_of_free_devices(config: Config, word: str) -> None:
    write(config, 2)
    assert given_to(config, f"{VARIABLE}={word}") == [UUIDS[2]]
    write(config)
    assert given_to(config, f"{VARIABLE}={word}") == []
    with pytest.raises(RequestError, match=WITHOUT):
        given_to(config, f"{VARIABLE}={word}", container="another")


@pytest.mark.parametrize("word", [*CAPABILITIES, "all", "", "none", "utility,display"])
def test_the_verdict_applies_whatever_the_driver_capabilities(config: Config, word: str) -> None:
    write(config, 1)
    capabilities = f"NVIDIA_DRIVER_CAPABILITIES={word}"
    assert given_to(config, f"{VARIABLE}=all", capabilities) == [UUIDS[1]]
    with pytest.raises(RequestError, match=WITHOUT):
        given_to(config, f"{VARIABLE}=all", capabilities, container="another")


def test_a_container_requesting_no_devices_needs_no_verdict(config: Config) -> None:
    assert given_to(config, "A=1") == []
    assert given_to(config, f"{VARIABLE}=void") == []
    write(config, 0)
    assert given_to(config, "A=1") == [], "it isn't asked for"


def test_devices_none_with_a_verdict_gives_the_driver_and_no_device(config: Config) -> None:
    write(config)
    spec = {"process": {"env": [f"{VARIABLE}=none"]}}
    inventories = {"nvidia": machine()}
    found = resolve(
        spec, config, registry.all_vendors(config), container=ID, inventories=inventories
    )
    assert found is not None
    assert [grant.devices for grant in found.grants] == [()]


def test_the_verdict_overrides_mounts_and_annotations(config: Config) -> None:
    config.accept_volume_mounts = config.accept_annotations = True
    write(config, 1)
    place = f"/var/run/nvidia-container-devices/{UUIDS[3]}"
    mounts = [{"source": "/dev/null", "destination": place}]
    assert given_to(config, mounts=mounts) == [UUIDS[1]]
    assert given_to(config, annotations={"cdi.k8s.io/a": "nvidia.com/gpu=3"}) == [UUIDS[1]]


@pytest.mark.protects(
    "verdict-names",
    "the NRI gate's verdict also applies to devices requested by CDI names and options",
)
def test_cdi_names_missing_from_the_verdict_are_refused(config: Config) -> None:
    config.cdi_kinds_from_environment = ("a.com/b",)
    for env, name in (
        ((f"{VARIABLE}=0", "NVIDIA_IMEX_CHANNELS=5"), "nvidia.com/imex-channel=5"),
        ((f"{VARIABLE}=a.com/b=1",), "a.com/b=1"),
    ):
        write(config, 0, names=("nvidia.com/imex-channel=4", "a.com/b=2"))
        with pytest.raises(RequestError, match=f"hasn't given the container {name}"):
            given_to(config, *env)
    write(config, 0, names=("a.com/b=1",))
    assert given_to(config, f"{VARIABLE}=a.com/b=1") == []


def test_a_verdict_with_a_missing_device_is_refused(config: Config) -> None:
    Verdicts().write(config.state_dir, ID, Verdict({"nvidia": ("GPU-gone",)}))
    with pytest.raises(UnknownDeviceError, match="GPU-gone, which this host no longer has"):
        given_to(config, f"{VARIABLE}=all")


# Which verdict ------------------------------------------------------------------------------------

NAMES = ("", ".", "..", "../x", "a/b", "/etc/passwd", "a b", "é", "a\0", ".hidden", "x" * 129)


@pytest.mark.protects(
    "verdict-id",
    "a container's id can't lead to a file other than its gate verdict",
    instead="return True",
)
@pytest.mark.parametrize("name", NAMES)
def test_an_invalid_container_id_is_refused(config: Config, name: str) -> None:
    """A container's id comes from a command line, so it must not lead to another folder."""
    write(config, 0)
    folder = Path(config.state_dir)
    (folder / "x").write_bytes((folder / FOLDER / ID).read_bytes())
    with pytest.raises(RequestError, match=WITHOUT):
        given_to(config, f"{VARIABLE}=all", container=name)
    with pytest.raises(Exception, match="id of the container is invalid"):
        Verdicts().write(config.state_dir, name, Verdict({}))


@given(some.text())
def test_any_accepted_container_id_is_a_plain_file_name(name: str) -> None:
    if verdict.is_id(name):
        assert os.path.basename(name) == name
        assert not name.startswith(".")


@pytest.mark.protects(
    "verdict-owner",
    "a gate verdict is ignored if a user other than root may have written it",
    instead="with parent, parent.folder(FOLDER) as folder:",
)
@pytest.mark.parametrize("how", ["folder", "file", "link", "linked folder"])
def test_a_verdict_that_other_users_may_have_written_is_ignored(
    config: Config, tmp_path: Path, how: str
) -> None:
    write(config, 0)
    folder = Path(config.state_dir) / FOLDER
    file, aside = folder / ID, tmp_path / "aside"
    if how == "folder":
        folder.chmod(0o755)
    elif how == "file":
        file.chmod(0o666)
    elif how == "link":
        file.rename(aside)
        file.symlink_to(aside)
    else:
        folder.rename(aside)
        folder.symlink_to(aside)
    with pytest.raises(RequestError, match=WITHOUT):
        given_to(config, f"{VARIABLE}=all")


@pytest.mark.parametrize("text", [b"", b"{}", b"x\n{}", b'{"devices": {}}', b"\xff" * 100])
def test_a_damaged_verdict_is_refused(config: Config, text: bytes) -> None:
    write(config, 0)
    file = Path(config.state_dir) / FOLDER / ID
    file.write_bytes(text)
    with pytest.raises(RequestError, match=WITHOUT):
        given_to(config, f"{VARIABLE}=all")
    body = b'{"other": 1}'
    file.write_bytes(state_directory.digest(body).encode() + b"\n" + body)
    with pytest.raises(RequestError, match=WITHOUT):
        given_to(config, f"{VARIABLE}=all")


def test_old_verdicts_are_removed_except_of_running_containers(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Verdicts()
    for name in ("old", "running", "young"):
        kept.write(config.state_dir, name, Verdict({}))
    folder = Path(config.state_dir) / FOLDER
    for name in ("old", "running"):
        os.utime(folder / name, (0, 0))
    records = "gpuhook.cluster.nri.verdicts.records.read_all"
    monkeypatch.setattr(records, lambda _: [{"id": "running"}])
    Verdicts().write(config.state_dir, "new", Verdict({}))
    assert sorted(each.name for each in folder.iterdir()) == ["new", "running", "young"]


# Who reads it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("create", "--bundle", "/b", ID), ("run", "-b", "/b", ID)])
def test_the_container_id_is_read_from_the_runtimes_arguments(words: tuple[str, ...]) -> None:
    assert Arguments([*words]).container == ID


def a_bundle(folder: Path, *env: str) -> Path:
    linux = {"namespaces": [{"type": "mount"}]}
    data = {"process": {"env": [*env]}, "root": {"path": "rootfs"}, "linux": linux}
    (folder / "config.json").write_text(json.dumps(data))
    (folder / "gpuhook-prestart").write_text("")
    (folder / "gpuhook-prestart").chmod(0o755)
    return folder


@pytest.mark.protects(
    "verdict-missing", "a container without a verdict gets no devices on a node with the NRI gate"
)
def test_the_runtime_gives_no_device_without_a_verdict(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "get_inventory", lambda *_, **__: machine())
    config.helper = False
    folder = a_bundle(tmp_path, f"{VARIABLE}=all")
    argv = ["create", "--bundle", str(folder), ID]
    before = (folder / "config.json").read_text()
    with pytest.raises(RequestError, match=WITHOUT):
        runtime_shim.prepare_bundle(Arguments(argv), config, f"{folder}/gpu-py")
    assert (folder / "config.json").read_text() == before
    write(config)
    assert not runtime_shim.prepare_bundle(Arguments(argv), config, f"{folder}/gpu-py")
    write(config, 1)
    assert runtime_shim.prepare_bundle(Arguments(argv), config, f"{folder}/gpu-py")
    rules = json.loads((folder / "config.json").read_text())["linux"]["resources"]["devices"]
    assert {each["minor"] for each in rules if each["major"] == 195} == {255, 1}


@pytest.mark.protects(
    "verdict-missing", "a container without a verdict gets no devices on a node with the NRI gate"
)
@pytest.mark.parametrize("run", [prestart_hook.run, prestart_hook.take])
def test_the_hook_gives_no_device_without_a_verdict(
    config: Config, tmp_path: Path, run: Any
) -> None:
    """This includes a hook that podman or CRI-O calls without gpu-py."""
    folder = a_bundle(tmp_path, f"{VARIABLE}=all")
    state = json.dumps({"id": ID, "pid": os.getpid(), "bundle": str(folder)}).encode()
    with pytest.raises(RequestError, match=WITHOUT):
        run(state, config, "")


def test_a_start_without_a_container_id_is_refused(config: Config) -> None:
    """The precreate stage of podman comes before the container has its id."""
    spec = Spec("config.json", json.dumps({"process": {"env": [f"{VARIABLE}=0"]}}))
    write(config, 0)
    with pytest.raises(RequestError, match=WITHOUT):
        edit.edit(spec, config, registry.all_vendors(config), "/none")


@pytest.mark.protects(
    "restored-gate",
    "a container restored from a checkpoint needs the NRI gate's verdict for devices",
    instead="gated = False",
)
def test_a_container_restored_from_a_checkpoint_needs_a_verdict(config: Config) -> None:
    spec = Spec("config.json", json.dumps({"process": {"env": [f"{VARIABLE}=0"]}}))
    write(config, 0)
    with pytest.raises(RequestError, match=WITHOUT):
        edit.check_restored(spec, config, registry.all_vendors(config))
    nothing = Spec("config.json", json.dumps({"process": {"env": ["A=1"]}}))
    edit.check_restored(nothing, config, registry.all_vendors(config))
