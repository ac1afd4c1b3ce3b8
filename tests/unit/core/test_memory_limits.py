"""Limits of device memory: the devices that have one, and the kernel's dmem controller.

The kernel of the tests has no such controller, so a folder stands for the tree of cgroups. The
tests do what the kernel does with a write, so they don't show other reactions of a kernel.
"""

import errno
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from machines import gpu, machine, mig

from gpuhook.base.cgroup import access, dmem
from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.container import kernel
from gpuhook.base.errors import DriverError, GpuhookError, MemoryLimitError, NoDriverError
from gpuhook.base.host import proc
from gpuhook.base.oci.spec import Spec
from gpuhook.core import contract, resolve
from gpuhook.core import memory_limits as limiting
from gpuhook.core.inventory import cache, model
from gpuhook.core.inventory.model import Device
from gpuhook.core.memory_limits import MemoryLimits
from gpuhook.core.request import memory_settings as words
from gpuhook.core.request.reader import Request, SpecReader
from gpuhook.core.request.sources import memory_limit_place
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.model import NvidiaInventory

GIB = 1 << 30
VRAM = "drm/0000:03:00.0/vram"
TILES = ("drm/0000:8c:00.0/vram0", "drm/0000:8c:00.0/vram1")
CAPACITY = f"{VRAM} {16 * GIB}\n{TILES[0]} {8 * GIB}\n{TILES[1]} {24 * GIB}\n"


def nvidia(*gpus: Any, version: str = "615.10.01") -> NvidiaInventory:
    """Return a host whose NVIDIA driver enforces memory limits."""
    every = gpus or (gpu(0, 3), gpu(1, 0))
    found = machine(*(each.but(memory=80 * GIB) for each in every))
    return found.but(version=version)


def drm(vendor: str, *bus_ids: str, parent: str = "") -> model.Inventory:
    devices = tuple(
        Device(bus_id, str(at), {"index": (str(at),)}, (), bus_id, "card", parent)
        for at, bus_id in enumerate(bus_ids)
    )
    return model.Inventory(vendor, "/", "6.14", devices, ())


AMD = drm("amd", "0000:03:00.0")
INTEL = drm("intel_gpu", "0000:8c:00.0")


def found(
    *env: str,
    config: Config | None = None,
    mounts: Sequence[str] = (),
    annotations: dict[str, Any] | None = None,
    **inventories: Any,
) -> MemoryLimits | None:
    """Return the memory limits of a container with these variables and mounts of /dev/null."""
    config = config or Config()
    inventories = inventories or {"nvidia": nvidia()}
    vendors = registry.all_vendors(config)
    mounted = [{"source": "/dev/null", "destination": place} for place in mounts]
    data = {"process": {"env": env}, "mounts": mounted, "annotations": annotations or {}}
    spec = Spec("config.json", json.dumps(data))
    resolved = resolve.resolve(spec.data, config, vendors, inventories=inventories)
    return resolve.find_memory_limits(spec, config, vendors, resolved, inventories)


def sizes(*env: str, **given: Any) -> dict[str, int]:
    limits = found(*env, **given)
    return {op.device: op.bytes // GIB for op in limits.operations} if limits else {}


ALL = "NVIDIA_VISIBLE_DEVICES=all"


def test_no_limit_is_set_without_a_request() -> None:
    assert found(ALL) is None
    assert found("GPUHOOK_DEVICE_MEMORY=rubbish") is None, "it asks for no device"


LIMIT, REQUEST = "NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"


@pytest.mark.protects(
    "limit-variables", "NVIDIA's own variables limit the memory of the container's NVIDIA GPUs"
)
@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ((f"{LIMIT}=8192",), 8),
        ((f"{REQUEST}=8192",), 8),
        ((f"{LIMIT}=8192", f"{REQUEST}=4096"), 8),
        ((f"{LIMIT}=8192", f"{REQUEST}=8192"), 8),
        ((f"{LIMIT}=8192", f"{REQUEST}=0"), 8),
        ((f"{LIMIT}=00008192",), 8),
        ((f"{LIMIT}=17592186044415",), 80),
        ((f"{LIMIT}=8192", "GPUHOOK_DEVICE_MEMORY=4GiB"), 4),
        ((f"{LIMIT}=4096", "GPUHOOK_DEVICE_MEMORY=8GiB"), 4),
    ],
)
def test_nvidias_variables_limit_all_gpus(env: tuple[str, ...], expected: int) -> None:
    assert sizes(ALL, *env) == {"0": expected, "1": expected}


def test_a_memory_request_of_0_sets_no_limit() -> None:
    assert found(ALL, f"{REQUEST}=0") is None
    assert found(f"{LIMIT}=rubbish") is None, "it asks for no device"


@pytest.mark.protects(
    "limit-variables", "NVIDIA's own variables limit the memory of the container's NVIDIA GPUs"
)
@pytest.mark.parametrize("name", [LIMIT, REQUEST])
@pytest.mark.parametrize(
    "value",
    ["", " ", "8GiB", "8192MiB", "-1", "+1", " 8", "8 ", "0x10", "1e3", "8_0", "8.0",
     "17592186044416", "9" * 5000, "\N{ARABIC-INDIC DIGIT EIGHT}"],
)  # fmt: skip
def test_nvidias_variables_that_are_not_whole_mebibytes_are_refused(name: str, value: str) -> None:
    with pytest.raises(MemoryLimitError, match=f"{name} has .* isn't a whole number of MiB"):
        found(ALL, f"{name}={value}")


def test_a_request_above_the_limit_is_refused() -> None:
    with pytest.raises(
        MemoryLimitError, match=f"{REQUEST} asks for 8193MiB, which is more than 8192"
    ):
        found(ALL, f"{LIMIT}=8192", f"{REQUEST}=8193")


def test_a_memory_limit_of_0_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match=f"{LIMIT} says 0MiB"):
        found(ALL, f"{LIMIT}=0")


@pytest.mark.protects(
    "limit-variables", "NVIDIA's own variables limit the memory of the container's NVIDIA GPUs"
)
def test_nvidias_variables_limit_no_other_vendors_devices(tree: "Tree") -> None:
    del tree
    every: dict[str, Any] = {"nvidia": nvidia(gpu(0, 3)), "amd": AMD}
    env = ("NVIDIA_VISIBLE_DEVICES=0", "AMD_VISIBLE_DEVICES=0", f"{LIMIT}=1024")
    limits = found(*env, **every)
    assert limits is not None
    assert [(op.vendor, op.bytes) for op in limits.operations] == [("nvidia", GIB)]
    assert found("AMD_VISIBLE_DEVICES=0", f"{LIMIT}=1024", amd=AMD) is None


@pytest.mark.protects(
    "limit-variables", "NVIDIA's own variables limit the memory of the container's NVIDIA GPUs"
)
def test_nvidias_variables_can_only_lower_the_administrators_limit() -> None:
    config = loads('[gpuhook.limits]\nmost-device-memory = "4GiB"\n')
    assert sizes(ALL, f"{LIMIT}=8192", config=config) == {"0": 4, "1": 4}
    assert sizes(ALL, f"{LIMIT}=2048", config=config) == {"0": 2, "1": 2}
    config = loads('[gpuhook.limits]\ndevice-memory = "4GiB"\n')
    assert sizes(ALL, f"{LIMIT}=8192", config=config) == {"0": 4, "1": 4}


NOTE = "nvidia.com/container.{}.gpu-memory.{}"
CONTAINERD = {"io.kubernetes.cri.container-name": "main"}
CRIO = {"io.kubernetes.cri-o.Labels": '{"io.kubernetes.container.name": "main"}'}
FALSE = {"io.kubernetes.cri.container-name": "other than the engine says"}
NOTES = {
    "limit": ({"main": {"limit": "8Gi"}}, 8),
    "request": ({"main": {"request": "8Gi"}}, 8),
    "both": ({"main": {"limit": "8Gi", "request": "1Gi"}}, 8),
    "more than there is": ({"main": {"limit": "1Ti"}}, 80),
    "a neighbour's, too": ({"main": {"limit": "8Gi"}, "other": {"limit": "1Gi"}}, 8),
    "a neighbour's only": ({"other": {"limit": "8Gi"}}, None),
    "another end": ({"main": {"limits": "8Gi"}}, None),
}


@pytest.mark.parametrize("engine", [CONTAINERD, CRIO, {**CRIO, **FALSE}])
@pytest.mark.parametrize("name", NOTES)
def test_pod_annotations_limit_the_containers_devices(name: str, engine: dict[str, str]) -> None:
    """The KAI scheduler writes these annotations, and the engine passes a pod's annotations on."""
    given, expected = NOTES[name]
    annotations = {
        NOTE.format(to, end): size for to, by in given.items() for end, size in by.items()
    }
    found = sizes(ALL, annotations={**engine, **annotations})
    assert found == ({"0": expected, "1": expected} if expected else {})


def test_without_a_container_name_the_lowest_annotated_limit_applies() -> None:
    """The lowest of all annotated limits counts, because any of them may be this container's."""
    notes = {NOTE.format("a", "limit"): "8Gi", NOTE.format("b", "request"): "4Gi"}
    assert sizes(ALL, annotations=notes) == {"0": 4, "1": 4}
    assert sizes(ALL, f"{LIMIT}=2048", annotations=notes) == {"0": 2, "1": 2}


@pytest.mark.parametrize("value", ["", "8GiB", "8 Gi", "-1", "all", "0", 8, None, ["8Gi"]])
def test_annotations_that_are_no_quantities_are_refused(value: Any) -> None:
    notes = {NOTE.format("main", "limit"): value}
    with pytest.raises(MemoryLimitError, match="isn't an amount of memory"):
        found(ALL, annotations=notes)
    assert found(annotations=notes) is None, "it asks for no device"


def test_an_annotated_request_above_its_limit_is_refused() -> None:
    notes = {NOTE.format("main", "limit"): "1Gi", NOTE.format("main", "request"): "2Gi"}
    with pytest.raises(MemoryLimitError, match="asks for 2Gi, which is more than 1Gi"):
        found(ALL, annotations=notes)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("8GiB", {"0": 8, "1": 8}),
        ("50%", {"0": 40, "1": 40}),
        ("all=8GiB", {"0": 8, "1": 8}),
        ("0=8GiB", {"0": 8}),
        ("0=8GiB,1=50%", {"0": 8, "1": 40}),
        ("0-1=8GiB,1=4GiB", {"0": 8, "1": 4}),
        ("1=4GiB,0-1=8GiB", {"0": 8, "1": 4}),
        ("nvidia.com/gpu=1=8GiB", {"1": 8}),
        ("nvidia.com/gpu=all=8GiB", {"0": 8, "1": 8}),
        ("GPU-00000001=8GiB", {"1": 8}),
        ("1c:00.0=8GiB", {"1": 8}),
    ],
)
def test_limits_name_devices_as_the_device_variable_does(
    word: str, expected: dict[str, int]
) -> None:
    assert sizes(ALL, f"GPUHOOK_DEVICE_MEMORY={word}") == expected


@pytest.mark.protects(
    "limit-own-devices", "a memory limit for a device that the container doesn't have is refused"
)
@pytest.mark.parametrize(
    "name", ["1", "0-1", "7", "nvidia.com/gpu=1", "amd.com/gpu=0", "../0", "GPU-00000001"]
)
def test_limits_of_devices_the_container_lacks_are_refused(name: str) -> None:
    with pytest.raises(MemoryLimitError, match="isn't one of the container's devices"):
        found("NVIDIA_VISIBLE_DEVICES=0", f"GPUHOOK_DEVICE_MEMORY={name}=8GiB")


@pytest.mark.protects(
    "limit-required", "a device without a memory limit is refused where a limit is required"
)
def test_a_device_without_a_limit_is_refused_where_one_is_required() -> None:
    config = loads("[gpuhook.limits]\nrequired = true\n")
    assert sizes(ALL, "GPUHOOK_DEVICE_MEMORY=8GiB", config=config) == {"0": 8, "1": 8}
    for env in ((ALL,), (ALL, "GPUHOOK_DEVICE_MEMORY=0=8GiB")):
        with pytest.raises(MemoryLimitError, match="gives no device without a memory limit"):
            found(*env, config=config)
    assert found(config=config) is None, "it has no device"


NVIDIA, ITS_AMD = "/var/run/nvidia-container-devices", "/var/run/amd-container-devices"
BY_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts = true\n"


@pytest.mark.protects(
    "limit-mounts", "a memory limit set by a mount applies whatever the pod itself requests"
)
@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (memory_limit_place(NVIDIA, "GPU-00000001", "8GiB"), {"1": 8}),
        (memory_limit_place(NVIDIA, "0", "50%"), {"0": 40}),
        (memory_limit_place(NVIDIA, "", "8GiB"), {"0": 8, "1": 8}),
        (f"{NVIDIA}//limit/./8GiB/0", {"0": 8}),
        ("/var/../var/run/nvidia-container-devices/x/../limit/8GiB/0", {"0": 8}),
        (memory_limit_place(ITS_AMD, "0", "8GiB"), {}),
        ("/srv/limit/8GiB/0", {}),
    ],
)
def test_a_limit_mount_limits_the_containers_devices(place: str, expected: dict[str, int]) -> None:
    """The limit counts whatever the configuration is about mounts, as it allocates nothing more."""
    assert sizes(ALL, mounts=[place]) == expected
    assert sizes(ALL, mounts=[place], config=loads(BY_MOUNTS)) == expected


@pytest.mark.protects(
    "limit-mounts", "a memory limit set by a mount applies whatever the pod itself requests"
)
def test_a_mount_can_add_a_device_with_a_memory_limit() -> None:
    config = loads(BY_MOUNTS + "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")
    place = memory_limit_place(NVIDIA, "GPU-00000001", "8GiB", gives=True)
    assert sizes(mounts=[place], config=config) == {"1": 8}
    assert sizes(ALL, "GPUHOOK_DEVICE_MEMORY=80GiB", mounts=[place], config=config) == {"1": 8}
    assert sizes(ALL, "GPUHOOK_DEVICE_MEMORY=4GiB", mounts=[place], config=config) == {"1": 4}
    both = [
        place,
        memory_limit_place(NVIDIA, "0", "10%", gives=True),
        memory_limit_place(NVIDIA, "0", "4GiB"),
    ]
    assert sizes(mounts=both, config=config) == {"1": 8, "0": 4}
    assert sizes(mounts=[f"{NVIDIA}/0"], config=config) == {}


def test_the_smaller_limit_of_mount_and_configuration_applies() -> None:
    place = memory_limit_place(NVIDIA, "0", "50%", gives=True)
    for key, size, expected in (
        ("device-memory", "25%", 20),
        ("most-device-memory", "25%", 20),
        ("device-memory", "75%", 40),
        ("most-device-memory", "75%", 40),
    ):
        config = loads(f'{BY_MOUNTS}[gpuhook.limits]\n{key} = "{size}"\n')
        assert sizes(mounts=[place], config=config) == {"0": expected}, (key, size)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (f"{NVIDIA}/limit/8G/0", "isn't a memory size"),
        (f"{NVIDIA}/limit/0", "isn't a memory size"),
        (f"{NVIDIA}/limit", "isn't a memory size"),
        (f"{NVIDIA}/memory/8GiB,4GiB/0", "isn't a memory size"),
        (f"{NVIDIA}/limit/81GiB/0", "which has 80GiB"),
        (f"{NVIDIA}/limit/8GiB/7", "isn't one of the container's devices"),
        (f"{NVIDIA}/limit/8GiB/0,1", "isn't one of the container's devices"),
        (f"{NVIDIA}/limit/8GiB/imex/0", "isn't one of the container's devices"),
    ],
)
def test_a_malformed_limit_mount_is_refused(place: str, why: str) -> None:
    with pytest.raises(MemoryLimitError, match=why):
        found(ALL, mounts=[place])


def test_a_limit_mount_for_all_covers_devices_of_every_source() -> None:
    config = Config()
    inventory = nvidia()
    vendor = contract.load(registry.all_vendors(config)["nvidia"])
    grants = [
        contract.Grant(vendor, Request("nvidia"), inventory, (device,))
        for device in inventory.devices
    ]
    spec = {
        "mounts": [{"source": "/dev/null", "destination": memory_limit_place(NVIDIA, "", "8GiB")}]
    }
    said = words.read(SpecReader(spec, config), [vendor.names])
    limits = limiting.of_grants(grants, said, config)
    assert limits is not None
    assert [(op.device, op.bytes) for op in limits.operations] == [("0", 8 * GIB), ("1", 8 * GIB)]


@pytest.mark.parametrize(
    ("inventory", "why"),
    [
        (nvidia(version="610.1"), "since release 615, and this is 610.1"),
        (nvidia(gpu(0, 3, (mig(0, 1, 12, 13),))), "GPUs in MIG mode"),
        (nvidia().but(platform="wsl"), "The platform wsl"),
        (machine(gpu(0, 3)).but(version="615.1"), "how much memory GPU 0 has"),
    ],
)
def test_limits_unsupported_by_the_nvidia_driver_are_refused(
    inventory: NvidiaInventory, why: str
) -> None:
    with pytest.raises(MemoryLimitError, match=why):
        found(ALL, "GPUHOOK_DEVICE_MEMORY=8GiB", nvidia=inventory)
    config = loads('[gpuhook.limits]\nmost-device-memory = "8GiB"\n')
    with pytest.raises(MemoryLimitError, match=why):
        found(ALL, nvidia=inventory, config=config)


# What an engine gives by itself -----------------------------------------------------------------

MOST = '[gpuhook.limits]\nmost-device-memory = "8GiB"\n'
REQUIRED = "[gpuhook.limits]\nrequired = true\n"
EVERY = {"allow": True, "access": "rwm"}
ADMIN = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}


def rule(major: int | None, minor: int | None = None, access: str = "rw") -> dict[str, Any]:
    return {"allow": True, "type": "c", "major": major, "minor": minor, "access": access}


def given(
    text: str, *rules: Any, nodes: Any = (), process: Any = None, **inventories: Any
) -> dict[str, int]:
    """Return the limits in GiB, by device, of a container that gets its devices from the engine."""
    config = loads(text)
    vendors = registry.all_vendors(config)
    linux = {"devices": [*nodes], "resources": {"devices": [{"allow": False}, *rules]}}
    spec = Spec("config.json", json.dumps({"process": process or {}, "linux": linux}))
    inventories = inventories or {"nvidia": nvidia()}
    limits = resolve.find_memory_limits(spec, config, vendors, None, inventories)
    return {op.device: op.bytes // GIB for op in limits.operations} if limits else {}


def node(major: int, minor: int) -> dict[str, Any]:
    return {"path": "/dev/one", "type": "c", "major": major, "minor": minor}


@pytest.mark.protects(
    "limit-mounts", "a memory limit set by a mount applies whatever the pod itself requests"
)
@pytest.mark.protects(
    "opened-anyhow",
    "a device that may be opened only for reading or only for writing counts as allocated",
    instead="return allowed(rules, devices)",
)
@pytest.mark.protects(
    "limit-by-rule",
    "a device allowed only by a cgroup rule also gets the memory limit",
    instead="given = spec_devices.devices_of(has, inventory)",
)
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ((rule(195, 3),), {"0": 8}),
        ((rule(195, 3, "r"), rule(195, 3, "w")), {"0": 8}),
        ((rule(195, 3, "rm"),), {"0": 8}),
        ((rule(195, 3, "w"),), {"0": 8}),
        ((rule(195, -1, "wm"),), {"0": 8, "1": 8}),
        ((EVERY, {**rule(195, 3, "w"), "allow": False}), {"0": 8, "1": 8}),
        ((rule(195, 3, "m"),), {}),
        ((rule(195),), {"0": 8, "1": 8}),
        ((rule(195, -1, "rwm"),), {"0": 8, "1": 8}),
        ((rule(None),), {"0": 8, "1": 8}),
        ((EVERY,), {"0": 8, "1": 8}),
        ((EVERY, {**rule(195, 3), "allow": False}), {"0": 8, "1": 8}),  # the render node remains
        ((EVERY, *({**each, "allow": False} for each in (rule(195, 3), rule(226)))), {"1": 8}),
        ((rule(None, None, "m"), rule(1, 3), rule(10, 229), rule(5)), {}),
    ],
)
def test_devices_allowed_by_a_cgroup_rule_are_limited_too(
    rules: tuple[Any, ...], expected: dict[str, int]
) -> None:
    """A container can make the node itself, because engines leave it CAP_MKNOD."""
    assert given(MOST, *rules) == expected
    if expected:
        with pytest.raises(MemoryLimitError, match="gives no device without a memory limit"):
            given(REQUIRED, *rules)


@pytest.mark.protects(
    "limit-unprivileged",
    "a cgroup rule that allows all devices doesn't make a container privileged",
    instead="if any(spec_devices.allows_all(rule) for rule in rules):",
)
def test_a_rule_for_all_devices_does_not_count_as_privileged() -> None:
    nodes = [node(195, 3)]
    assert given(MOST, EVERY, nodes=nodes) == {"0": 8, "1": 8}
    assert given(MOST, EVERY, nodes=nodes, process=ADMIN) == {}
    assert given(MOST, nodes=nodes, process=ADMIN) == {"0": 8}


class Mounted:
    """A container being created, with mounts as (path, flags, kind) in the order of its table."""

    def __init__(self, *rows: tuple[str, str, str]) -> None:
        lines = [
            f"{at} 1 0:{at} / /root{path} {flags},relatime - {kind} none rw\n"
            for at, (path, flags, kind) in enumerate(rows, 20)
        ]
        table = proc.Mounts("".join(lines).encode())
        self.found = [(proc.unescaped(each.point).removeprefix("/root"), each) for each in table]

    def mounts(self) -> Any:
        return self.found


def cgroups(*options: str, **more: Any) -> dict[str, Any]:
    usual = {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"}
    return {**usual, "options": [*options], **more}


PLACE = "/sys/fs/cgroup"
USUAL = (PLACE, "ro,nosuid", "cgroup2")
LATER = (PLACE, "rw,nosuid", "cgroup2")  # crun makes it read-only after the hooks


@pytest.mark.protects(
    "limit-writable",
    "a device with a memory limit is refused to a container that can write to cgroups",
    instead="pass",
)
@pytest.mark.protects(
    "limit-childless",
    "a container with an administrator's memory limit can't create child cgroups",
    instead="pass",
)
@pytest.mark.protects(
    "limit-imposed",
    "a device limited by a mount is refused to a container that can write to cgroups",
    instead="imposed = config.limits_memory",
)
@pytest.mark.parametrize(
    ("mounted", "said", "where"),
    [
        ([USUAL], [], None),
        ([("/", "rw", "overlay"), USUAL, ("/tmp", "rw", "tmpfs")], [], None),
        ([("/sys/fs/cgroup/systemd", "rw", "cgroup")], [], None),  # v1 leads no process out of v2
        ([LATER], [], PLACE),
        ([LATER], [cgroups("nosuid", "ro")], None),
        ([LATER], [cgroups("ro", type="cgroup2")], None),
        ([LATER], [cgroups("ro", "rw")], PLACE),
        ([LATER], [cgroups("rw", "ro")], None),
        ([LATER], [cgroups("ro", "rrw")], PLACE),
        ([LATER], [cgroups("rro")], PLACE),  # rro is set at once, so it would show already
        ([LATER], [cgroups(options="ro")], PLACE),
        ([LATER], [cgroups(options=None)], PLACE),
        ([LATER], [cgroups("ro", destination=None)], PLACE),
        ([LATER], [cgroups("ro", type=["cgroup"])], PLACE),
        ([LATER], [cgroups(options=[["ro"], {}])], PLACE),
        # By now, a volume's source may lead elsewhere, as may links in its destination.
        ([LATER], [cgroups("ro", "rbind")], PLACE),
        ([LATER], [cgroups("ro", type="bind")], PLACE),
        ([("/x", "rw", "cgroup2"), USUAL], [cgroups("ro")], "/x"),
        ([("/x", "rw", "cgroup2"), USUAL], [cgroups("ro", destination="/a/../x")], "/x"),
        ([LATER, LATER], [cgroups("ro")], PLACE),
        # Users who can rename folders of a volume can uncover a covered mount.
        ([LATER, USUAL], [], PLACE),
        ([USUAL, LATER], [], PLACE),
        ([LATER, (PLACE, "ro", "tmpfs")], [], PLACE),
        # The option ro makes only the top mount read-only.
        ([USUAL, ("/a/fs/cgroup", "rw", "cgroup2")], [cgroups("ro")], "/a/fs/cgroup"),
        ([("/host", "ro", "sysfs"), ("/host/fs/cgroup", "ro", "cgroup2")], [], None),
        ([("/a\\040b", "rw", "cgroup2")], [], "/a b"),
    ],
)
def test_writable_cgroups_are_refused_with_an_administrators_limit(
    tree: "Tree", mounted: list[Any], said: list[Any], where: str | None
) -> None:
    """Not every driver counts a program that runs in a cgroup of its own making."""
    env = ("AMD_VISIBLE_DEVICES=0", "GPUHOOK_DEVICE_MEMORY=8GiB")
    place = memory_limit_place("/var/run/amd-container-devices", "", "8GiB")
    of_cluster = {"source": "/dev/null", "destination": place}

    def limits(text: str, privileges: Any, *more: Any) -> MemoryLimits:
        config, inventories = loads(text), {"amd": AMD}
        vendors = registry.all_vendors(config)
        data = {"process": {"env": env, **privileges}, "mounts": [*said, *more]}
        spec = Spec("config.json", json.dumps(data))
        resolved = resolve.resolve(spec.data, config, vendors, inventories=inventories)
        made = resolve.find_memory_limits(spec, config, vendors, resolved, inventories)
        assert made is not None
        return made

    usual = '[gpuhook.limits]\ndevice-memory = "8GiB"\n'
    container: Any = Mounted(*mounted)
    by_administrator: list[tuple[str, list[dict[str, str]]]] = [
        (each, []) for each in (MOST, REQUIRED, usual)
    ]
    process = os.open("/proc/self", os.O_PATH)
    for text, more in (*by_administrator, ("", [of_cluster])):
        tree.written.clear()
        if where is not None:
            with pytest.raises(MemoryLimitError, match=f"cgroups, which are mounted at '{where}'"):
                limits(text, {}, *more).set(process, container=container)
            assert not tree.written
        else:
            limits(text, {}, *more).set(process, container=container)
            assert ("engine/container/cgroup.max.descendants", "0") in tree.written
        limits(text, ADMIN, *more).set(process, container=container)  # ADMIN may do more than that
    tree.written.clear()
    limits("", {}).set(process, container=container)  # the container limits itself
    assert "cgroup.max.descendants" not in str(tree.written)
    os.close(process)


@pytest.mark.protects(
    "limit-promised",
    "a promise in config.json to mount cgroups read-only is trusted only from crun",
    instead="if not writable:",
)
@pytest.mark.parametrize("comm", [b"runc:[2:INIT]\n", b"crun\n"])
def test_promised_read_only_cgroups_are_believed_of_crun_only(
    tree: "Tree", monkeypatch: pytest.MonkeyPatch, comm: bytes
) -> None:
    """By then, runc has already made read-only whatever it makes read-only."""
    real = proc.read
    monkeypatch.setattr(proc, "read", lambda path, *at: comm if path == "comm" else real(path, *at))
    limits = amds()
    limits.promised = {PLACE}
    container: Any = Mounted(LATER)
    if comm.startswith(b"runc"):
        with pytest.raises(MemoryLimitError, match="may write to cgroups"):
            limits.set(-1, container=container)
        assert not tree.written
    else:
        limits.set(-1, container=container)


def test_a_cgroup_whose_descendants_cannot_be_restricted_is_refused(tree: "Tree") -> None:
    tree.fails["engine/container/cgroup.max.descendants"] = errno.EROFS
    limits = amds()
    limits.promised = set()
    container: Any = Mounted(USUAL)
    with pytest.raises(MemoryLimitError, match=r"max\.descendants can't be written: Read-only"):
        limits.set(-1, container=container)
    assert len(tree.written) == 1


class Broken:
    """A replacement of the inventory in which vendors' drivers fail or are absent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: tuple[str, ...] = ("nvidia",)
        monkeypatch.setattr(cache, "get_inventory", self.get)

    def get(self, config: Config, vendor: Any) -> Any:
        failing = vendor.names.NAME in self.failing
        raise (DriverError if failing else NoDriverError)("NVML hangs", "Look at dmesg")


@pytest.mark.protects(
    "limit-failing-driver",
    "a device that may belong to a failing driver isn't allocated without its memory limit",
)
@pytest.mark.parametrize("text", [MOST, REQUIRED])
@pytest.mark.parametrize(
    ("rules", "nodes"),
    [
        ((), [node(195, 0)]),
        ((), [node(10, 229), node(510, 0)]),
        ((rule(195),), []),
        ((EVERY,), []),
    ],
)
def test_a_device_possibly_of_a_failing_driver_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, rules: tuple[Any, ...], nodes: list[Any]
) -> None:
    broken = Broken(monkeypatch)
    others = {"amd": drm("amd", "0000:03:00.0")}
    with pytest.raises(MemoryLimitError, match=r"must be limited: NVML hangs.*\n?.*Look at dmesg"):
        given(text, *rules, nodes=nodes, **others)
    broken.failing = ()
    assert given(text, *rules, nodes=nodes, **others) == {}, "there is no driver"


def test_a_failing_driver_stops_no_container_without_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Broken(monkeypatch)
    rules = (rule(None, None, "m"), rule(1, 3), rule(10, 229), rule(136))
    assert given(MOST, *rules, nodes=[node(10, 229), node(10, 200)], amd=AMD) == {}


# dmem -------------------------------------------------------------------------------------------


class Tree:
    """A folder that stands for a tree of cgroups, and the kernel's reactions to writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "engine/container"
        self.written: list[tuple[str, str]] = []
        self.fails: dict[str, int] = {}
        self.takes = True
        self.folder.mkdir(parents=True)
        (root / "dmem.capacity").write_text(CAPACITY)
        (root / "cgroup.subtree_control").write_text("cpu dmem\n")
        (root / "engine/cgroup.subtree_control").write_text("cpu\n")
        for folder in (root, root / "engine", self.folder):
            (folder / "cgroup.procs").touch()
        (self.folder / "cgroup.max.descendants").write_text("max\n")
        (self.folder / "dmem.current").write_text(f"{VRAM} {GIB}\n")
        (self.folder / "dmem.max").write_text(
            "".join(f"{line.split()[0]} max\n" for line in CAPACITY.splitlines())
        )

    def write(self, fd: int, data: bytes | memoryview) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}").removeprefix(f"{self.root}/")
        text = bytes(data).decode()
        self.written.append((path, text))
        if path in self.fails:
            raise OSError(self.fails[path], os.strerror(self.fails[path]))
        if path.endswith("dmem.max") and self.takes:
            region, _ = text.split()
            file = self.root / path
            lines = file.read_text().splitlines()
            file.write_text(
                "".join(f"{text if each.split()[0] == region else each}\n" for each in lines)
            )
        return len(data)

    def limits(self) -> dict[str, int]:
        return dmem.read(str(self.folder), "dmem.max")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path / "cgroup")
    monkeypatch.setattr(dmem, "TREE", str(made.root))
    monkeypatch.setattr(kernel, "write", made.write)
    monkeypatch.setattr(access, "unified", lambda *_: (str(made.root), str(made.folder)))
    monkeypatch.setattr(access, "in_first_user_namespace", lambda *_: True)
    return made


def test_each_limit_is_one_write_after_enabling_the_controller(tree: Tree) -> None:
    env = ("AMD_VISIBLE_DEVICES=0", "INTEL_VISIBLE_DEVICES=0", "GPUHOOK_DEVICE_MEMORY=50%")
    limits = found(*env, amd=AMD, intel_gpu=INTEL)
    assert limits is not None
    limits.begin()
    limits.set(-1)
    assert tree.written == [
        ("engine/cgroup.subtree_control", "+dmem"),
        ("engine/container/dmem.max", f"{VRAM} {8 * GIB}"),
        ("engine/cgroup.subtree_control", "+dmem"),
        ("engine/container/dmem.max", f"{TILES[0]} {4 * GIB}"),
        ("engine/container/dmem.max", f"{TILES[1]} {12 * GIB}"),
    ]
    assert tree.limits() == {VRAM: 8 * GIB, TILES[0]: 4 * GIB, TILES[1]: 12 * GIB}


def amds(size: str = "8GiB", inventory: model.Inventory = AMD) -> MemoryLimits:
    limits = found("AMD_VISIBLE_DEVICES=all", f"GPUHOOK_DEVICE_MEMORY={size}", amd=inventory)
    assert limits is not None
    return limits


def test_a_limit_is_reported_as_a_step_with_its_reason(tree: Tree) -> None:
    assert tree
    [step] = amds().operations
    assert step.describe() == f"limit the memory of AMD GPU 0 to 8GiB (dmem.max of {VRAM})"
    assert step.to_json() == {
        "kind": "limit-memory",
        "vendor": "amd",
        "device": "0",
        "id": "0000:03:00.0",
        "bytes": 8 * GIB,
        "means": f"dmem.max of {VRAM}",
        "reason": "GPUHOOK_DEVICE_MEMORY says 8GiB",
    }


def test_memory_use_is_read_from_the_cgroup(tree: Tree) -> None:
    limits, places = amds(), (str(tree.root), [str(tree.folder)])
    assert limits.used(*places) == {str(tree.folder): {"0000:03:00.0": (GIB, None)}}
    limits.set(-1)
    assert limits.used(*places) == {str(tree.folder): {"0000:03:00.0": (GIB, 8 * GIB)}}


def test_a_limit_is_refused_on_a_kernel_without_dmem(tree: Tree) -> None:
    (tree.root / "dmem.capacity").unlink()
    with pytest.raises(MemoryLimitError, match="This kernel can't limit"):
        amds()


def test_a_limit_is_refused_if_the_driver_registers_no_memory(tree: Tree) -> None:
    assert tree
    with pytest.raises(MemoryLimitError, match="lists no memory of AMD GPU 0"):
        amds(inventory=drm("amd", "0000:03:00.1"))


@pytest.mark.parametrize(
    "inventory",
    [drm("amd", "0000:03:00.0", parent="card"), drm("amd", "0000:03:00.0", "0000:03:00.0")],
)
def test_a_limit_of_a_part_of_a_card_is_refused(tree: Tree, inventory: model.Inventory) -> None:
    assert tree
    with pytest.raises(MemoryLimitError, match="a part of a card"):
        amds(inventory=inventory)


@pytest.mark.parametrize("path", ["engine/cgroup.subtree_control", "engine/container/dmem.max"])
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "Mount cgroup v2 writable"),
        (errno.EACCES, "as root"),
        (errno.EBUSY, "Keep processes out"),
        (errno.EINVAL, "has the dmem controller"),
    ],
)
def test_a_failed_cgroup_write_is_an_error_with_a_remedy(
    tree: Tree, path: str, number: int, remedy: str
) -> None:
    tree.fails[path] = number
    with pytest.raises(MemoryLimitError, match=remedy):
        amds().set(-1)


@pytest.mark.protects(
    "limit-read-back",
    "a memory limit that the kernel doesn't accept is an error",
    instead="if False:",
)
def test_a_limit_the_kernel_does_not_accept_is_an_error(tree: Tree) -> None:
    tree.takes = False
    with pytest.raises(MemoryLimitError, match="hasn't accepted the limit"):
        amds().set(-1)


def test_a_container_that_changed_its_cgroup_meanwhile_is_refused(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter([(str(tree.root), str(tree.folder)), (str(tree.root), str(tree.root))])
    monkeypatch.setattr(access, "unified", lambda *_: next(places))
    with pytest.raises(MemoryLimitError, match="changed its cgroup"):
        amds().set(-1)


def test_a_limit_is_refused_in_a_cgroup_with_other_processes(tree: Tree) -> None:
    procs = tree.folder / "cgroup.procs"
    process = os.open("/proc/self", os.O_PATH)
    words = ["unshare", "--mount", "sh", "-c", "echo in && exec sleep 999"]
    try:
        with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"in\n"
            for theirs in (other.pid, 0):
                procs.write_text(f"{os.getpid()}\n{theirs}\n")
                with pytest.raises(MemoryLimitError, match="has other processes"):
                    amds().set(process)
            assert tree.written == []
            # Programs of a running container may be in their own mount namespaces.
            amds().set(process, {2: "/engine/container"})
            other.kill()
            other.wait()
        procs.write_text(f"{os.getpid()}\n{other.pid}\n")
        amds().set(process)
    finally:
        os.close(process)


@pytest.mark.parametrize("above", ["engine", "."])
@pytest.mark.parametrize("how", ["owner", "group", "everybody"])
def test_a_limit_is_refused_below_a_cgroup_writable_by_a_user(
    tree: Tree, above: str, how: str
) -> None:
    """That user may move processes out of it: cgroups(7), "Delegation containment"."""
    procs = tree.root / above / "cgroup.procs"
    if how == "owner":
        os.chown(procs, 1000, -1)
    else:
        procs.chmod(0o664 if how == "group" else 0o646)
    process = os.open("/proc/self", os.O_PATH)
    try:
        with pytest.raises(MemoryLimitError, match="other users may write to"):
            amds().set(process)
        assert tree.written == []
        os.chown(procs, 0, -1)
        procs.chmod(0o644)
        amds().set(process)
    finally:
        os.close(process)


def test_a_memory_limit_of_a_rootless_container_is_refused(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "in_first_user_namespace", lambda *_: False)
    with pytest.raises(MemoryLimitError, match="rootless"):
        amds().set(-1)
    assert tree.written == []


@pytest.mark.protects(
    "own-cgroup",
    "a memory limit is set only in the container's own cgroup",
    instead='if path != "/":',
)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (b"8:devices:/docker/x\n", b"8:devices:/\n"),
        (b"0::/\n", b"0::/\n"),
        (b"0::/a\n", b"0::/a\n"),
        (b"0::/../a\n", b"0::/\n"),
        (b"", b""),
    ],
)
def test_a_limit_is_refused_for_a_container_without_its_own_cgroup(
    tmp_path: Path, theirs: bytes, ours: bytes
) -> None:
    proc = tmp_path / "proc"
    for name, text in (("self", ours), ("7", theirs)):
        (proc / name).mkdir(parents=True)
        (proc / name / "cgroup").write_bytes(text)
    mounts = b"30 20 0:26 / %s rw - cgroup2 cgroup2 rw\n" % os.fsencode(tmp_path)
    (proc / "self/mountinfo").write_bytes(mounts)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/cgroup.procs").touch()
    process = os.open(proc / "7", os.O_PATH)
    try:
        with pytest.raises(GpuhookError):
            access.unified(process, str(proc))
        (proc / "7/cgroup").write_bytes(b"0::/a\n")
        (proc / "self/cgroup").write_bytes(b"0::/\n")
        assert access.unified(process, str(proc)) == (str(tmp_path), f"{tmp_path}/a")
    finally:
        os.close(process)


def test_a_limit_is_refused_for_a_vendor_without_memory_limits() -> None:
    devices = (Device("0", "0", {"index": ("0",), "uuid": ("x",)}),)
    inventory = model.Inventory("intel_npu", "/", "1", devices, ())
    with pytest.raises(MemoryLimitError, match="can't be limited"):
        found(
            "GPUHOOK_DEVICE_MEMORY=8GiB",
            f"{next(iter(registry.BUILT_IN['intel_npu'].VARIABLES))}=0",
            intel_npu=inventory,
        )


def test_recorded_limits_are_restored_unless_the_device_is_missing(tree: Tree) -> None:
    limits = amds()
    entries = limits.to_json()
    assert entries == [{"vendor": "amd", "device": "0", "id": "0000:03:00.0", "bytes": 8 * GIB}]
    known, config = registry.BUILT_IN, Config()
    again = limiting.recorded(entries, [AMD], known, config)
    assert again is not None
    again.set(-1)
    assert tree.limits() == {VRAM: 8 * GIB}
    with pytest.raises(MemoryLimitError, match="no longer has"):
        limiting.recorded(entries, [drm("amd", "0000:04:00.0")], known, config)
    assert limiting.recorded([], [AMD], known, config) is None
