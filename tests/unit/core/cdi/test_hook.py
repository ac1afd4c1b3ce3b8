"""Assumptions of the CDI hook, and the work that remains for it."""

from collections.abc import Callable
from typing import Any

import own
import pytest
from machines import VERSION, gpu, machine, mig

from gpuhook.base.config.model import Config
from gpuhook.base.loader import layout
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.cdi.hook import (
    FOLDERS_CONFIG,
    AlreadyMounted,
    EngineDevices,
    HookWork,
    by_mounts,
    devices,
)
from gpuhook.core.plan.image import Image
from gpuhook.core.plan.operations import Symlink, UpdateLdCache, WriteFile
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.own_files import PROFILE_PATH, MaskProc
from gpuhook.vendors.nvidia.vendor import VENDOR

MIGS = (mig(0, 1, 12, 13), mig(1, 2, 21, 22))
DEBIAN = Image(layout.debian(own.MACHINE))
OTHER = Image(layout.Layout("/usr/lib64", "/usr/lib", uses_cache=True))
MUSL = Image(layout.Layout("/usr/lib", None, uses_cache=False))
Spec = dict[str, Any]


def spec_of(inventory: NvidiaInventory, *names: str) -> Spec:
    """Return the config.json that an engine writes for these devices of gpuhook's CDI spec."""
    made = generate(SpecSource(VENDOR, inventory, Config(), "/x"), ("index",)).document
    by_name = {device["name"]: device["containerEdits"] for device in made["devices"]}
    every = [made["containerEdits"], *(by_name[name] for name in names)]
    numbers = {node.path: node.numbers for node in inventory.nodes}
    paths = [node["path"] for edits in every for node in edits.get("deviceNodes", ())]
    nodes = [
        {"path": path, "type": "c", "major": numbers[path][0], "minor": numbers[path][1]}
        for path in paths
    ]
    mounts = [
        {"destination": mount["containerPath"], "source": mount["hostPath"]}
        for mount in made["containerEdits"]["mounts"]
    ]
    return {"linux": {"devices": nodes}, "mounts": mounts}


def nowhere(path: str) -> None:
    """Report no device node at any mounted path."""


def found(
    spec: Spec, inventory: NvidiaInventory, numbers_at: Callable[[str], Any] = nowhere
) -> list[str]:
    return [device.label for device in devices(EngineDevices(spec, [], numbers_at), inventory)]


@pytest.mark.parametrize("names", [["0"], ["1"], ["0", "1"]])
def test_gpus_in_the_spec_are_found(names: list[str]) -> None:
    inventory = machine(gpu(0, 1), gpu(1, 0))
    assert found(spec_of(inventory, *names), inventory) == names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["0:1"], ["0:1"]),
        (["0:0", "0:1"], ["0:0", "0:1"]),
        (["1"], ["1"]),
        (["all"], ["0:0", "0:1", "1"]),
    ],
)
def test_mig_devices_in_the_spec_are_found(names: list[str], expected: list[str]) -> None:
    inventory = machine(gpu(0, 3, MIGS), gpu(1, 0))
    assert found(spec_of(inventory, *names), inventory) == expected


def test_a_mig_mode_gpu_without_instance_nodes_is_found_whole() -> None:
    """--privileged and --device=/dev/nvidia3 add the GPU without nodes of its instances."""
    inventory = machine(gpu(0, 3, MIGS))
    spec = {"linux": {"devices": [{"path": "/dev/nvidia3", "major": 195, "minor": 3}]}}
    assert found(spec, inventory) == ["0"]


def rules(*pairs: tuple[int, int], access: str = "rwm") -> Spec:
    """Return the part of config.json that allows these devices, and the creation of any node."""
    every = [{"allow": False, "access": "rwm"}, {"allow": True, "type": "c", "access": "m"}]
    made = [
        {"allow": True, "type": "c", "major": major, "minor": minor, "access": access}
        for major, minor in pairs
    ]
    return {"resources": {"devices": every + made}}


MOUNTED = {"mounts": [{"destination": "/dev/nvidia0", "source": "/somewhere"}]}


@pytest.mark.protects(
    "given-node",
    "CDI hook: a mount at a device node's path counts only with that node's device numbers",
    instead="return path in self.paths",
)
@pytest.mark.parametrize(
    ("numbers", "linux", "expected"),
    [
        ((195, 0), {}, ["1"]),  # rootless engines write no rules
        ((195, 0), rules((195, 0)), ["1"]),
        ((195, 0), rules((195, 0), access="r"), ["1"]),
        ((195, 0), rules((195, 0), access="m"), []),
        ((195, 0), rules((195, 1)), []),  # a node in a volume, made by another container
        ((195, 0), rules(), []),
        ((195, 1), rules((195, 0), (195, 1)), []),
        ((1, 3), {}, []),
        (None, {}, []),  # a file or a folder
    ],
)
def test_a_mounted_path_is_a_gpu_only_with_the_nodes_numbers(
    numbers: tuple[int, int] | None, linux: Spec, expected: list[str]
) -> None:
    """A user who chooses the volumes may mount anything at that path."""
    inventory = machine(gpu(0, 1), gpu(1, 0))
    assert found({**MOUNTED, "linux": linux}, inventory, lambda _: numbers) == expected


@pytest.mark.parametrize(
    ("source", "numbers"),
    [
        ("/dev/null", (1, 3)), ("null", (1, 3)), ("/dev", None), ("/nonexistent", None),
        ("a\0b", None), (7, None), (None, None), ("", None),
    ],
)  # fmt: skip
def test_only_a_mount_of_a_device_node_yields_device_numbers(
    source: object, numbers: tuple[int, int] | None
) -> None:
    spec = {"mounts": [{"destination": "/x", "source": source}]}
    assert by_mounts(spec, "/dev")("/x") == numbers
    assert by_mounts(spec, "/dev")("/y") is None


@pytest.mark.protects(
    "given-opened",
    "CDI hook: a node denied by cgroup rules isn't counted, and repair doesn't allow it",
    instead="return numbers",
)
def test_a_node_denied_by_cgroup_rules_is_not_counted_as_a_gpu() -> None:
    inventory = machine(gpu(0, 1), gpu(1, 0))
    linux = spec_of(inventory, "0", "1")["linux"]
    assert found({"linux": {**linux, **rules((195, 0))}}, inventory) == ["1"]


def test_nodes_with_other_numbers_are_not_counted_as_gpus() -> None:
    inventory = machine(gpu(0, 0))
    node = {"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3}
    assert found({"linux": {"devices": [node]}}, inventory) == []


@pytest.mark.parametrize(
    "spec",
    [
        {}, {"linux": None}, {"linux": {"devices": 3}}, {"linux": {"devices": [3, None, {}]}},
        {"mounts": {"destination": "/dev/nvidia0"}}, {"mounts": [[], {"destination": 3}]},
    ],
)  # fmt: skip
def test_misshapen_specs_contain_no_gpus(spec: Spec) -> None:
    assert found(spec, machine(gpu(0, 0))) == []


# The plan -----------------------------------------------------------------------------------


def plan(spec: Spec, image: Image = DEBIAN, inventory: NvidiaInventory | None = None) -> list[Any]:
    inventory = inventory or machine(gpu(0, 3), gpu(1, 0))
    return HookWork(spec, [], VENDOR, inventory, Config(), nowhere).plan(image).operations


def given(*names: str) -> Spec:
    return spec_of(machine(gpu(0, 3), gpu(1, 0)), *names)


def kinds(operations: list[Any]) -> set[str]:
    return {op.kind for op in operations}


def test_the_hook_repeats_no_device_mount_and_no_device_rule() -> None:
    steps = plan(given("0"))
    assert kinds(steps) == {"mounted", "bind", "proc-driver", "symlink", "write", "ldcache"}
    assert {op.destination for op in steps if op.kind == "bind"} == {"/run/p/socket"}
    assert isinstance(steps[-1], UpdateLdCache)


def test_links_and_cached_names_use_the_hosts_folders() -> None:
    steps = plan(given("0"))
    links = {op.destination: op.target for op in steps if isinstance(op, Symlink)}
    assert links[f"{own.FOLDER}/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert links[f"{own.FOLDER}/libcuda.so"] == "libcuda.so.1"
    cached = {path for _, path, _ in steps[-1].libraries}
    assert {f"{own.FOLDER}/libcuda.so.1", f"{own.FOLDER32}/libcuda.so.1"} <= cached


def test_proc_and_egl_profile_show_only_the_containers_gpus() -> None:
    steps = plan(given("1"))
    [cover] = [op for op in steps if isinstance(op, MaskProc)]
    assert cover.binds == ("gpus/0000:1c:00.0",)
    [profile] = [op for op in steps if isinstance(op, WriteFile) and op.destination == PROFILE_PATH]
    assert '"EGLVisibleDGPUDevices",0x1]' in profile.content
    nothing = plan({})
    [cover] = [op for op in nothing if isinstance(op, MaskProc)]
    assert cover.binds == ()


def test_unmounted_files_get_no_links_and_no_cache_names() -> None:
    spec = given("0")
    spec["mounts"] = [each for each in spec["mounts"] if "libcuda.so" not in each["destination"]]
    steps = plan(spec)
    assert not [op for op in steps if "libcuda" in getattr(op, "destination", "")]
    names = {name for name, _, _ in steps[-1].libraries}
    assert "libcuda.so.1" not in names
    assert "libnvidia-ml.so.1" in names


def test_a_container_without_libraries_keeps_its_linker_cache() -> None:
    assert "ldcache" not in kinds(plan({}))


def test_links_to_missing_nodes_are_not_made() -> None:
    spec = given("0")
    dri = [node for node in spec["linux"]["devices"] if "/dri/" in node["path"]]
    links = [op.destination for op in plan(spec) if "by-path" in getattr(op, "destination", "")]
    assert len(links) == len(dri) == 2
    spec["linux"]["devices"] = [node for node in spec["linux"]["devices"] if node not in dri]
    assert not [op for op in plan(spec) if "by-path" in getattr(op, "destination", "")]


def test_mounted_link_targets_are_recognised_as_already_mounted() -> None:
    """The driver's own file covers a file of the image in a link's place."""
    known = {op.destination for op in plan(given("0")) if isinstance(op, AlreadyMounted)}
    assert f"{own.FOLDER}/libcuda.so.{VERSION}" in known
    assert "/usr/bin/nvidia-smi" not in known


def test_an_image_with_other_folders_gets_a_config_of_the_hosts_folders() -> None:
    [config] = [
        op for op in plan(given("0"), OTHER)
        if isinstance(op, WriteFile) and op.destination == FOLDERS_CONFIG
    ]  # fmt: skip
    assert config.content == f"{own.FOLDER}\n{own.FOLDER32}\n"
    written = [op.destination for op in plan(given("0")) if isinstance(op, WriteFile)]
    assert FOLDERS_CONFIG not in written


def test_a_loader_without_a_cache_gets_links_in_its_own_folder() -> None:
    steps = plan(given("0"), MUSL)
    assert not [op for op in steps if isinstance(op, UpdateLdCache)]
    links = {op.destination: op.target for op in steps if isinstance(op, Symlink)}
    assert links["/usr/lib/libcuda.so.1"] == f"{own.FOLDER}/libcuda.so.1"
