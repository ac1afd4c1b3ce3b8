"""Resources of hosts for a cluster: all vendors' devices, unusable devices, MIG, and sharing."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import machines
import node_files
import paper
import pytest
from machines import gpu, mig
from plugin_settings import settings_of

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.device_plugin.allocate import allocate
from gpuhook.cluster.device_plugin.resources import resources
from gpuhook.cluster.device_plugin.settings import Settings, Sharing
from gpuhook.cluster.device_plugin.state import PluginState, Resource
from gpuhook.core import contract
from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.model import Gpu, Mig
from gpuhook.vendors.nvidia.model import NvidiaInventory as Nvidias
from vendors import known

GPU = "nvidia.com/gpu"
UUIDS = [f"GPU-{n:08d}-0000-0000-0000-000000000000" for n in range(4)]
Answer = tuple[PluginState, list[str]]


def machine(root: Path, *gpus: Gpu, lost: tuple[int, ...] = ()) -> Nvidias:
    made = machines.machine(*gpus)
    nodes = [
        *made.nodes,
        *(DeviceNode(path, 508, 9) for one in gpus for m in one.mig for path in m.paths),
    ]
    nodes = list({node.path: node for node in nodes}.values())
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    version = made.driver_version
    return Nvidias(str(root), version, "13.0", gpus, tuple(nodes), made.files, lost)


def offered(*inventories: Inventory, **facts: Any) -> Answer:
    health, links = facts.pop("health", None), facts.pop("links", None)
    config = facts.pop("config", None) or Config()
    found = [(contract.load(registry.BUILT_IN[each.vendor]), each) for each in inventories]
    return resources(found, settings_of(**facts), config, health, links)


def only(answer: Answer) -> Resource:
    [one] = answer[0].resources
    return one


def ids(state: PluginState) -> Mapping[str, list[str]]:
    return {each.name: [unit.id for unit in each.units] for each in state.resources}


def reasons(resource: Resource) -> list[str]:
    return [unit.reason for unit in resource.units]


def part(index: int, gi: int, profile: str) -> Mig:
    return Mig(
        index, f"MIG-{gi}-{index}", gi, 0, f"NVIDIA H200 MIG {profile}", gi * 10, gi * 10 + 1
    )


def mode(one: Gpu) -> Gpu:
    """Return the GPU with MIG mode enabled, and its MIG devices."""
    facts = vars(one)
    return Gpu(**{**facts, "mig_enabled": True})


# One GPU after the other ------------------------------------------------------------------------


def test_gpus_are_offered_by_uuid(tmp_path: Path) -> None:
    answer = offered(machine(tmp_path, gpu(0, 1), gpu(1, 0)))
    one = only(answer)
    assert answer[1] == []
    assert (one.name, one.vendor, one.replicas, one.single) == (GPU, "nvidia", 1, False)
    assert (one.variable, one.mounts) == (
        "NVIDIA_VISIBLE_DEVICES",
        "/var/run/nvidia-container-devices",
    )
    assert one.driver_folder == "/usr/local/nvidia"
    first, second = one.units
    assert first.id == first.selector == first.whole == UUIDS[0]
    assert first.cdi == f"nvidia.com/gpu={UUIDS[0]}"
    assert (first.reason, first.numa) == ("", None)
    inside = [node.container for node in first.nodes]
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/dri/card1"} <= {*inside}
    assert "/dev/nvidia0" not in inside
    assert "/dev/nvidia-fs0" not in inside
    assert first.nodes[0].host == f"{tmp_path}/dev/nvidiactl"
    assert second.id == UUIDS[1]
    assert PluginState.from_line(answer[0].to_line()) == answer[0]


@pytest.mark.protects(
    "plugin-shared", "a device plugin allocates a GPU shared by MPS only if gpu-py injects it"
)
@pytest.mark.parametrize(
    ("strategies", "given"),
    [
        (("envvar",), 2), (("volume-mounts",), 2), (("envvar", "volume-mounts"), 2),
        (("mounts",), 1), (("cdi-cri",), 1), (("cdi-annotations",), 1), (("envvar", "mounts"), 1),
    ],
)  # fmt: skip
def test_a_gpu_shared_by_mps_is_unhealthy_unless_gpu_py_gives_it(
    tmp_path: Path, strategies: tuple[str, ...], given: int
) -> None:
    """Only gpu-py makes a container an MPS client; device nodes or CDI specs don't."""
    config = Config()
    config.mps_devices = "0"
    found = machine(tmp_path, gpu(0, 1), gpu(1, 0))
    one = only(offered(found, config=config, device_list_strategy=strategies))
    healthy = [unit.id for unit in one.units if not unit.reason]
    assert healthy == UUIDS[2 - given : 2]
    assert all("is shared by MPS" in each for each in filter(None, reasons(one)))


def test_gpus_are_requested_by_index_if_configured(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 1), gpu(1, 0))
    near = {UUIDS[0]: {UUIDS[1]: 18, "GPU-unknown": 3}, "GPU-unknown": {UUIDS[0]: 2}}
    one = only(offered(found, device_id_strategy="index", links=near))
    assert [(u.id, u.selector, u.cdi, u.whole) for u in one.units] == [
        (UUIDS[0], "0", "nvidia.com/gpu=0", UUIDS[0]),
        (UUIDS[1], "1", "nvidia.com/gpu=1", UUIDS[1]),
    ]
    assert one.links == {UUIDS[0]: {UUIDS[1]: 18}}


def test_the_numa_node_of_each_device_is_reported(tmp_path: Path) -> None:
    for bus, text in (("1b", "1"), ("1c", "-1")):
        folder = tmp_path / f"sys/bus/pci/devices/0000:{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{text}\n")
    found = machine(tmp_path, gpu(0, 0, (part(0, 1, "1g.18gb"),)), gpu(1, 1), gpu(2, 2))
    state, _ = offered(found, mig_strategy="mixed")
    assert {unit.id: unit.numa for each in state.resources for unit in each.units} == {
        "MIG-1-0": 1,
        UUIDS[1]: None,
        UUIDS[2]: None,
    }


def test_the_numa_node_is_read_from_the_host_if_the_root_has_no_sys(tmp_path: Path) -> None:
    """The root of a driver container may have no /sys."""
    found = machine(tmp_path, gpu(0, 0))
    shutil.rmtree(tmp_path / "sys")
    texts = {"/sys/bus/pci/devices/0000:1b:00.0/numa_node": "1"}

    def text(root: Rootfs, path: str) -> str:
        return texts[path] if root.path == "/" else ""

    with mock.patch("gpuhook.vendors.sysfs_devices.text", text):
        assert only(offered(found)).units[0].numa == 1


def test_node_paths_in_answers_are_the_hosts(tmp_path: Path) -> None:
    found = machine(tmp_path / "host", gpu(0, 0))
    seen = str(tmp_path / "host")

    def hosts(**facts: str) -> str:
        return only(offered(found, **facts)).units[0].nodes[0].host

    assert hosts() == f"{seen}/dev/nvidiactl"
    assert hosts(driver_root="/", driver_root_ctr_path=seen) == "/dev/nvidiactl"
    below = {"driver_root": "/srv", "driver_root_ctr_path": str(tmp_path)}
    assert hosts(**below) == "/srv/host/dev/nvidiactl"
    assert hosts(**below, dev_root="/") == "/dev/nvidiactl"
    assert hosts(driver_root="/srv") == f"{seen}/dev/nvidiactl", "it isn't below that path"


def test_enabled_features_and_imex_channels_go_with_every_gpu(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0))
    one = only(offered(found, gds_enabled=True, mofed_enabled=True, imex_channel_ids=(7,)))
    assert one.environment == {
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
        "NVIDIA_IMEX_CHANNELS": "7",
    }
    assert one.cdi == ("nvidia.com/imex-channel=7", "nvidia.com/gds=all", "nvidia.com/mofed=all")
    paths = [node.container for node in one.units[0].nodes]
    assert {"/dev/nvidia-fs0", "/dev/nvidia-caps-imex-channels/channel7"} <= {*paths}


def test_features_that_variables_cannot_request_give_a_warning(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0))
    config = Config()
    config.accept_envvar_unprivileged = False
    for strategy, warned in (("volume-mounts", True), ("envvar", True), ("cdi-cri", False)):
        _, warnings = offered(
            found, config=config, gds_enabled=True, device_list_strategy=(strategy,)
        )
        assert any("don't get gds" in each for each in warnings) is warned


def test_channels_requested_by_mounts_are_not_in_a_variable(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0))
    mounts = ("volume-mounts", "cdi-cri")
    one = only(offered(found, imex_channel_ids=(7,), device_list_strategy=mounts))
    assert (one.environment, one.cdi) == ({}, ("nvidia.com/imex-channel=7",))
    assert one.places == ("imex/7",)
    both = only(offered(found, imex_channel_ids=(7,), device_list_strategy=(*mounts, "envvar")))
    assert both.environment == {"NVIDIA_IMEX_CHANNELS": "7"}


def test_a_missing_imex_channel_is_left_out_or_makes_gpus_unhealthy(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0))
    state, warnings = offered(found, imex_channel_ids=(0,))
    assert ["Containers get no IMEX channel" in each for each in warnings] == [True]
    assert (state.resources[0].environment, reasons(state.resources[0])) == ({}, [""])
    by_mounts = only(offered(found, imex_channel_ids=(0,), device_list_strategy=("volume-mounts",)))
    assert by_mounts.places == (), "the container would be refused"
    needed = only(offered(found, imex_channel_ids=(0,), imex_required=True))
    assert reasons(needed) == ["This host has no IMEX channel 0"]


# The bad ones -------------------------------------------------------------------------------------


def test_a_missing_node_makes_only_its_own_gpu_unhealthy(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 3), gpu(1, 1))
    found.nodes = tuple(node for node in found.nodes if node.path != "/dev/nvidia3")
    bad, good = only(offered(found)).units
    assert bad.reason == "GPU 0: there is no device node /dev/nvidia3"
    assert good.reason == ""


def test_a_missing_gpu_node_makes_its_mig_devices_unhealthy(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 3, (part(0, 1, "1g.18gb"),)), gpu(1, 1))
    found.nodes = tuple(node for node in found.nodes if node.path != "/dev/nvidia3")
    state, _ = offered(found, mig_strategy="mixed")
    assert [reasons(each) for each in state.resources] == [
        [""],
        ["GPU 0:0: there is no device node /dev/nvidia3"],
    ]


def test_an_unhealthy_gpu_makes_its_mig_devices_unhealthy(tmp_path: Path) -> None:
    parts = (part(0, 1, "1g.18gb"), part(1, 2, "1g.18gb"))
    found = machine(tmp_path, gpu(0, 0, parts), gpu(1, 1))
    sick = {UUIDS[0]: "Xid 79", UUIDS[1]: "Xid 48"}
    state, _ = offered(found, mig_strategy="mixed", health=sick)
    assert {each.name: reasons(each) for each in state.resources} == {
        GPU: ["Xid 48"],
        "nvidia.com/mig-1g.18gb": ["Xid 79", "Xid 79"],
    }
    state, _ = offered(found, mig_strategy="mixed", health={"MIG-2-1": "Xid 43"})
    assert reasons(state.resources[1]) == ["", "Xid 43"]


def test_a_lost_gpu_has_its_uuid_only_if_it_is_unambiguous(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0), gpu(2, 2), lost=(1,))
    assert [unit.id for unit in only(offered(found)).units] == [UUIDS[0], UUIDS[2], "lost-1"]
    for number, uuid in reversed([*enumerate(UUIDS)]):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t H200\nGPU UUID: \t {uuid}\n")
    one = only(offered(found))
    assert one.units[2].id == "lost-1", "of two GPUs that NVML doesn't know, it could be either"
    shutil.rmtree(tmp_path / "proc/driver/nvidia/gpus/0000:03:00.0")
    one = only(offered(found))
    assert [unit.id for unit in one.units] == [UUIDS[0], UUIDS[2], UUIDS[1]]
    assert reasons(one) == ["", "", "GPU 1: it has fallen off the bus"]


def test_a_lost_gpu_is_not_offered_as_a_mig_device(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0, (part(0, 1, "1g.18gb"),)), lost=(1,))
    assert ids(offered(found, mig_strategy="mixed")[0]) == {
        "nvidia.com/mig-1g.18gb": ["MIG-1-0"],
        GPU: ["lost-1"],
    }


def test_a_failing_vendor_does_not_affect_the_others(tmp_path: Path) -> None:
    found = machine(tmp_path / "gone", gpu(0, 0))
    shutil.rmtree(tmp_path / "gone")
    others = paper.machine("amd", tmp_path / "amd", 2)
    state, warnings = offered(found, others)
    assert [each.name for each in state.resources] == ["amd.com/gpu"]
    assert ["can't be read" in each for each in warnings] == [True]


def test_a_vendor_without_a_variable_is_offered_only_by_mounts(tmp_path: Path) -> None:
    found = paper.machine("amd", tmp_path, 1)
    with mock.patch.object(registry.BUILT_IN["amd"], "VARIABLES", {}):
        state, warnings = offered(found)
        assert state.resources == ()
        assert ["no variable" in each for each in warnings] == [True]
        one = only(offered(found, device_list_strategy=("mounts",)))
    assert one.variable == ""
    answer = allocate(one, [one.units[0].id], Settings(device_list_strategy=("mounts",)))
    assert answer.envs == {}
    assert answer.devices


# MIG ----------------------------------------------------------------------------------------------


def test_each_mig_strategy_gives_its_resources(tmp_path: Path) -> None:
    small, large = part(0, 1, "1g.18gb+me"), part(1, 2, "3g.71gb")
    partial = part(2, 3, "1c.3g.71gb")
    found = machine(tmp_path, gpu(0, 0, (small, large, partial)), gpu(1, 1))
    assert ids(offered(found)[0]) == {GPU: [UUIDS[0], UUIDS[1]]}
    state, warnings = offered(found, mig_strategy="mixed")
    assert ids(state) == {
        GPU: [UUIDS[1]],
        "nvidia.com/mig-1g.18gb.me": ["MIG-1-0"],
        "nvidia.com/mig-3g.71gb": ["MIG-2-1"],
    }
    assert warnings == ["MIG device 0:2 isn't offered: it has only a part of its GPU instance"]
    unit = state.resources[1].units[0]
    assert (unit.whole, unit.selector) == (UUIDS[0], "MIG-1-0")
    assert unit.cdi == "nvidia.com/gpu=MIG-1-0"
    paths = {node.container for node in unit.nodes}
    assert {"/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap10"} <= paths
    assert "/dev/nvidia-caps/nvidia-cap20" not in paths


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ((gpu(0, 0, (mig(0, 1, 12, 13),)), gpu(1, 1)), "all GPUs must be in MIG mode or none"),
        ((mode(gpu(0, 0)), gpu(1, 1)), "all GPUs must be in MIG mode or none"),
        ((gpu(0, 0, (part(0, 1, "1g.18gb"), part(1, 2, "2g.35gb"))),), "must have one profile"),
    ],
)
def test_mig_strategy_single_refuses_mixed_gpus(
    tmp_path: Path, gpus: tuple[Gpu, ...], why: str
) -> None:
    others = paper.machine("amd", tmp_path / "amd", 1)
    state, warnings = offered(machine(tmp_path, *gpus), others, mig_strategy="single")
    assert [each.name for each in state.resources] == ["amd.com/gpu"]
    assert [why in each for each in warnings] == [True]


def test_mig_strategy_single_offers_uniform_mig_devices_as_gpus(tmp_path: Path) -> None:
    parts = [tuple(part(n, gi + n, "1g.18gb") for n in range(2)) for gi in (1, 5)]
    found = machine(tmp_path, gpu(0, 0, parts[0]), gpu(1, 1, parts[1]))
    one = only(offered(found, mig_strategy="single"))
    assert one.name == GPU
    assert [unit.whole for unit in one.units] == [UUIDS[0], UUIDS[0], UUIDS[1], UUIDS[1]]
    plain = machine(tmp_path, gpu(0, 0), gpu(1, 1))
    assert ids(offered(plain, mig_strategy="single")[0]) == {GPU: UUIDS[:2]}


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_mig_mode_without_mig_devices_gives_a_warning(tmp_path: Path, strategy: str) -> None:
    found = machine(tmp_path, mode(gpu(0, 0)), gpu(1, 1, (part(0, 1, "1g.18gb"),)))
    state, warnings = offered(found, mig_strategy=strategy)
    assert [unit.id for each in state.resources for unit in each.units] == ["MIG-1-0"]
    assert warnings == ["GPU 0 is in MIG mode and has no MIG device"]


def test_a_gpu_in_mig_mode_without_a_cdi_name_is_unhealthy(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0, (part(0, 1, "1g.18gb"),)), gpu(1, 1))
    assert reasons(only(offered(found))) == ["", ""]
    one = only(offered(found, device_list_strategy=("envvar", "cdi-cri")))
    assert ["mig-strategy" in each for each in reasons(one)] == [True, False]


# Sharing ------------------------------------------------------------------------------------------


def test_a_shared_resource_has_replicas_and_its_new_name(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0), gpu(1, 1))
    shared = {GPU: Sharing(GPU, 4, "nvidia.com/gpu.shared")}
    one = only(offered(found, sharing=shared, single_requests=True))
    assert (one.name, one.replicas, one.single) == ("nvidia.com/gpu.shared", 4, True)
    assert len(one.offers()) == 8
    state, warnings = offered(found, sharing={"nvidia.com/mig-1g.5gb": shared[GPU]})
    assert state.resources[0].replicas == 1
    assert ["nvidia.com/mig-1g.5gb" in each for each in warnings] == [True]


@pytest.mark.parametrize(
    ("memory", "overcommits", "reason"),
    [
        (("8GiB", "72GiB"), False, ""),
        (("50%", "50%"), False, ""),
        (("8GiB", "73GiB"), False, "is shared in 81GiB, and it has 80GiB"),
        (("80GiB", "80GiB"), True, ""),
        (("8GiB", "81GiB"), True, "is shared in 81GiB, and it has 80GiB"),
    ],
)
def test_memory_shares_beyond_the_devices_memory_are_unhealthy(
    tmp_path: Path, memory: tuple[str, ...], overcommits: bool, reason: str
) -> None:
    found = machine(tmp_path, gpu(0, 0).but(memory=80 << 30)).but(version="615.10.01")
    (Path(found.root) / "sys/fs/cgroup").mkdir(parents=True)
    shared = Sharing(GPU, 2, GPU, single=False, memory=memory, overcommits=overcommits)
    facts: dict[str, Any] = {"sharing": {GPU: shared}, "device_list_strategy": ("volume-mounts",)}
    answer = offered(found, **facts)
    one = only(answer)
    assert (one.memory, one.single, [*one.offers()]) == (
        memory,
        False,
        [f"{UUIDS[0]}::0", f"{UUIDS[0]}::1"],
    )
    assert one.units[0].memory == 80 << 30
    assert [reason in each for each in reasons(one)] == [True]
    assert bool(one.units[0].reason) == bool(reason)
    assert PluginState.from_line(answer[0].to_line()) == answer[0]


def test_devices_without_memory_limits_cannot_be_shared_by_memory(tmp_path: Path) -> None:
    """The driver's release is too old, and the kernel's dmem lacks the other vendor's devices."""
    shared = Sharing(GPU, 2, GPU, memory=("50%", "50%"))
    facts: dict[str, Any] = {"device_list_strategy": ("volume-mounts",)}
    one = only(offered(machine(tmp_path, gpu(0, 0)), sharing={GPU: shared}, **facts))
    assert ["since release 615" in each for each in reasons(one)] == [True]
    gaudi = paper.machine("gaudi", tmp_path / "gaudi", 1)
    other = Sharing("habana.ai/gaudi", 2, "habana.ai/gaudi", memory=("50%", "50%"))
    one = only(offered(gaudi, sharing={other.name: other}, **facts))
    assert ["can't be limited" in each for each in reasons(one)] == [True]


def test_single_requests_apply_only_to_shared_resources(tmp_path: Path) -> None:
    assert not only(offered(machine(tmp_path, gpu(0, 0)), single_requests=True)).single


def test_two_resources_with_the_same_name_give_one_and_a_warning(tmp_path: Path) -> None:
    found = machine(tmp_path, gpu(0, 0))
    others = paper.machine("amd", tmp_path / "amd", 1)
    shared = {"amd.com/gpu": Sharing("amd.com/gpu", 2, GPU)}
    state, warnings = offered(found, others, sharing=shared)
    assert [(each.name, each.vendor) for each in state.resources] == [(GPU, "nvidia")]
    assert ["rename one" in each for each in warnings] == [True]


# Other vendors ------------------------------------------------------------------------------------


def test_amd_gpus_are_offered_with_their_nodes(tmp_path: Path) -> None:
    one = only(offered(paper.machine("amd", tmp_path, 2)))
    assert one.name == "amd.com/gpu"
    assert one.mounts == "/var/run/amd-container-devices"
    assert (one.driver_folder, one.nothing) == ("", "none")
    assert all(unit.id.startswith("0x") and unit.selector == unit.id for unit in one.units)
    assert [unit.reason for unit in one.units] == ["", ""]
    assert "/dev/kfd" in {node.container for node in one.units[0].nodes}


def test_gaudi_and_npu_devices_are_offered_by_pci_address(tmp_path: Path) -> None:
    gaudi = node_files.machine("gaudi", tmp_path / "gaudi", 2)
    npu = node_files.machine("intel_npu", tmp_path / "npu", 1)
    state, _ = offered(gaudi, npu)
    assert [each.name for each in state.resources] == ["habana.ai/gaudi", "npu.intel.com/accel"]
    for resource, inventory in zip(state.resources, (gaudi, npu), strict=True):
        addresses = [device.bus_id for device in inventory.devices]
        assert [unit.id for unit in resource.units] == addresses
        assert [unit.selector for unit in resource.units] == addresses
    assert state.resources[1].units[0].cdi == "intel.com/npu=accel0"
    seats = [unit.variables["HABANA_VISIBLE_MODULES"] for unit in state.resources[0].units]
    assert seats == [device.names["module"][0] for device in gaudi.devices]
    assert state.resources[0].nothing == "none"


@pytest.mark.parametrize("driver", ["i915", "xe"])
def test_intel_gpus_and_virtual_functions_are_offered_by_driver(
    tmp_path: Path, driver: str
) -> None:
    found = node_files.machine("intel_gpu", tmp_path, 2, driver=driver, vfs=2)
    one = only(offered(found))
    assert one.name == f"gpu.intel.com/{driver}"
    whole = next(iter(found.devices))
    labels = [device.label for device in found.devices if device.names["uid"][0] in ids(
        PluginState((one,)))[one.name]]  # fmt: skip
    assert labels == ["0", "1.0", "1.1"], "a GPU with virtual functions is none itself"
    assert one.units[0].id == one.units[0].selector == whole.names["uid"][0]
    assert one.units[0].cdi == f"intel.com/gpu={whole.id}"


@pytest.mark.parametrize(
    ("chip", "name"), [("910B", "Ascend910"), ("310P", "Ascend310P"), ("950", "npu")]
)
def test_ascend_resources_are_named_after_the_chip(tmp_path: Path, chip: str, name: str) -> None:
    one = only(offered(node_files.machine("ascend", tmp_path, 2, chip=chip)))
    assert one.name == f"huawei.com/{name}"
    assert [(unit.id, unit.selector) for unit in one.units] == [("npu-0",) * 2, ("npu-1",) * 2]


def test_vnpus_are_a_resource_of_their_own(tmp_path: Path) -> None:
    found = node_files.machine("ascend", tmp_path, 2, chip="910B", vnpus="100,101")
    state, _ = offered(found)
    assert ids(state) == {
        "huawei.com/Ascend910": ["npu-1"],
        "huawei.com/Ascend910-vnpu": ["vnpu-100", "vnpu-101"],
    }
    unit = state.resources[1].units[0]
    assert (unit.selector, unit.whole) == ("vnpu-100", "npu-0")
    assert "/dev/davinci100" in {node.container for node in unit.nodes}


def test_linked_neuron_devices_are_reported_as_near(tmp_path: Path) -> None:
    one = only(offered(node_files.machine("neuron", tmp_path, 3)))
    first, second, third = (unit.id for unit in one.units)
    assert one.name == "aws.amazon.com/neuron"
    assert one.links == {first: {second: 1}, second: {first: 1, third: 1}, third: {second: 1}}


def test_a_vendor_resource_is_named_after_its_cdi_kind(tmp_path: Path) -> None:
    tree = """
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.core.inventory.model import Device, Inventory, DeviceNode
from gpuhook.core.contract import Vendor
from gizmo import names


class Gizmo(Vendor):
    names = names


VENDOR = Gizmo()
"""
    devices = tuple(
        Device(f"gizmo{n}", str(n), {"index": (str(n),)}, (f"/dev/gizmo{n}",), state=state)
        for n, state in enumerate(("", "it is asleep"))
    )
    nodes = tuple(DeviceNode(f"/dev/gizmo{n}", 9, n, inside=f"/dev/thing{n}") for n in range(2))
    with known(tmp_path, "gizmo", vendor=tree):
        one = only(offered(Inventory("gizmo", str(tmp_path), "1", devices, nodes)))
    assert one.name == "gizmo.example/device"
    assert [(unit.id, unit.selector) for unit in one.units] == [("gizmo0", "0"), ("gizmo1", "1")]
    assert reasons(one) == ["", "device 1: it is asleep"]
    assert one.units[0].nodes[0].container == "/dev/thing0"


def test_an_invalid_vendor_domain_gives_a_warning_and_no_resource(tmp_path: Path) -> None:
    devices = (Device("g", "0", {}),)
    with known(tmp_path, "_gizmo"):
        state, warnings = offered(Inventory("_gizmo", str(tmp_path), "1", devices, ()))
    assert state.resources == ()
    assert ["a domain in lower case" in each for each in warnings] == [True]
