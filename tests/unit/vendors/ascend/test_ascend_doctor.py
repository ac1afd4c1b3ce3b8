"""The doctor's findings on Ascend's driver."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fabricated import Tree
from node_files import Machine

from gpuhook.tools.doctor import Case
from gpuhook.tools.doctor import examine as examine_case
from gpuhook.tools.vendors.ascend import doctor
from gpuhook.vendors.ascend.model import LISTS
from gpuhook.vendors.ascend.vendor import VENDOR

Found = list[tuple[str, str, str]]
Examine = Callable[..., Found]


@pytest.fixture
def examine(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """A function that returns findings on a simulated machine, as (status, check, message)."""

    def run(made: Machine | None = None) -> Found:
        case: Case = tree.case
        case.config.driver_roots = (f"ascend={tmp_path}/ascend",)
        if made is not None:
            monkeypatch.setattr(VENDOR, "discover", lambda _: made.look(), raising=False)
        findings = examine_case(case, doctor.CHECKS.driver)
        return [(str(each.status), each.check, each.message) for each in findings]

    return run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "ascend"


def test_a_machine_in_order_has_one_ok_finding(examine: Examine, place: Path) -> None:
    found = examine(Machine("ascend", place, 2, vnpus="116"))
    text = "Ascend's driver 24.1.rc3 has 3 NPUs and vNPUs"
    assert found == [("ok", "ascend-devices", text)]


def test_a_machine_without_npus_has_no_findings(examine: Examine, place: Path) -> None:
    (place / "sys/bus/pci/devices/0000:00:05.0").mkdir(parents=True)
    assert examine() == []
    (place / "sys/bus/pci/devices/0000:00:05.0/vendor").write_text("0x19e5\n")
    (place / "sys/bus/pci/devices/0000:00:05.0/device").write_text("0x1822\n")  # network
    assert examine() == []


def test_an_npu_without_a_driver_is_a_failure(examine: Examine, place: Path) -> None:
    folder = place / "sys/bus/pci/devices/0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x19e5\n")
    (folder / "device").write_text("0xd802\n")
    assert examine() == [("failure", "ascend-devices", "Ascend's driver isn't loaded")]


def test_a_missing_driver_root_is_a_failure(examine: Examine) -> None:
    [(status, _, message)] = examine()
    assert status == "failure"
    assert "can't be read" in message


def test_missing_nodes_and_wrong_numbers_are_reported(examine: Examine, place: Path) -> None:
    made = Machine("ascend", place, 2, missing="davinci0")
    made.node("/dev/davinci1", 9, 9)
    found = examine(made)
    nodes = "Ascend's driver has no node /dev/davinci0"
    assert ("failure", "ascend-nodes", nodes) in found
    [(status, _, message)] = [each for each in found if "9:9" in each[2]]
    assert status == "warning"
    assert message.startswith("NPU 1 (npu-1) can't be used: /dev/davinci1 has the numbers 9:9")


def test_invalid_file_lists_are_reported(examine: Examine, place: Path) -> None:
    made = Machine("ascend", place, 1)
    made.write(f"{LISTS}/base.list", "/proc\n/proc/devices\n")
    made.write(f"{LISTS}/open.list", "/x\n").chmod(0o666)
    found = [each for each in examine(made) if each[1] == "ascend-lists"]
    assert [status for status, _, _ in found] == ["warning", "warning", "failure"]
    assert "The list base has /proc, which belongs to /proc" in found[0][2]
    assert found[2][2] == "The list of files open can't be used: non-root users may write to it"


@pytest.mark.parametrize(
    ("chip", "text", "words"),
    [
        ("910B", '{"version":"1.2"}', ""),
        ("910B", "{}", ""),
        ("910B", '{"version":"2.0"}', "has version 2.0, which is not for Ascend 910B"),
        ("950", '{"version":"1.0"}', "has version 1.0, which is not for Ascend 950"),
        ("950", '{"version":"2.0"}', ""),
        ("950", "no", "isn't JSON"),
    ],
)
def test_an_invalid_topology_file_is_reported(
    examine: Examine, place: Path, chip: str, text: str, words: str
) -> None:
    made = Machine("ascend", place, 1, chip=chip)
    made.write("/etc/hccl_rootinfo.json", text)
    found = [message for _, check, message in examine(made) if check == "ascend-topology"]
    assert [words in message for message in found] == ([True] if words else [])
