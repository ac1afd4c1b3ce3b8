"""Published devices of all vendors: within the API's limits, and checked by other evaluators."""

import json
from pathlib import Path
from typing import Any

import declared_vendors
import machines
import paper
import pytest
import yaml
from dra_reader import Object, check, chosen
from hypothesis import given
from hypothesis import strategies as some
from kubernetes.utils.quantity import parse_quantity
from samples import SAMPLES

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError
from gpuhook.cluster.dra import slices as dra
from gpuhook.cluster.dra.slices import Choices, objects, quantity
from gpuhook.cluster.vendors import slices
from gpuhook.cluster.vendors.slices import PublishedDevice, Slices, device_name, semantic
from gpuhook.core import contract
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.monitor import memory_limit_support
from gpuhook.tools.cdi.write import to_text
from gpuhook.vendors import registry

NODE = Choices("n1")


def published(*inventories: Inventory, choices: Choices = NODE) -> list[Object]:
    found = [(contract.load(registry.BUILT_IN[each.vendor]), each) for each in inventories]
    made, _ = objects(found, choices, Config())
    return made


def devices(made: list[Object]) -> dict[str, Any]:
    every = (each["spec"].get("devices", []) for each in made if each["kind"] == "ResourceSlice")
    return {device["name"]: device for each in every for device in each}


def classes(made: list[Object]) -> dict[str, Any]:
    return {
        each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "DeviceClass"
    }


# Every vendor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", SAMPLES)
def test_every_vendors_devices_are_published_and_match_its_class(
    vendor: str, tmp_path: Path
) -> None:
    expected = SAMPLES[vendor].claim
    driver, name, claim = expected.driver, expected.device, expected.expression
    made = published(paper.machine(vendor, tmp_path))
    found = check(made)
    here = devices(made)
    assert len(here) == 4
    assert name in here
    assert {each.spec.driver for each in found} == {driver}
    assert sorted(chosen(found, claim)) == sorted(here)
    assert classes(made)[driver]["extendedResourceName"] == expected.resource
    [selector] = classes(made)[driver]["selectors"]
    assert sorted(chosen(found, selector["cel"]["expression"])) == sorted(here)
    assert not any("taints" in each for each in here.values())


@pytest.mark.parametrize("name", declared_vendors.tables())
def test_declared_vendors_devices_are_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(declared_vendors.tables()[name])
    config = load(str(file))
    root = tmp_path / "root"
    nodes = declared_vendors.simulated(root, config, name, 2).nodes
    monkeypatch.setattr(DeviceNode, "of", lambda path, *_: nodes.get(path))
    inventory = declared_vendors.looked_at(root, config, name)
    vendor = contract.load(registry.all_vendors(config)[name])
    made, _ = objects([(vendor, inventory)], NODE, config)
    check(made)
    assert {*classes(made)} == {vendor.names.KIND.partition("/")[0]}
    assert len(devices(made)) == len(inventory.devices) > 0


def test_yaml_and_json_output_are_equal(tmp_path: Path) -> None:
    made = published(paper.machine("amd", tmp_path))
    text = "".join(to_text(each, "yaml") for each in made)
    assert [*yaml.safe_load_all(text)] == json.loads(json.dumps(made)) == made


def test_devices_of_several_vendors_are_published_separately(tmp_path: Path) -> None:
    inventories = [paper.machine(name, tmp_path / name, 2) for name in SAMPLES]
    found = check(published(*inventories))
    assert len({each.spec.driver for each in found}) == len(SAMPLES)


# Names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "gone", "few"),
    [("amd", {"unplug": "1"}, 3), ("gaudi", {"gap": "1"}, 3)],
)
def test_device_names_are_unchanged_when_another_is_gone(
    vendor: str, gone: dict[str, Any], few: int, tmp_path: Path
) -> None:
    before = devices(published(paper.machine(vendor, tmp_path / "before")))
    after = devices(published(paper.machine(vendor, tmp_path / "after", **gone)))
    assert len(after) == few
    assert {*after} < {*before}


def test_device_names_are_unchanged_when_card_numbers_change(tmp_path: Path) -> None:
    """A management controller that comes first at boot changes the number of every card."""
    before = devices(published(paper.machine("amd", tmp_path / "before")))
    after = devices(published(paper.machine("amd", tmp_path / "after", bmc="yes")))
    assert [*after] == [*before]


def test_amd_partitions_have_their_share_of_the_gpus_memory(tmp_path: Path) -> None:
    made = published(paper.machine("amd", tmp_path, 2, split="0", memory="NPS4"))
    found = check(made)
    parts = chosen(found, 'device.attributes["gpu.amd.com"].type == "amdgpu-partition"')
    assert len(parts) == 8
    profile = 'device.attributes["gpu.amd.com"].partitionProfile == "cpx_nps4"'
    assert sorted(chosen(found, profile)) == sorted(parts)
    assert devices(made)[parts[0]]["capacity"]["memory"]["value"] == "24Gi"


def test_virtual_functions_are_published_without_their_gpu(tmp_path: Path) -> None:
    made = published(paper.machine("intel_gpu", tmp_path, 2, vfs=2))
    kinds = [each["attributes"]["type"]["string"] for each in devices(made).values()]
    assert sorted(kinds) == ["gpu", "vf", "vf"]


def test_configured_pool_and_driver_names_are_used(tmp_path: Path) -> None:
    choices = Choices("n1", pool="rack/n1", drivers={"amd": "gpu.example.com"})
    made = published(paper.machine("amd", tmp_path), choices=choices)
    [slice_] = check(made)
    assert slice_.spec.driver == "gpu.example.com"
    assert slice_.spec.pool.name == "rack/n1"
    assert {*classes(made)} == {"gpu.example.com"}


@pytest.mark.parametrize(
    "choices",
    [
        Choices("Node_1"), Choices(""), Choices("n1", pool="a//b"), Choices("n" * 254),
        Choices("n1", drivers={"amd": "GPU"}), Choices("n1", drivers={"amd": "a" * 64}),
        Choices("n1", kubernetes=(1, 33)),
    ],
)  # fmt: skip
def test_invalid_pool_driver_or_node_names_are_refused(choices: Choices, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        published(paper.machine("amd", tmp_path), choices=choices)


@given(some.text(), some.text())
def test_any_text_gives_a_valid_device_name(one: str, other: str) -> None:
    assert dra_label(device_name(one, other))


def dra_label(name: str) -> bool:
    return 0 < len(name) <= 63 and name.strip("-") == name and set(name) <= set(ALLOWED)


ALLOWED = "abcdefghijklmnopqrstuvwxyz0123456789-"


def test_long_device_names_stay_distinct() -> None:
    long = ["a" * 80 + end for end in ("b", "c")]
    assert len({device_name(each) for each in long}) == 2


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("580.65.06", "580.65.6"), ("9.0", "9.0.0"), ("13", "13.0.0"), ("2.24.7.0", "2.24.7"),
        ("6.8.0-49-generic", "6.8.0"), ("25.0.rc1.1", "25.0.0"), ("of the kernel", ""), ("", ""),
    ],
)  # fmt: skip
def test_driver_versions_become_semantic_versions(text: str, version: str) -> None:
    assert semantic(text) == version


@given(some.integers(0, 1 << 62))
def test_quantities_are_written_exactly(count: int) -> None:
    from kubernetes.utils.quantity import parse_quantity  # noqa: PLC0415

    assert parse_quantity(quantity(count)) == count


# What is wrong with devices ---------------------------------------------------------------------


def test_a_device_that_cannot_be_used_is_tainted(tmp_path: Path) -> None:
    inventory = paper.machine("gaudi", tmp_path, reset="2")
    vendor = contract.load(registry.BUILT_IN["gaudi"])
    made, warnings = objects([(vendor, inventory)], NODE, Config())
    check(made)
    taints = {name: each["taints"] for name, each in devices(made).items() if "taints" in each}
    assert [*taints.values()] == [[{"key": "gaudi.intel.com/unhealthy", "effect": "NoSchedule"}]]
    [warning] = warnings
    assert "is tainted: " in warning
    assert next(iter(taints)) in warning


def test_a_device_without_its_node_is_tainted(tmp_path: Path) -> None:
    made = published(paper.machine("amd", tmp_path, missing="3"))
    assert sum("taints" in each for each in devices(made).values()) == 1


def test_without_nvml_gpus_are_published_without_its_values(tmp_path: Path) -> None:
    """NVML can't be called here, so the GPUs lack the values that only NVML has."""
    nvidia = machines.machine(machines.gpu(0, 3))
    vendor = contract.load(registry.BUILT_IN["nvidia"])
    amd = paper.machine("amd", tmp_path)
    others = contract.load(registry.BUILT_IN["amd"])
    made, warnings = objects([(vendor, nvidia), (others, amd)], NODE, Config())
    check(made)
    [name] = [each for each in devices(made) if each.startswith("gpu-00000000")]
    assert devices(made)[name]["attributes"]["architecture"] == {"string": "Hopper"}
    assert "capacity" not in devices(made)[name]
    assert any("is unknown" in each for each in warnings)


# Shares -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [0, 3, 4])
@pytest.mark.parametrize("release", [(1, 34), (1, 35)])
def test_the_default_of_a_claim_is_one_memory_share(
    shares: int, release: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim without a capacity gets all of a device's memory, or one share of it."""
    monkeypatch.setattr(memory_limit_support, "what_it_takes", lambda *_: None)
    choices = Choices("n1", kubernetes=release, shares={"amd": shares})
    made = published(paper.machine("amd", tmp_path), choices=choices)
    every = [each for one in check(made, release) for each in one.spec.devices or ()]
    assert len(every) == 4
    for each in every:
        assert each.allow_multiple_allocations
        memory = each.capacity["memory"]
        policy = memory.request_policy
        whole = parse_quantity(memory.value) / (shares or 1)
        assert 0 <= whole - parse_quantity(policy.default) < 1 << 20
        lowest = policy.valid_values[0] if shares else policy.valid_range.min
        assert lowest == (policy.default if shares else "1Mi")


@pytest.mark.protects(
    "dra-shared-limits", "DRA: a device is shared only if its shares can have memory limits"
)
def test_a_device_without_enforceable_limits_is_not_shared(tmp_path: Path) -> None:
    """No kernel here has dmem for that driver, so a share would be the whole GPU."""
    vendor = contract.load(registry.BUILT_IN["amd"])
    choices = Choices("n1", shares={"amd": 4})
    made, warnings = objects([(vendor, paper.machine("amd", tmp_path))], choices, Config())
    check(made)
    assert len(devices(made)) == 4
    assert not any("allowMultipleAllocations" in each for each in devices(made).values())
    assert len([each for each in warnings if "isn't shared: " in each]) == 4


# Shared by MPS ----------------------------------------------------------------------------------


@pytest.mark.protects("dra-mps-withheld", "DRA: no device of [gpuhook.mps] is published for claims")
@pytest.mark.parametrize(
    ("words", "kept"),
    [("0", {1}), ("all", set()), ("GPU-00000001-0000-0000-0000-000000000000", {0}), ("7", {0, 1})],
)
def test_devices_shared_by_mps_are_not_published(words: str, kept: set[int]) -> None:
    """A device may be named in any form; the driver's classes and its pool are unchanged."""
    inventory = machines.machine(machines.gpu(0, 3), machines.gpu(1, 4))
    config = Config()
    config.mps_devices = words
    vendor = contract.load(registry.BUILT_IN["nvidia"])
    made, warnings = objects([(vendor, inventory)], NODE, config)
    check(made)
    assert {int(name.split("-")[1]) for name in devices(made)} == kept
    assert len([each for each in warnings if "[gpuhook.mps]" in each]) == 2 - len(kept)
    assert classes(made).keys() == {"gpu.nvidia.com", "mig.nvidia.com"}


@pytest.mark.protects("dra-mps-withheld", "DRA: no device of [gpuhook.mps] is published for claims")
def test_partitions_of_a_gpu_shared_by_mps_are_not_published() -> None:
    parts = (machines.mig(0, 1, 1, 2), machines.mig(1, 2, 12, 13))
    inventory = machines.machine(machines.gpu(0, 3, parts), machines.gpu(1, 4))
    config = Config()
    config.mps_devices = "0"
    found = [(contract.load(registry.BUILT_IN["nvidia"]), inventory)]
    assert len(devices(objects(found, NODE, Config())[0])) == 3
    assert len(devices(objects(found, NODE, config)[0])) == 1


@pytest.mark.protects(
    "dra-mps-not-published",
    "DRA: no device that another program shares is published in a slice",
    instead="devices = [*driver.devices.values()]",
)
@pytest.mark.parametrize("release", [(1, 34), (1, 35)])
def test_devices_in_use_are_withheld_with_their_possible_partitions(
    release: tuple[int, int], many: Any
) -> None:
    whole = plain(1, id="GPU-1", counters="set-1", uses={"c0": 1})
    every = [plain(0, id="GPU-0"), whole, *parted(1, 2), *parted(2, 2)]
    assert sum(many(*every, release=release, **{"1": COUNTERS, "2": COUNTERS})) == len(every)
    vendor = contract.load(registry.BUILT_IN["nvidia"])
    choices = Choices("n1", kubernetes=release)
    drivers, _ = dra.described([(vendor, machines.machine())], choices, Config())
    taken = {("nvidia", "GPU-1"), ("amd", "GPU-0")}
    made = dra.rendered(dra.withheld(drivers, taken), choices)
    check(made, release)
    assert devices(made).keys() == {"gpu-0", "gpu-200", "gpu-201"}
    sets = [one["name"] for each in made for one in each["spec"].get("sharedCounters", ())]
    assert sets == ["set-2"]


# Limits -----------------------------------------------------------------------------------------


class Many(Slices):
    """A driver that publishes the devices of a test."""

    driver = "gpu.example.com"
    devices: tuple[PublishedDevice, ...] = ()
    counters: dict[str, dict[str, int]] = {}  # noqa: RUF012

    def offer(self, *words: Any, **more: Any) -> slices.Offer:
        return slices.Offer(self.devices, self.counters)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(slices, "of", Many)
    monkeypatch.setattr(dra, "slices", slices)

    def make(
        *found: PublishedDevice, release: tuple[int, int] = (1, 35), **counters: dict[str, int]
    ) -> list[int]:
        Many.devices, Many.counters = found, {f"set-{key}": each for key, each in counters.items()}
        inventory = machines.machine()
        inventory.root = "/"
        made = published(inventory, choices=Choices("n1", kubernetes=release))
        return [len(each.spec.devices or []) for each in check(made, release)]

    return make


def plain(number: int, **more: Any) -> PublishedDevice:
    return PublishedDevice(f"gpu-{number}", "", {"type": "gpu"}, **more)


def test_a_pool_without_devices_is_one_empty_slice(many: Any) -> None:
    assert many() == [0]


def test_a_slice_has_at_most_128_devices(many: Any) -> None:
    assert many(*map(plain, range(300))) == [128, 128, 44]


def test_a_slice_with_a_taint_has_at_most_64_devices(many: Any) -> None:
    sick = [plain(number, reason="ill" if number == 3 else "") for number in range(130)]
    assert many(*sick) == [64, 66]


COUNTERS = {f"c{number}": 1 for number in range(15)}


def parted(gpu: int, count: int) -> list[PublishedDevice]:
    about = {"counters": f"set-{gpu}", "uses": {"c0": 1}}
    return [plain(gpu * 100 + number, **about) for number in range(count)]


def test_counters_are_in_slices_of_their_own(many: Any) -> None:
    every = [each for gpu in range(10) for each in parted(gpu, 20)]
    assert many(*every, **{str(gpu): COUNTERS for gpu in range(10)}) == [0, 0, 64, 64, 64, 8]


def test_counters_are_in_their_devices_slice_in_1_34(many: Any) -> None:
    """Two sets have 30 of at most 32 counters, and the parts of a GPU stay in one slice."""
    every = [each for gpu in range(5) for each in parted(gpu, 20)] + [plain(999)]
    sets = {str(gpu): COUNTERS for gpu in range(5)}
    assert many(*every, release=(1, 34), **sets) == [40, 40, 20, 1]


def test_long_values_are_cut(many: Any) -> None:
    long = PublishedDevice("gpu-0", "", {"model": "é" * 40, "type": "gpu"})
    assert many(long) == [1]


def test_too_many_attributes_are_left_out(many: Any) -> None:
    facts: dict[str, Any] = {f"a{number}": number for number in range(40)}
    assert many(PublishedDevice("gpu-0", "", facts, {"memory": 1})) == [1]
