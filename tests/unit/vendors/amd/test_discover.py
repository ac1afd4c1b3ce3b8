"""Discovery of AMD GPUs on fake machines."""

import os
import shutil
from pathlib import Path

import amd_machine
import pytest
from amd_machine import fabricate, kfd_node, write

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.vendors.amd.discover import bus_id, discover, parse_properties

GPUS = "sys/module/amdgpu/drivers/pci:amdgpu"
KFD_NODES = "sys/class/kfd/kfd/topology/nodes"


def nodes_of(found: Inventory) -> list[tuple[str, ...]]:
    return [tuple(path.removeprefix("/dev/dri/") for path in each.nodes) for each in found.devices]


def device(found: Inventory, number: int) -> Device:
    return found.devices[number]


def test_unpartitioned_gpus_are_found(tmp_path: Path) -> None:
    found = amd_machine.simulated(tmp_path, 3, model="AMD Instinct MI308X")
    assert nodes_of(found) == [
        ("card0", "renderD128"), ("card1", "renderD129"), ("card2", "renderD130"),
    ]  # fmt: skip
    assert found.control == ("/dev/kfd",)
    assert found.missing() == []
    assert found.version == "6.12.12"
    first = device(found, 0)
    assert (first.label, first.id, first.bus_id) == ("0", "0x84cafeae17e7600", "0000:05:00.0")
    assert first.model == "AMD Instinct MI308X spx_nps1"
    assert first.names == {
        "index": ("0",),
        "id": ("0x84cafeae17e7600", "0x084cafeae17e7600"),
        "bus_id": ("0000:05:00.0",),
    }
    assert (first.parent, first.state) == ("", "")
    kfd = found.node("/dev/kfd")
    card, render = (found.node(path) for path in first.nodes)
    assert [node and (node.mode, node.gid) for node in (kfd, card, render)] == [
        (0o660, 105), (0o660, 44), (0o660, 105),
    ]  # fmt: skip
    assert Inventory.from_json(found.to_json()) == found


@pytest.mark.parametrize("spelling", ["_", "."])
def test_partitions_used_by_kfd_are_found(tmp_path: Path, spelling: str) -> None:
    """Every GPU has eight DRM devices, and KFD lists only those in use."""
    found = amd_machine.simulated(
        tmp_path, 2, split="1", partitions="4", memory="NPS4", spelling=spelling
    )
    assert nodes_of(found) == [
        ("card0", "renderD128"),
        *((f"card{8 + number}", f"renderD{136 + number}") for number in range(4)),
    ]
    assert [each.bus_id for each in found.devices] == ["0000:05:00.0", *["0000:08:00.0"] * 4]
    models = [each.model for each in found.devices]
    assert models == ["1002:74a2 spx_nps4", *["1002:74a2 qpx_nps4"] * 4]
    assert len({each.id for each in found.devices}) == 5


@pytest.mark.parametrize(
    ("ids", "first", "other", "called"),
    [
        ("shared", "0x84cafeae17e7600", "0x84cafeae17e7610",
         {"0x84cafeae17e7600", "0x084cafeae17e7600", "0x84cafeae17e7600:1"}),
        ("none", "0000:05:00.0", "0000:08:00.0", {"0000:05:00.0:1"}),
    ],
)  # fmt: skip
def test_partitions_without_own_unique_ids_get_numbered_ids(
    tmp_path: Path, ids: str, first: str, other: str, called: set[str]
) -> None:
    found = amd_machine.simulated(tmp_path, 2, split="0", partitions="2", ids=ids)
    assert [each.id for each in found.devices] == [f"{first}:0", f"{first}:1", other]
    assert {*device(found, 1).names["id"]} == called


@pytest.mark.parametrize(
    ("locations", "spelling", "ids"),
    [
        ([0x500, 0x500, 0x500], "amdgpu_xcp_{}", ["0x7:0", "0x7:1", "0x7:2"]),
        ([0x500, 0x500 | 3 << 28], "amdgpu_xcp.{}", ["0x7:0", "0x7:3"]),  # as in newer kernels
    ],
    ids=["not told", "told"],
)
def test_partitions_are_numbered_by_location_or_order(
    tmp_path: Path, locations: list[int], spelling: str, ids: list[str]
) -> None:
    nodes = {
        str(at): {"drm_render_minor": 128 + at, "unique_id": 7, "location_id": location}
        for at, location in enumerate(locations)
    }
    places = {spelling.format(at): [f"renderD{129 + at}"] for at in range(len(locations) - 1)}
    fabricate(tmp_path, {"0000:05:00.0": ["renderD128"]}, places, nodes)
    found = discover(str(tmp_path)).devices
    assert [each.id for each in found] == ids
    assert {each.bus_id for each in found} == {"0000:05:00.0"}


def test_an_amd_partition_is_ordered_after_its_gpu(tmp_path: Path) -> None:
    """The location of a GPU in KFD may differ from that of its folder."""
    nodes = {
        str(minor): {"drm_render_minor": minor, "location_id": location, "domain": 0}
        for minor, location in ((128, 0x500), (129, 0x501), (130, 0x4800))
    }
    gpus = {"0000:01:00.0": ["renderD128"], "0000:02:00.0": ["renderD130"]}
    fabricate(tmp_path, gpus, {"amdgpu_xcp_0": ["renderD129"]}, nodes)
    assert nodes_of(discover(str(tmp_path))) == [("renderD128",), ("renderD129",), ("renderD130",)]


def test_a_partition_belongs_to_the_first_pci_function(tmp_path: Path) -> None:
    nodes = {
        str(minor): {"drm_render_minor": minor, "location_id": location}
        for minor, location in ((128, 0x500), (129, 0x500), (130, 0x502))
    }
    gpus = {"0000:05:00.0": ["renderD128"], "0000:05:00.1": ["renderD129"]}
    fabricate(tmp_path, gpus, {"amdgpu_xcp_0": ["renderD130"]}, nodes)
    write(tmp_path / GPUS / "0000:05:00.0/device", "0x74a2")
    found = {each.nodes: each for each in discover(str(tmp_path)).devices}
    partition = found["/dev/dri/renderD130",]
    assert (partition.bus_id, partition.model) == ("0000:05:00.0", "1002:74a2")


def test_device_numbers_follow_pci_addresses(tmp_path: Path) -> None:
    """The test has more than ten GPUs, nodes in another order, and a second PCI domain."""
    addresses = [f"0000:{bus:02x}:00.0" for bus in range(3, 14)] + ["0001:02:00.0"]
    order = [*range(11, -1, -1)]
    gpus = {
        address: [f"card{minor}", f"renderD{128 + minor}"]
        for address, minor in zip(addresses, order, strict=True)
    }
    nodes = {}
    for address, minor in zip(addresses, order, strict=True):
        domain, bus, _ = (int(part, 16) for part in address.partition(".")[0].split(":"))
        place = {"location_id": bus << 8, "domain": domain}
        nodes[str(2 + minor)] = {"drm_render_minor": 128 + minor, "unique_id": minor + 1, **place}
    fabricate(tmp_path, gpus, {}, nodes)
    found = discover(str(tmp_path)).devices
    assert [each.bus_id for each in found] == addresses
    assert [each.label for each in found] == [str(number) for number in range(12)]
    assert found[0].nodes == ("/dev/dri/card11", "/dev/dri/renderD139")


def test_more_than_nine_partitions_are_in_numeric_order(tmp_path: Path) -> None:
    found = amd_machine.simulated(tmp_path, 2, split="0,1")
    assert [each.nodes[1] for each in found.devices] == [
        f"/dev/dri/renderD{minor}" for minor in range(128, 144)
    ]


def test_devices_are_renumbered_after_a_gpu_is_removed(tmp_path: Path) -> None:
    found = amd_machine.simulated(tmp_path, 4, unplug="1")
    assert nodes_of(found) == [
        ("card0", "renderD128"), ("card2", "renderD130"), ("card3", "renderD131"),
    ]  # fmt: skip
    assert [each.label for each in found.devices] == ["0", "1", "2"]


def test_foreign_cards_and_gpus_unknown_to_kfd_are_ignored(tmp_path: Path) -> None:
    found = amd_machine.simulated(tmp_path, 3, bmc="yes", unknown="1")
    assert nodes_of(found) == [("card1", "renderD128"), ("card3", "renderD130")]


def test_devices_of_other_drivers_are_ignored(tmp_path: Path) -> None:
    """/dev/dri and KFD's numbers may also belong to devices of other drivers."""
    node = {"drm_render_minor": 128, "unique_id": 1}
    fabricate(tmp_path, {}, {"vkms.0": ["card0", "renderD128"], "amdgpu_xcp": ["x"]}, {"1": node})
    write(tmp_path / "sys/bus/pci/drivers/i915/0000:00:02.0/drm/renderD128/dev", "226:128")
    assert discover(str(tmp_path)).devices == ()


def test_malformed_sysfs_entries_are_ignored(tmp_path: Path) -> None:
    gpus = {
        "0000:05:00.0": ["card0", "renderD128", "controlD64", "card0-DP-1", "renderDx", "version"],
        "bind": [],
        "module": ["renderD129"],
        "0000:06:00.0": [],
        "10000:01:00.0": ["renderD130"],
        "0000:07:00.0x": ["renderD131"],
    }
    nodes = {
        "0": {"drm_render_minor": 128, "unique_id": 1},
        "1": {"drm_render_minor": 129, "unique_id": 2},
        "2": {"drm_render_minor": 130, "unique_id": 3},
        "3": {"drm_render_minor": 131},
        "x": {"drm_render_minor": 132},
    }
    fabricate(tmp_path, gpus, {"amdgpu_xcp_1a": ["renderD131"]}, nodes)
    (tmp_path / GPUS / "0000:07:00.0").mkdir()
    (tmp_path / KFD_NODES / "9").mkdir()
    write(tmp_path / KFD_NODES / "10/properties", "drm_render_minor\nunique_id x\n\n a b c")
    found = discover(str(tmp_path))
    assert nodes_of(found) == [("card0", "renderD128"), ("renderD130",)]
    assert [each.bus_id for each in found.devices] == ["0000:05:00.0", "10000:01:00.0"]


def test_unreadable_files_count_as_missing(tmp_path: Path) -> None:
    """A folder and an oversized file stand for unreadable files."""
    amd_machine.simulated(tmp_path, 2)
    properties = tmp_path / KFD_NODES / "3/properties"
    properties.unlink()
    properties.mkdir()
    product = tmp_path / GPUS / "0000:05:00.0/product_name"
    product.unlink()
    product.write_bytes(b"x" * 100_000)
    found = discover(str(tmp_path))
    assert nodes_of(found) == [("card0", "renderD128")]
    assert device(found, 0).model == "1002:74a2 spx_nps1"


def test_absolute_links_are_resolved_below_the_root(tmp_path: Path) -> None:
    """A container with a driver may have absolute links, which start at the driver root."""
    amd_machine.simulated(tmp_path / "root", 1)
    link = tmp_path / "root" / GPUS
    link.unlink()
    link.symlink_to("/sys/bus/pci/drivers/amdgpu")
    assert len(discover(str(tmp_path / "root")).devices) == 1


def test_a_missing_compute_driver_gives_no_devices(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 2)
    shutil.rmtree(tmp_path / "sys/devices/virtual/kfd")
    found = discover(str(tmp_path))
    assert (found.devices, found.missing()) == ((), ["/dev/kfd"])


@pytest.mark.parametrize(
    ("own", "kernel", "version"),
    [("6.12.12", "6.1.0-18-amd64", "6.12.12"), ("", "6.1.0-18-amd64", "6.1.0-18-amd64")],
)
def test_driver_version_falls_back_to_the_kernel_release(
    tmp_path: Path, own: str, kernel: str, version: str
) -> None:
    fabricate(tmp_path, {}, {}, {})
    write(tmp_path / "sys/module/amdgpu/version", own)
    write(tmp_path / "proc/sys/kernel/osrelease", kernel)
    assert discover(str(tmp_path)).version == version


def test_properties_that_are_no_64_bit_numbers_are_ignored() -> None:
    assert parse_properties(f"unique_id {(1 << 64) - 1}\nx -1\ny 1.5\nz {'9' * 5000}\n") == {
        "unique_id": (1 << 64) - 1
    }


def test_bus_id_is_computed_from_kfd_location() -> None:
    assert bus_id({"location_id": 0x0A02, "domain": 0x10000}) == "10000:0a:00.0"
    assert bus_id({"location_id": 0x48F8}) == "0000:48:1f.0"
    assert bus_id({}) == ""


def test_no_device_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are inspected only by path: opening one would wake up a GPU."""
    amd_machine.simulated(tmp_path, 1)
    for path in ("dev/kfd", "dev/dri/card0", "dev/dri/renderD128"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / path)  # opening a fifo only for reading would wait forever
    opened = []
    real = Rootfs.open_file

    def note(root: Rootfs, path: str) -> int | None:
        opened.append(path)
        return real(root, path)

    monkeypatch.setattr(Rootfs, "open_file", note)
    found = discover(str(tmp_path))
    assert found.nodes == ()
    assert opened
    assert not [path for path in opened if path.startswith("/dev/")]


def test_a_partition_without_its_gpu_in_sysfs_is_found(tmp_path: Path) -> None:
    node = {"drm_render_minor": 129, "unique_id": 3, "location_id": 0x501, "domain": 2}
    fabricate(tmp_path, {}, {"amdgpu_xcp_1": ["card1", "renderD129"]}, {"1": node})
    [found] = discover(str(tmp_path)).devices
    assert (found.bus_id, found.model, found.id) == ("0002:05:00.0", "", "0x3")


def test_the_first_of_two_kfd_nodes_with_one_minor_counts(tmp_path: Path) -> None:
    fabricate(tmp_path, {"0000:05:00.0": ["renderD128"]}, {}, {})
    for number, unique in ((10, 1), (9, 2)):
        kfd_node(tmp_path, number, {"drm_render_minor": 128, "unique_id": unique})
    [found] = discover(str(tmp_path)).devices
    assert found.id == "0x2"
