"""Exclusive devices that a container requests, from gpu-py's selection and its config.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import second_vendor
from second_vendor import spec_with
from steps import resolve

from gpuhook.base.cgroup.access import device_rules
from gpuhook.base.config.model import Config
from gpuhook.base.errors import HeldError
from gpuhook.base.oci.spec import ContainerState, Spec
from gpuhook.core import spec_devices
from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
from gpuhook.core.records import exclusive_request, leases
from gpuhook.core.resolve import Allocation
from gpuhook.vendors.registry import all_vendors

KIND = "acme.example/npu"
CARD = "maker.example/card"
STATE = ContainerState("web", 7, "/bundle", None)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    second_vendor.know(monkeypatch)


@pytest.fixture
def npus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """A host with NPUs, of which NPU 1 is split."""
    made = second_vendor.machine(tmp_path / "acme", split="1")
    monkeypatch.setattr(exclusive_request, "get_inventory", lambda *_, **__: made)
    return made


def config_of(*kinds: str, mode: str = "hook") -> Config:
    config = Config()
    config.exclusive, config.mode = kinds, mode
    config.state_dir = "/dev/null/none"
    config.cdi_kinds_from_environment = ("maker.example/card",)
    return config


def described(
    spec: dict[str, Any], config: Config, inventory: Inventory
) -> tuple[Allocation, dict[str, Any]]:
    """Return the resolved request of a spec, and the record of its container."""
    resolved = resolve(spec, config, inventories={"acme": inventory})
    assert resolved is not None
    whole = Spec("spec", json.dumps(spec))
    return resolved, exclusive_request.describe(
        STATE, whole, resolved.grants, resolved.cdi_devices, all_vendors(config), config
    )


@pytest.mark.parametrize(
    ("word", "kinds", "concerned"),
    [
        ("0", (KIND,), True),
        ("all", (KIND,), True),
        ("none", (KIND,), False),
        ("0", ("nvidia.com/gpu",), False),
        ("maker.example/card=a", ("maker.example/card",), True),
        ("maker.example/card=a", (KIND,), False),
    ],
)
def test_only_a_request_for_exclusive_devices_is_checked(
    npus: Inventory, word: str, kinds: tuple[str, ...], concerned: bool
) -> None:
    config = config_of(*kinds)
    resolved, record = described(spec_with(f"ACME_VISIBLE_DEVICES={word}"), config, npus)
    assert bool(leases.wants(record, kinds)) == concerned
    spec = Spec("spec", json.dumps(spec_with()))
    assert exclusive_request.check(spec, resolved, all_vendors(config), config) == concerned


def test_a_device_part_is_recorded_with_its_whole_device(npus: Inventory) -> None:
    spec = spec_with("ACME_VISIBLE_DEVICES=1.0")
    _, record = described(spec, config_of(KIND), npus)
    [given] = record["given"]
    assert (given["kind"], given["selected"]) == (KIND, ["A-0001/0"])
    assert set(given["nodes"]) == {"A-0001/0", "A-0001"}
    assert record["documents"] == []


def test_devices_of_cdi_specs_are_identified_by_their_nodes(npus: Inventory) -> None:
    """A CDI spec may be old, so a name in it doesn't prove which device it gives."""
    nodes = [npus.node("/dev/acme2"), npus.node("/dev/acme_dma2")]
    entries = [
        {"path": node.inside or node.path, "type": "c", "major": node.major, "minor": node.minor}
        for node in nodes
        if node is not None
    ]
    spec = spec_with(f"ACME_VISIBLE_DEVICES={KIND}=0,maker.example/card=a")
    config = config_of(KIND, "maker.example/card", mode="cdi")
    _, record = described({**spec, "linux": {"devices": entries}}, config, npus)
    assert [given["selected"] for given in record["given"]] == [["A-0002"]]
    assert record["documents"] == ["maker.example/card=a"]
    _, record = described(spec, config, npus)
    assert record["documents"] == [f"{KIND}=0", "maker.example/card=a"]


# By nodes, whoever gave them -------------------------------------------------------------------

NULL, ZERO, FULL = (1, 3), (1, 5), (1, 7)  # nodes that every host has


def node(path: str, numbers: tuple[int, int], kind: str = "c") -> dict[str, Any]:
    return {"path": path, "type": kind, "major": numbers[0], "minor": numbers[1]}


def mount(source: str, destination: str = "/dev/else") -> dict[str, Any]:
    return {"source": source, "destination": destination, "options": ["bind"]}


def gives(*nodes: dict[str, Any], mounts: Sequence[Any] = (), **linux: Any) -> dict[str, Any]:
    """Return a config.json with nodes and mounts, whose environment requests nothing."""
    return {"linux": {"devices": [*nodes], **linux}, "mounts": [*mounts]}


MAPPED = [{"type": "user"}]
EVERYTHING = {"devices": [{"allow": True, "access": "rwm"}]}
PRIVILEGED = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
# Ways for the node /dev/null to come into a container, and some that only look like it.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "the node": (gives(node("/dev/x0", NULL)), True),
    "the node by another name": (gives(node("/dev/else", NULL)), True),
    "unbuffered": (gives(node("/dev/x0", NULL, "u")), True),
    "without a type": (gives({"path": "/dev/x0", "major": 1, "minor": 3}), True),
    "a block device": (gives(node("/dev/x0", NULL, "b")), False),
    "another node by its name": (gives(node("/dev/null", (77, 3))), False),
    "a mount": (gives(mounts=[mount("/dev/null")]), True),
    "a mount by a link": (gives(mounts=[mount("/dev/../proc/self/root/dev/null")]), True),
    "a mount beside the bundle": (gives(mounts=[mount("dev/null")]), True),
    "a mount of a folder": (gives(mounts=[mount("/dev")]), False),
    "a user namespace": (gives(node("/dev/null", (77, 3)), namespaces=MAPPED), True),
    "privileged": (
        {**gives(node("/dev/x0", NULL), resources=EVERYTHING), "process": PRIVILEGED},
        False,
    ),
    "odd": (gives(node("/dev/x0", ([], {})), mounts=[3, {}, mount("/\0")]), False),  # type: ignore[arg-type]
}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """A host with device A, which has the node /dev/null and a node that it shares with B.

    B has the parts B/0 and B/1, which have a node in common, too.
    """
    nodes = {"/dev/null": NULL, "/dev/zero": ZERO, "/dev/full": FULL, "/x0": (9, 0), "/x1": (9, 1)}
    nodes.update({"/parts": (9, 9), "/control": (9, 10)})
    devices = {"A": ("/dev/null", "/dev/full"), "B": ("/dev/zero", "/dev/full")}
    made = Inventory(
        "acme",
        "/",
        "1",
        (
            *(Device(name, name, {}, paths) for name, paths in devices.items()),
            *(Device(f"B/{n}", f"B/{n}", {}, ("/parts", f"/x{n}"), parent="B") for n in "01"),
        ),
        tuple(DeviceNode(path, *numbers) for path, numbers in nodes.items()),
        control=("/control",),
    )
    monkeypatch.setattr(exclusive_request, "get_inventory", lambda *_, **__: made)
    monkeypatch.setattr(spec_devices, "in_first_user_namespace", lambda: True)
    return made


def held(spec: dict[str, Any], *kinds: str, config: Config | None = None) -> dict[str, Any]:
    """Return the record of a container that requested nothing from gpuhook."""
    config = config or config_of(*kinds)
    return exclusive_request.describe(
        STATE, Spec("/spec", json.dumps(spec)), (), (), all_vendors(config), config
    )


@pytest.mark.protects(
    "claimed-node",
    "a container holds an exclusive device by nodes of any name or type, or mounts",
)
@pytest.mark.protects(
    "opened-anyhow",
    "a device that may be opened only for reading or only for writing counts as allocated",
    instead="return allowed(rules, devices)",
)
@pytest.mark.parametrize(("spec", "has"), WAYS.values(), ids=WAYS.keys())
def test_a_container_holds_a_device_by_its_node_or_mount(
    parts: Inventory, spec: dict[str, Any], has: bool
) -> None:
    record = held(spec, KIND)
    assert [each["selected"] for each in record["given"]] == ([["A"]] if has else [])
    assert bool(leases.wants(record, (KIND,))) == has
    assert all(each["devices"] == [] for each in record["given"]), "what no rule allows"


def rule(access: str = "rwm", **numbers: int) -> dict[str, Any]:
    return {"allow": True, "type": "c", "access": access, **numbers}


RULES: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    "its own": ([rule(major=240, minor=1)], [1]),
    "of the major": ([rule(major=240)], [1, 2, 11]),
    "of every device, without privilege": (EVERYTHING["devices"], [1, 2, 11]),
    "of every device of that type": ([rule()], [1, 2, 11]),
    "to make nodes alone": ([rule("m")], []),
    "to read alone": ([rule("rm", major=240, minor=1)], [1]),
    "to write alone": ([rule("w", major=240, minor=1)], [1]),
    "taken back": ([rule(major=240), {"allow": False, "access": "rwm"}], []),
    "of the kernel's own devices": ([rule(major=1), rule(major=5)], []),
}


@pytest.mark.protects(
    "claimed-rule",
    "a container holds each exclusive device that its cgroup rules allow",
    instead="return numbers & self._nodes",
)
@pytest.mark.protects(
    "claimed-unprivileged",
    "an unprivileged container with a rule for all devices holds the exclusive ones",
    instead="if not any(map(spec_devices.allows_all, rules)):",
)
@pytest.mark.protects(
    "opened-anyhow",
    "a device that may be opened only for reading or only for writing counts as allocated",
    instead="return allowed(rules, devices)",
)
@pytest.mark.parametrize(("rules", "minors"), RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("by_document", [False, True])
def test_a_container_holds_a_device_by_a_cgroup_rule(
    cards: Config,
    monkeypatch: pytest.MonkeyPatch,
    rules: list[dict[str, Any]],
    minors: list[int],
    by_document: bool,
) -> None:
    """If a rule allows a device, a container can make its node, as Docker's capabilities permit."""
    spec = gives(resources={"devices": rules})
    if by_document:
        record = held(spec, config=cards)
        assert [*record["nodes"].get(CARD, {})] == [f"240:{minor}" for minor in minors]
        return
    names = {minor: f"/dev/acme{minor}" for minor in (1, 2, 11)}
    made = Inventory(
        "acme",
        "/",
        "1",
        tuple(Device(str(minor), str(minor), {}, (path,)) for minor, path in names.items()),
        tuple(DeviceNode(path, 240, minor) for minor, path in names.items()),
    )
    monkeypatch.setattr(exclusive_request, "get_inventory", lambda *_, **__: made)
    record = held(spec, KIND)
    given = [name for each in record["given"] for name in each["selected"]]
    assert given == [str(minor) for minor in minors]


def test_a_record_lists_only_nodes_that_may_be_opened(parts: Inventory) -> None:
    """``repair`` opens no node that is present but that the container may not open."""
    rules = {"devices": device_rules([NULL])}
    spec = gives(node("/dev/a", NULL), mounts=[mount("/dev/full")], resources=rules)
    [given] = held(spec, KIND)["given"]
    assert given["nodes"] == {"A": [[*NULL], [*FULL]]}
    assert given["devices"] == [[*NULL]]


@pytest.mark.parametrize(
    ("numbers", "selected"),
    [
        ([NULL, FULL], ["A"]),
        ([FULL], []),
        ([(9, 10)], []),
        ([ZERO], ["B"]),
        ([ZERO, (9, 9), (9, 0)], ["B/0"]),
        ([(9, 9), (9, 0), (9, 1), NULL], ["A", "B/0", "B/1"]),
        ([(9, 9), ZERO], ["B"]),
    ],
)
def test_nodes_of_parts_and_shared_nodes_identify_the_right_devices(
    parts: Inventory, numbers: list[tuple[int, int]], selected: list[str]
) -> None:
    record = held(gives(*(node(f"/dev/{at}", pair) for at, pair in enumerate(numbers))), KIND)
    assert [name for each in record["given"] for name in each["selected"]] == selected


def test_the_record_has_requested_devices_and_those_of_config_json(npus: Inventory) -> None:
    """The record has one entry for each vendor; a part comes with the node of its whole device."""
    whole, other = npus.node("/dev/acme1"), npus.node("/dev/acme2")
    assert whole is not None
    assert other is not None
    spec = spec_with("ACME_VISIBLE_DEVICES=1.0")
    spec["linux"]["devices"] = [node("/dev/a", whole.numbers), node("/dev/b", other.numbers)]
    _, record = described(spec, config_of(KIND), npus)
    [given] = record["given"]
    assert sorted(given["selected"]) == ["A-0001/0", "A-0002"]
    assert given["request"] == {"source": "environment", "devices": ["1.0"]}


@pytest.fixture
def cards(tmp_path: Path) -> Config:
    """CDI specs of cards that gpuhook doesn't know, and of another kind with a card's node."""
    control = {"path": "/dev/control", "type": "c", "major": 240, "minor": 255}

    def device(name: str, *minors: int) -> dict[str, Any]:
        nodes = [node(f"/dev/card{minor}", (240, minor)) for minor in minors]
        return {"name": name, "containerEdits": {"deviceNodes": [*nodes, control]}}

    every = [device("a", 1, 11), device("uuid-a", 1, 11), device("b", 2), device("all", 1, 2, 11)]
    every.append(
        {"name": "gone", "containerEdits": {"deviceNodes": [{"path": "/no/such", "type": "c"}]}}
    )
    document = {"cdiVersion": "0.5.0", "kind": CARD, "devices": every}
    (tmp_path / "cards.json").write_text(json.dumps(document))
    config = config_of(CARD)
    config.cdi_spec_dirs = (str(tmp_path),)
    return config


def test_a_privileged_container_holds_only_its_requested_cdi_devices(cards: Config) -> None:
    """The config.json of a privileged container has all nodes of the host."""
    every = [node(f"/dev/card{minor}", (240, minor)) for minor in (1, 2, 11)]
    spec = spec_with(f"NVIDIA_VISIBLE_DEVICES={CARD}=uuid-a")
    spec["linux"] = {**spec["linux"], "devices": every, "resources": EVERYTHING}
    spec["process"].update(PRIVILEGED)
    whole = Spec("/spec", json.dumps(spec))
    record = exclusive_request.describe(
        STATE, whole, (), (f"{CARD}=uuid-a",), all_vendors(cards), cards
    )
    assert record["nodes"] == {CARD: {"240:1": f"{CARD}=a", "240:11": f"{CARD}=a"}}
    assert (
        exclusive_request.describe(STATE, whole, (), (), all_vendors(cards), cards)["nodes"] == {}
    )


@pytest.mark.parametrize(
    ("minors", "owners"),
    [((1,), ["a"]), ((11,), ["a"]), ((1, 2), ["a", "b"]), ((255,), []), ((7,), []), ((), [])],
)
def test_devices_known_only_from_cdi_specs_are_held_by_their_nodes(
    cards: Config, minors: tuple[int, ...], owners: list[str]
) -> None:
    """A node counts under whichever name or CDI spec it was requested."""
    record = held(gives(*(node("/dev/x", (240, minor)) for minor in minors)), config=cards)
    assert [*record["nodes"].get(CARD, {}).values()] == [f"{CARD}={name}" for name in owners]
    assert bool(leases.wants(record, (CARD,))) == bool(owners)
    other = held(gives(node("/dev/y", (240, 1)), node("/dev/z", (240, 255))), config=cards)
    if "a" in owners and 1 in minors:
        with pytest.raises(HeldError, match=f"{CARD}=a is in use by"):
            leases.refuse(record, [other], cards.exclusive)
    else:
        leases.refuse(record, [other], cards.exclusive)
