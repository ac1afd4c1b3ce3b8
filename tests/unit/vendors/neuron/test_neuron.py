"""AWS Neuron's requests: which devices, their neighbours, and the cores that they have."""

from pathlib import Path
from typing import Any

import paper
import pytest
from asking import places, planned, resolved
from paper import spec_with
from steps import resolve

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import LostDeviceError, RequestError
from gpuhook.start.cdi.generate import Source, generate
from gpuhook.start.inventory.model import Inventory as AnyInventory
from gpuhook.vendors.neuron.vendor import VENDOR, between, core_list, core_sizes, cores, ranges

ASK = "AWS_NEURON_VISIBLE_DEVICES"
RT = "NEURON_RT_VISIBLE_CORES"


@pytest.fixture
def trn1(tmp_path: Path) -> AnyInventory:
    """A machine with 16 devices of two cores each."""
    return paper.machine("neuron", tmp_path / "trn1", 16)


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
    assert places(planned(found, *given["env"])) == case["expected"]["nodes"]


@pytest.mark.vectors("vendor_neuron", "neuron.kubernetes")
def test_what_a_device_plugin_gives_is_not_ours(case: dict[str, Any]) -> None:
    env = [f"{name}={value}" for name, value in case["expected"]["env"].items()]
    assert resolve(spec_with(*env), Config(), inventories={}) is None


def test_a_device_that_is_not_done(tmp_path: Path) -> None:
    found = paper.machine("neuron", tmp_path, 4, half_made="3")
    assert places(planned(found, f"{ASK}=all")) == ["/dev/neuron0", "/dev/neuron1", "/dev/neuron2"]
    with pytest.raises(LostDeviceError, match="Neuron device 3 can't be used: the driver isn't"):
        resolved(found, f"{ASK}=3")


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


def test_what_is_listed(trn1: AnyInventory) -> None:
    header, rows = trn1.table()
    assert header == ("INDEX", "NAME", "CORES", "SERIAL", "STATE")
    assert rows[10] == ("10", "Trainium1", 2, "00a1b2c3d4e5000a", "-")


def test_a_document_where_not_all_are_neighbours(tmp_path: Path) -> None:
    gap = paper.machine("neuron", tmp_path / "gap", 4, gap="1")
    found = generate(Source(VENDOR, gap, Config(), "/hook"), ("index",))
    assert [each["name"] for each in found.document["devices"]] == ["0", "2", "3"]
    assert (
        "There is no device all: The Neuron devices 0, 2-3 aren't neighbours" in found.warnings[0]
    )
