"""AWS Neuron's requests: which devices, their neighbours, and the cores that they have."""

import json
from pathlib import Path
from typing import Any

import machines
import paper
import pytest
from paper import spec_with
from steps import resolve

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import DriverError, LostDeviceError, RequestError, UnknownDeviceError
from gpuhook.start.cdi.generate import Source, generate
from gpuhook.start.inventory.model import Inventory as AnyInventory
from gpuhook.start.plan import image
from gpuhook.start.plan.operations import Plan
from gpuhook.start.planner import make_plan
from gpuhook.start.resolve import Resolved
from gpuhook.vendors.neuron.model import Inventory
from gpuhook.vendors.neuron.vendor import VENDOR, between, core_list, core_sizes, cores, ranges

ASK = "AWS_NEURON_VISIBLE_DEVICES"
RT = "NEURON_RT_VISIBLE_CORES"


@pytest.fixture
def trn1(tmp_path: Path) -> AnyInventory:
    """A machine with 16 devices of two cores each."""
    return paper.machine("neuron", tmp_path / "trn1", 16)


def resolved(found: AnyInventory, *env: str) -> Resolved:
    answer = resolve(spec_with(*env), Config(), inventories={"neuron": found})
    assert answer is not None
    return answer


def planned(found: AnyInventory, *env: str) -> Plan:
    answer = resolved(found, *env)
    return make_plan(answer.grants, image.unknown(), answer.groups)


def nodes(plan: Plan) -> list[str]:
    return [op.to_json()["destination"] for op in plan.operations if op.kind == "device"]


# Which devices -------------------------------------------------------------------------------


@pytest.mark.vectors("vendor_neuron", "neuron.request")
def test_requests(case: dict[str, Any], tmp_path: Path) -> None:
    given, count = case["input"], case["input"]["devices_of_machine"]
    if "env" not in given:  # --device is the engine's
        made = [{"path": path, "type": "c"} for path in given["device_options"]]
        spec = spec_with("PATH=/bin", linux={"devices": made})
        assert resolve(spec, Config(), inventories={}) is None
        assert [each["path"] for each in made] == case["expected"]["nodes"]
        return
    found = paper.machine("neuron", tmp_path, count)
    assert nodes(planned(found, *given["env"])) == case["expected"]["nodes"]


@pytest.mark.vectors("vendor_neuron", "neuron.kubernetes")
def test_what_a_device_plugin_gives_is_not_ours(case: dict[str, Any]) -> None:
    env = [f"{name}={value}" for name, value in case["expected"]["env"].items()]
    assert resolve(spec_with(*env), Config(), inventories={}) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("all", range(16)),
        ("All", range(16)),
        ("none", ()),
        ("2-4", (2, 3, 4)),
        (" 3 , 2,,3 ", (3, 2)),
        ("9-11", (9, 10, 11)),
        ("00a1b2c3d4e5000b", (11,)),
        ("aws.amazon.com/neuron=2,aws.amazon.com/neuron=3", (2, 3)),
        ("aws.amazon.com/neuron=neuron2", (2,)),
        ("aws.amazon.com/neuron=all", range(16)),
    ],
)
def test_words(trn1: AnyInventory, words: str, expected: tuple[int, ...]) -> None:
    assert nodes(planned(trn1, f"{ASK}={words}")) == [f"/dev/neuron{n}" for n in expected]


@pytest.mark.parametrize("word", ["", "void", "VOID", " , "])
def test_no_request(word: str) -> None:
    assert resolve(spec_with(f"{ASK}={word}"), Config(), inventories={}) is None


@pytest.mark.parametrize("word", ["16", "0-16", "neuron0", "/dev/neuron0", "1.0", "-1"])
def test_what_does_not_exist(trn1: AnyInventory, word: str) -> None:
    with pytest.raises(UnknownDeviceError, match=r"no Neuron device .* it has 0 \(00a1b2c3d4e5"):
        resolved(trn1, f"{ASK}={word}")


def test_a_device_that_is_not_done(tmp_path: Path) -> None:
    found = paper.machine("neuron", tmp_path, 4, half_made="3")
    assert nodes(planned(found, f"{ASK}=all")) == ["/dev/neuron0", "/dev/neuron1", "/dev/neuron2"]
    with pytest.raises(LostDeviceError, match="Neuron device 3 can't be used: the driver isn't"):
        resolved(found, f"{ASK}=3")


def test_a_node_that_is_missing(tmp_path: Path) -> None:
    found = paper.machine("neuron", tmp_path, 4, no_node="2")
    with pytest.raises(DriverError, match=r"AWS Neuron's driver has no node /dev/neuron2"):
        resolved(found, f"{ASK}=2")
    assert nodes(planned(found, f"{ASK}=0,1")) == ["/dev/neuron0", "/dev/neuron1"]


def test_beside_another_vendor(trn1: AnyInventory) -> None:
    spec = spec_with(f"{ASK}=1", "NVIDIA_VISIBLE_DEVICES=0")
    both = {"nvidia": machines.machine(machines.gpu(0, 3)), "neuron": trn1}
    answer = resolve(spec, Config(), inventories=both)
    assert answer is not None
    found = nodes(make_plan(answer.grants, image.unknown(), answer.groups))
    assert [path for path in found if "neuron" in path] == ["/dev/neuron1"]
    assert "/dev/nvidia3" in found


# Neighbours ----------------------------------------------------------------------------------


@pytest.mark.vectors("vendor_neuron", "neuron.contiguous")
def test_neighbours(case: dict[str, Any], trn1: AnyInventory) -> None:
    devices = case["input"]["devices"]
    asked = f"{ASK}={','.join(map(str, devices))}"
    if case["expected"]["contiguous"]:
        assert resolved(trn1, asked).ids
        return
    with pytest.raises(RequestError, match="aren't neighbours: Neuron's runtime opens all from"):
        resolved(trn1, asked)


@pytest.mark.parametrize("words", ["3,2", "5,3,4", "9,10,11", "15,0-14"])
def test_neighbours_in_any_order(trn1: AnyInventory, words: str) -> None:
    assert resolved(trn1, f"{ASK}={words}").ids


def test_what_to_ask_for_instead(trn1: AnyInventory, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        resolved(trn1, f"{ASK}=0,9,3")
    assert "The Neuron devices 0, 3, 9 are" in caught.value.cause
    assert caught.value.cause.endswith("fails without 1-2, 4-8")
    assert caught.value.remedy.startswith("Ask for 0-9, or")
    gap = paper.machine("neuron", tmp_path / "gap", 5, gap="1")
    with pytest.raises(RequestError) as caught:
        resolved(gap, f"{ASK}=all")
    assert caught.value.remedy.startswith("Ask for one run of 0, 2-4, or")
    assert resolved(gap, f"{ASK}=2-4").ids


def test_between() -> None:
    assert between([]) == between([7]) == between([8, 7]) == []
    assert between([10, 2]) == [*range(3, 10)]


# Cores ---------------------------------------------------------------------------------------


@pytest.mark.vectors("vendor_neuron", "neuron.cores", "neuron.core_owner")
def test_cores(case: dict[str, Any]) -> None:
    given, expected = case["input"], case["expected"]
    each = given["cores_per_device"]
    if "core" in given:
        assert given["core"] in cores([expected["device"]], each)
    else:
        assert cores(given["devices"], each) == expected["cores"]


@pytest.mark.vectors("vendor_neuron", "neuron.core_list")
def test_core_lists(case: dict[str, Any]) -> None:
    found = core_list(case["input"].get(RT, ""))
    assert (list(found) or "all") == case["expected"]["cores"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,2-3", (0, 2, 3)),
        (" 1 , 1", (1,)),
        ("4-3", ()),
        ("", ()),
        ("x", ()),
        ("1,x", ()),
        ("1-", ()),
        ("-1", ()),
        ("0-99999999999999", ()),
        ("9" * 5000, ()),
        ("٣", ()),
    ],
)
def test_core_lists_and_what_is_none(text: str, expected: tuple[int, ...]) -> None:
    assert core_list(text) == expected


@pytest.mark.parametrize(
    ("devices", "asked", "said"),
    [
        ("12", "0-1", "these have 24-25"),
        ("12,13", "24-28", "these have 24-27"),
        ("12,13", "24-27", ""),
        ("12", "25", ""),
        ("12", "nonsense", ""),
        ("none", "0", ""),
    ],
)
def test_cores_of_other_devices_are_said(
    trn1: AnyInventory, devices: str, asked: str, said: str
) -> None:
    warnings = resolved(trn1, f"{ASK}={devices}", f"{RT}={asked}").warnings()
    assert [text.partition(", and ")[2] for text in warnings] == ([said] if said else [])


def test_joined_cores(tmp_path: Path) -> None:
    """Those of Trainium2 are used two by two or each alone: both are right."""
    found = paper.machine("neuron", tmp_path, 16, family="Trn2")
    for asked in ("4-7", "8-15"):
        assert resolved(found, f"{ASK}=1", f"{RT}={asked}").warnings() == []
    [text] = resolved(found, f"{ASK}=1", f"{RT}=0-3").warnings()
    assert text.endswith("these have 8-15 or 4-7")
    assert core_sizes(8) == (8, 4)
    assert core_sizes(4) == (4,)


def test_the_applications_variable_is_never_ours(trn1: AnyInventory) -> None:
    answer = resolved(trn1, f"{ASK}=12", f"{RT}=0")
    assert answer.settings == []
    assert answer.groups == {}


def test_unknown_cores_say_nothing(tmp_path: Path) -> None:
    found = paper.machine("neuron", tmp_path, cores="0")
    assert resolved(found, f"{ASK}=1", f"{RT}=99").warnings() == []


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([3, 1, 2, 9, 9]) == "1-3, 9"


# The rest ------------------------------------------------------------------------------------


def test_an_inventory_is_saved_without_loss(trn1: AnyInventory) -> None:
    assert Inventory.from_json(json.loads(json.dumps(trn1.to_json()))) == trn1
    header, rows = trn1.table()
    assert header == ("INDEX", "NAME", "CORES", "SERIAL", "STATE")
    assert rows[10] == ("10", "Trainium1", 2, "00a1b2c3d4e5000a", "-")


def test_a_document(trn1: AnyInventory, tmp_path: Path) -> None:
    made = generate(Source(VENDOR, trn1, Config(), "/hook"), ("index",)).document
    assert made["kind"] == "aws.amazon.com/neuron"
    assert len(made["devices"]) == 17
    assert "hooks" not in made["containerEdits"]
    assert made["containerEdits"]["env"] == [f"{ASK}=void"]
    gap = paper.machine("neuron", tmp_path / "gap", 4, gap="1")
    found = generate(Source(VENDOR, gap, Config(), "/hook"), ("index",))
    assert [each["name"] for each in found.document["devices"]] == ["0", "2", "3"]
    assert (
        "There is no device all: The Neuron devices 0, 2-3 aren't neighbours" in found.warnings[0]
    )
