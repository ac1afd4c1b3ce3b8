"""Containers' requests for devices of a second vendor, with and without NVIDIA."""

from pathlib import Path

import pytest
import second_vendor
from second_vendor import (
    Inventories,
    names_of_variable,
    of_kind,
    planned,
    resolved,
    selected,
    spec_with,
)
from steps import resolve

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, LostDeviceError, RequestError, UnknownDeviceError
from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.core.plan.operations import BindFile, Operation, UpdateLdCache
from gpuhook.vendors.nvidia.vendor import VENDOR as NVIDIA

UNPRIVILEGED = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
ACCEPT = "accept-annotations = true\n"


# What it has, and what names mean ------------------------------------------------------------


def test_discovery_finds_npus_and_their_partitions(npus: Inventory) -> None:
    assert npus.version == "7.1"
    assert [device.label for device in npus.devices] == ["0", "1", "1.0", "1.1", "2", "3"]
    [part] = [device for device in npus.devices if device.label == "1.1"]
    assert (part.id, part.parent, part.nodes) == ("A-0001/1", "A-0001", ("/dev/acme1.1",))
    assert npus.control == ("/dev/acmectl",)
    assert npus.missing() == []
    assert Inventory.from_json(npus.to_json()) == npus


def test_devices_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    many = second_vendor.machine(tmp_path / "many", 11, split="2,10")
    (tmp_path / "many/sys/class/acme/acmectl").mkdir()
    assert second_vendor.part("discover").discover(many.root).devices == many.devices
    labels = [device.label for device in many.devices]
    assert labels[:6] == ["0", "1", "2", "2.0", "2.1", "3"]
    assert labels[-4:] == ["9", "10", "10.0", "10.1"]


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (("0",), ["0"]),
        (("2", "0", "2"), ["2", "0"]),
        (("0-2",), ["0", "1", "2"]),
        (("A-0002",), ["2"]),
        (("a-0002",), ["2"]),
        (("0000:42:00.0",), ["1"]),
        (("42:00.0",), ["1"]),
        (("1.0",), ["1.0"]),
        (("A-0001/1",), ["1.1"]),
        (("B0",), ["0", "2"]),
        (("2", "b0"), ["2", "0"]),
        (("all",), ["0", "1", "1.0", "1.1", "2"]),
    ],
)
def test_selectors_select_the_expected_npus(
    npus: Inventory, words: tuple[str, ...], labels: list[str]
) -> None:
    assert selected(npus, *words) == labels


def test_sample_names_select_devices_and_unknown_names_are_refused(tmp_path: Path) -> None:
    """Authors of a new vendor start with a copy of this sample."""
    sample = second_vendor.sample()
    found = second_vendor.machine(tmp_path, sample.count, **sample.settings)

    def env_of(words: str) -> list[str]:
        return words.split() if "VISIBLE" in words else [f"ACME_VISIBLE_DEVICES={words}"]

    for words, labels in sample.named:
        answer = resolved(spec_with(*env_of(words)), {"acme": found})
        assert " ".join(device.label for device in answer.grants[0].devices) == labels
    for words in sample.unknown:
        with pytest.raises(UnknownDeviceError, match=sample.it_has):
            resolved(spec_with(*env_of(words)), {"acme": found})


def test_a_board_variable_accepts_only_board_names(npus: Inventory) -> None:
    assert selected(npus, "B0", by="ACME_VISIBLE_BOARDS") == ["0", "2"]
    for word in ("0", "A-0000", "0000:41:00.0", "1.0"):
        with pytest.raises(UnknownDeviceError) as caught:
            selected(npus, word, by="ACME_VISIBLE_BOARDS")
        assert caught.value.cause.endswith(": it has B0, B1")


def test_an_unknown_device_error_lists_existing_devices(npus: Inventory) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        selected(npus, "9")
    assert caught.value.cause == (
        "This host has no NPU or part of one '9': it has 0 (A-0000), 1 (A-0001), "
        "2 (A-0002), 3 (A-0003) and 2 more"
    )


@pytest.mark.parametrize("word", ["3", "A-0003", "2-3", "B1"])
def test_an_unusable_device_is_refused(npus: Inventory, word: str) -> None:
    with pytest.raises(LostDeviceError) as caught:
        selected(npus, word)
    assert str(caught.value).startswith("NPU 3 can't be used: it is in reset. Wait until its reset")


# What a container asks for -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "devices", "spaces"),
    [
        (["ACME_VISIBLE_DEVICES=0, 2"], ("0", "2"), "ACME_VISIBLE_DEVICES"),
        (["ACME_VISIBLE_BOARDS=B0"], ("B0",), "ACME_VISIBLE_BOARDS"),
        (["ACME_VISIBLE_BOARDS=B0", "ACME_VISIBLE_DEVICES=1"], ("1",), "ACME_VISIBLE_DEVICES"),
        (["ACME_VISIBLE_DEVICES=none"], (), "ACME_VISIBLE_DEVICES"),
        (["ACME_VISIBLE_DEVICES=All", "ACME_VISIBLE_BOARDS=B0"], ("B0",), "ACME_VISIBLE_BOARDS"),
        (["ACME_VISIBLE_DEVICES=all", "ACME_VISIBLE_BOARDS="], ("all",), "ACME_VISIBLE_DEVICES"),
        (["ACME_VISIBLE_DEVICES=all", "ACME_VISIBLE_BOARDS=void"], None, ""),
        (["ACME_VISIBLE_DEVICES=", "ACME_VISIBLE_BOARDS=B0"], None, ""),
        (["ACME_VISIBLE_DEVICES=1,all"], ("all",), "ACME_VISIBLE_DEVICES"),
        (["ACME_VISIBLE_DEVICES=1,void"], None, ""),
        (["ACME_VISIBLE_DEVICES="], None, ""),
        (["NVIDIA_VISIBLE_DEVICES=0"], None, ""),
    ],
)
def test_variables_request_the_expected_npus(
    env: list[str], devices: tuple[str, ...] | None, spaces: str
) -> None:
    request = second_vendor.read(spec_with(*env))
    assert request.devices == devices
    assert request.selectors == (devices or ())
    assert request.spaces == (names_of_variable(spaces) if spaces else ())


def test_the_swarm_resource_variable_selects_devices_by_id() -> None:
    config = loads('swarm-resource = "acme=A, B"\n')
    request = second_vendor.read(spec_with("A=A-0002", "ACME_VISIBLE_DEVICES=0"), config)
    assert (request.devices, request.spaces) == (("A-0002",), ())
    assert request.ignored == (
        ("environment", "ACME_VISIBLE_DEVICES is overridden by swarm-resource 'A'"),
    )
    for word in ("1", "0x1", ""):
        request = second_vendor.read(spec_with(f"B={word}", "ACME_VISIBLE_DEVICES=0"), config)
        assert request.devices == ("0",)


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_annotations_name_the_devices_of_each_vendor(both: Inventories, mode: str) -> None:
    text = f'[nvidia-container-runtime]\nmode = "{mode}"\n[gpuhook]\naccept-annotations = '
    kinds = "acme.example/npu=0,nvidia.com/gpu=1", "acme.example/npu=2", "other.example/nic=1"
    notes = {f"cdi.k8s.io/{number}": names for number, names in enumerate(kinds)}
    env = ["ACME_VISIBLE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=0"]
    spec = spec_with(*env, annotations=notes)
    answer = resolved(spec, both, loads(f"{text}true\n"))
    nvidia = [device.id for device in both["nvidia"].devices]
    assert answer.ids == (nvidia[1], "A-0000", "A-0002")
    assert [request.source for request in answer.requests] == ["annotations"] * 2
    answer = resolved(spec, both, loads(f"{text}false\n"))
    assert answer.ids == (nvidia[0], "A-0001")
    untrusted = loads(f"{UNPRIVILEGED}{text}true\n")
    assert resolve(spec, untrusted, inventories=both) is None


@pytest.mark.parametrize("mode", ["cdi", "auto"])
def test_a_second_vendor_reads_no_annotations_in_cdi_and_auto_mode(mode: str) -> None:
    """In these modes, the code of one vendor handles the CDI names of all vendors."""
    config = loads(f'[nvidia-container-runtime]\nmode = "{mode}"\n[gpuhook]\n' + ACCEPT)
    notes = {"cdi.k8s.io/x": "acme.example/npu=0"}
    request = second_vendor.read(spec_with(annotations=notes), config)
    assert (request.devices, request.ignored) == (None, ())


def test_the_privilege_setting_applies_to_all_vendors(both: Inventories) -> None:
    spec = spec_with("ACME_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=0")
    config = loads(UNPRIVILEGED)
    request = second_vendor.read(spec, config)
    assert request.devices is None
    assert [source for source, _ in request.ignored] == ["environment"]
    assert resolve(spec, config, inventories=both) is None
    spec["process"]["capabilities"] = {"bounding": ["CAP_SYS_ADMIN"]}
    assert resolved(spec, both, config).ids == (both["nvidia"].devices[0].id, "A-0000")


def test_npus_of_different_boards_are_refused_together(both: Inventories) -> None:
    assert resolved(spec_with("ACME_VISIBLE_DEVICES=0,2"), both).ids == ("A-0000", "A-0002")
    with pytest.raises(RequestError, match="boards B0 and B1 can't work in one container"):
        resolve(spec_with("ACME_VISIBLE_DEVICES=0,1"), Config(), inventories=both)


# What it gets --------------------------------------------------------------------------------


def test_only_the_requested_devices_nodes_are_added(both: Inventories) -> None:
    plan = planned(spec_with("ACME_VISIBLE_DEVICES=2"), both)
    nodes = [(op["source"], op["destination"]) for op in of_kind(plan, "device")]
    root = both["acme"].root
    assert nodes == [
        (f"{root}/dev/acmectl", "/dev/acmectl"),
        (f"{root}/dev/acme2", "/dev/acme2"),
        (f"{root}/dev/acme_dma2", "/dev/acme/dma2"),
    ]
    numbers = {node.path: node.numbers for node in both["acme"].nodes}
    wanted = ["/dev/acmectl", "/dev/acme2", "/dev/acme_dma2"]
    assert plan.devices == [numbers[path] for path in wanted]


def test_a_partition_gets_only_its_own_node_and_the_control_node(both: Inventories) -> None:
    plan = planned(spec_with("ACME_VISIBLE_DEVICES=1.0"), both)
    places = [op["destination"] for op in of_kind(plan, "device")]
    assert places == ["/dev/acmectl", "/dev/acme1.0"]


def test_a_device_with_a_missing_node_is_refused(both: Inventories) -> None:
    npus = both["acme"]
    nodes = tuple(node for node in npus.nodes if node.path != "/dev/acme_dma2")
    facts = (npus.vendor, npus.root, npus.version, npus.devices)
    both["acme"] = Inventory(*facts, nodes, npus.control)
    with pytest.raises(DriverError, match=r"ACME's driver has no node /dev/acme_dma2"):
        resolve(spec_with("ACME_VISIBLE_DEVICES=2"), Config(), inventories=both)
    assert resolved(spec_with("ACME_VISIBLE_DEVICES=0"), both).ids == ("A-0000",)


def _give(monkeypatch: pytest.MonkeyPatch, *operations: Operation) -> None:
    """Make ACME's vendor also add these operations."""
    acme = type(second_vendor.part("vendor").VENDOR)
    monkeypatch.setattr(acme, "edits", lambda *_: list(operations))


def test_requests_to_two_vendors_make_one_plan(
    both: Inventories, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = BindFile("/", "/opt/acme/libacme.so.1", "/usr/lib/libacme.so.1", ("ro",), "library")
    known = UpdateLdCache((("libacme.so.1", "/usr/lib/libacme.so.1", 3),), "libacme")
    _give(monkeypatch, known, file)
    plan = planned(spec_with("ACME_VISIBLE_DEVICES=0,2", "NVIDIA_VISIBLE_DEVICES=1"), both)
    kinds = [op.kind for op in plan.operations]
    assert kinds.count("ldcache") == 1
    assert kinds[-1] == "ldcache"
    [entry] = of_kind(plan, "ldcache")
    assert "libacme.so.1" in entry["libraries"]
    assert "libcuda.so.1" in entry["libraries"]
    places = [op["destination"] for op in of_kind(plan, "device")]
    assert len(places) == len(set(places)) == 5 + 4
    assert len(plan.devices) == len(set(plan.devices))


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        (EnvironmentSetting("ACME_DEVICES", "7", "why"), True),
        (EnvironmentSetting("ACME_DEVICES", "0", "why"), False),
        (EnvironmentSetting("ACME_DEVICES", "0", "why", front=True), True),
        (EnvironmentSetting("ACME_PLUGIN_PATH", "/theirs", "why"), True),
        (EnvironmentSetting("ACME_PLUGIN_PATH", "/theirs", "why", front=True), False),
        (EnvironmentSetting("OTHER", "7", "why"), False),
    ],
)
def test_conflicting_variables_of_two_vendors_are_refused(
    both: Inventories, monkeypatch: pytest.MonkeyPatch, theirs: EnvironmentSetting, refused: bool
) -> None:
    monkeypatch.setattr(type(NVIDIA), "environment", lambda *_: [theirs])
    spec = spec_with("ACME_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=0")
    if refused:
        with pytest.raises(RequestError) as caught:
            resolve(spec, Config(), inventories=both)
        assert "NVIDIA and ACME need different values" in caught.value.cause
        assert theirs.name in caught.value.cause
    else:
        assert theirs in resolved(spec, both).settings


def _with_node(found: Inventory, node: DeviceNode) -> Inventory:
    """Return the inventory with one more control node."""
    control = (*found.control, node.path)
    facts = (found.vendor, found.root, found.version, found.devices)
    return Inventory(*facts, (*found.nodes, node), control)


def test_conflicting_nodes_of_two_vendors_are_refused(both: Inventories) -> None:
    spec = spec_with("ACME_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=0")
    control = both["nvidia"].node("/dev/nvidiactl")
    assert control is not None
    alone = both["acme"]
    both["acme"] = _with_node(
        alone, DeviceNode("/dev/other", *control.numbers, inside=control.path)
    )
    places = [op["destination"] for op in of_kind(planned(spec, both), "device")]
    assert places.count("/dev/nvidiactl") == 1
    both["acme"] = _with_node(alone, DeviceNode("/dev/other", 9, 9, inside=control.path))
    with pytest.raises(RequestError, match="/dev/nvidiactl and /dev/other would both be"):
        planned(spec, both)


@pytest.mark.parametrize(("source", "refused"), [("/opt/acme/x", True), (None, False)])
def test_conflicting_files_of_two_vendors_are_refused(
    both: Inventories, monkeypatch: pytest.MonkeyPatch, source: str | None, refused: bool
) -> None:
    spec = spec_with("ACME_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=0")
    theirs = next(op for op in planned(spec, both).operations if isinstance(op, BindFile))
    path = source or theirs.path
    mine = BindFile("/", path, theirs.destination, theirs.options, "ours, too")
    _give(monkeypatch, mine)
    if refused:
        with pytest.raises(RequestError, match="different files at"):
            planned(spec, both)
    else:
        assert mine in planned(spec, both).operations
