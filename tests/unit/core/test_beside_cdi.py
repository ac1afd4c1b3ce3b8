"""Mounts that request devices, in a container that already got some from the engine by CDI."""

from pathlib import Path
from typing import Any

import paper
import pytest

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.core import resolve
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.request.sources import SOURCE, memory_limit_place
from gpuhook.vendors import registry

VENDORS = [name for name, names in registry.BUILT_IN.items() if names.MOUNTS and names.VOID]
BY_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts = true\n"
MODES = [f'[nvidia-container-runtime]\nmode = "{mode}"\n' for mode in ("hook", "spec", "cdi")]


def inventory_of(vendor: str, tmp_path: Path) -> Inventory:
    if vendor == "nvidia":
        from machines import gpu, machine  # noqa: PLC0415 - only of this vendor

        return machine(gpu(0, 0), gpu(1, 1))
    return paper.machine(vendor, tmp_path, 2)


def node(inventory: Inventory, device: Device) -> dict[str, Any]:
    """Return a node that only this device has, in the form that engines write."""
    others = {path for each in inventory.devices if each.id != device.id for path in each.nodes}
    path = next(path for path in inventory.nodes_of(device) if path not in others)
    [found] = [each for each in inventory.nodes if each.path == path]
    return {"path": path, "type": "c", "major": found.major, "minor": found.minor}


def given(
    inventory: Inventory, env: str, nodes: list[dict[str, Any]], config: Config, place: str = ""
) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Return the ids of a container's devices, and the ignored parts of its request."""
    names = registry.BUILT_IN[inventory.vendor]
    wanted = inventory.devices[1]
    place = place or f"{names.MOUNTS}/{wanted.label}"
    spec = {
        "process": {"env": [f"{names.VOID}={env}"]},
        "mounts": [{"source": SOURCE, "destination": place}],
        "linux": {"devices": nodes},
    }
    progress = resolve.Progress()
    found = resolve.resolve(
        spec, config, registry.BUILT_IN, progress, inventories={inventory.vendor: inventory}
    )
    ignored = [pair for request in progress.requests for pair in request.ignored]
    return (found.ids if found else ()), ignored


@pytest.mark.protects(
    "mounts-beside-cdi",
    "device mounts add no devices to those that the engine added by a CDI spec",
    instead="return request",
)
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("word", ["void", "Void"])
def test_mounts_add_no_devices_where_the_engine_gave_some_by_cdi(
    vendor: str, mode: str, word: str, tmp_path: Path
) -> None:
    inventory = inventory_of(vendor, tmp_path)
    by_engine = [node(inventory, inventory.devices[0])]
    names, config = registry.BUILT_IN[vendor], loads(BY_MOUNTS + mode)
    reason = f"the engine has given the container {names.TITLE}'s devices by CDI"
    for name in ("", f"{names.MOUNTS}/cdi/{names.KIND}={inventory.devices[1].label}"):
        ids, ignored = given(inventory, word, by_engine, config, name)
        assert ids == ()
        assert ("volume-mounts", reason) in ignored


@pytest.mark.parametrize("vendor", VENDORS)
def test_mounts_select_devices_for_an_image_with_void(vendor: str, tmp_path: Path) -> None:
    """A device plugin with the strategy volume-mounts requests devices in this way."""
    inventory = inventory_of(vendor, tmp_path)
    other = {"path": "/dev/infiniband/uverbs0", "type": "c", "major": 231, "minor": 192}
    for nodes in ([], [other]):
        ids, _ = given(inventory, "void", nodes, loads(BY_MOUNTS))
        assert ids == (inventory.devices[1].id,)


@pytest.mark.parametrize("vendor", VENDORS)
def test_mounts_count_beside_device_nodes_without_void(vendor: str, tmp_path: Path) -> None:
    """A device plugin with this strategy may pass the nodes, too; its variable isn't void."""
    inventory = inventory_of(vendor, tmp_path)
    by_engine = [node(inventory, inventory.devices[1])]
    ids, _ = given(inventory, registry.BUILT_IN[vendor].MOUNTS, by_engine, loads(BY_MOUNTS))
    assert ids == (inventory.devices[1].id,)


def test_a_mount_with_a_limit_adds_no_device_to_those_given_by_cdi(tmp_path: Path) -> None:
    inventory = inventory_of("nvidia", tmp_path)
    place = memory_limit_place(registry.BUILT_IN["nvidia"].MOUNTS, "1", "8GiB", gives=True)
    by_engine = [node(inventory, inventory.devices[0])]
    assert given(inventory, "void", by_engine, loads(BY_MOUNTS), place)[0] == ()
    assert given(inventory, "void", [], loads(BY_MOUNTS), place)[0] == (inventory.devices[1].id,)
