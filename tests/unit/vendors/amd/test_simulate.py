"""AMD's simulator: what its settings make, and what it refuses."""

from pathlib import Path

import amd_machine
import pytest
from paper import NodesOnPaper

from gpuhook.ground.errors import SimulateError
from gpuhook_simulate.majors import machines_devices
from gpuhook_simulate.vendors import amd as simulate

REFUSED = [
    (1, {"colour": "red"}, "no setting 'colour'.*Use some of split, partitions"),
    (1, {"split": "x"}, "split='x' can't be simulated.*GPUs that are partitioned"),
    (1, {"partitions": "5"}, "partitions='5' can't be simulated.*1, 2, 3, 4, 6 or 8"),
    (1, {"partitions": ""}, "partitions=''"),
    (1, {"spelling": ""}, "spelling=''"),
    (1, {"ids": "mine"}, "ids='mine'"),
    (1, {"groups": ""}, "groups=''"),
    (65, {}, "65 of AMD's GPUs can't be simulated.*Give 64 or fewer"),
    (9, {"split": "0"}, "Give 8 or fewer"),
]


@pytest.mark.parametrize(("count", "settings", "sentence"), REFUSED)
def test_what_is_refused(
    tmp_path: Path, count: int, settings: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SimulateError, match=sentence):
        simulate.simulate(NodesOnPaper(str(tmp_path)), count, settings)
    assert not [*tmp_path.iterdir()]


def test_what_is_said(tmp_path: Path) -> None:
    made = NodesOnPaper(str(tmp_path))
    lines = simulate.simulate(made, 2, {"split": "1", "partitions": "2", "bmc": "yes"})
    assert lines == [
        "GPU 0 at 0000:05:00.0: card1, renderD128",
        "GPU 1 at 0000:08:00.0: card9, renderD136, card10, renderD137",
    ]
    assert len(made.nodes) == 2 + 2 * 16  # of kfd, the controller and all places for partitions


def test_nodes_have_numbers_of_no_driver_here(tmp_path: Path) -> None:
    """A simulated card must not be a real one."""
    made = NodesOnPaper(str(tmp_path))
    simulate.simulate(made, 1, {})
    used = {line.split()[0] for line in machines_devices().splitlines() if line[:1] == " "}
    assert not {str(node.major) for node in made.nodes.values()} & used


def test_as_many_as_there_can_be(tmp_path: Path) -> None:
    assert len(amd_machine.simulated(tmp_path / "whole", 64).devices) == 64
    every = ",".join(map(str, range(8)))
    assert len(amd_machine.simulated(tmp_path / "split", 8, split=every).devices) == 64


def test_groups(tmp_path: Path) -> None:
    found = amd_machine.simulated(tmp_path, 1, groups="7")
    assert {node.gid for node in found.nodes} == {7}
