"""The simulator of AWS Neuron's machines, beyond what its users' tests show."""

from pathlib import Path

import paper
import pytest

from gpuhook.ground.errors import SimulateError


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"colour": "red"}, "has no setting 'colour'"), ({"family": "Trn9"}, "no family 'Trn9'")],
)
def test_what_it_refuses(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(SimulateError, match=message):
        paper.machine("neuron", tmp_path, 1, **settings)


def test_files_are_as_the_drivers(tmp_path: Path) -> None:
    found = paper.machine("neuron", tmp_path, 3)
    folder = tmp_path / "sys/class/neuron_device/neuron1"
    assert folder.is_symlink()
    assert folder.resolve() == tmp_path / "sys/devices/virtual/neuron_device/neuron1"
    [node] = [node for node in found.nodes if node.path == "/dev/neuron1"]
    assert (folder / "dev").read_text() == f"{node.major}:1\n"
    assert (folder / "core_count").read_text() == "2"  # without a line end
    assert (folder / "connected_devices").read_text() == "0, 2\n"
    assert f"{node.major} neuron\n" in (tmp_path / "proc/devices").read_text()
    card = tmp_path / "sys/bus/pci/drivers/neuron/0000:10:00.0"
    assert (card / "device").read_text() == "0x7164\n"
    assert (card / "driver").resolve() == card.parent.resolve()
