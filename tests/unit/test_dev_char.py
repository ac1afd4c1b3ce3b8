"""The links by which systemd finds devices, made to devices that every Linux has."""

from pathlib import Path

from gpuhook.dev_char import make_links
from gpuhook.inventory import Node

NULL = Node("/dev/null", 1, 3)


def test_a_link_leads_to_the_node(tmp_path: Path) -> None:
    folder = tmp_path / "char"
    assert make_links([NULL], str(folder)) == [f"{folder}/1:3"]
    link = folder / "1:3"
    assert link.is_symlink()
    assert not str(link.readlink()).startswith("/")
    assert link.samefile("/dev/null")


def test_in_dev_char_itself_links_are_short(tmp_path: Path) -> None:
    made = make_links([NULL], str(tmp_path))
    assert made
    assert (tmp_path / "1:3").readlink().parts[-2:] == ("dev", "null")


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "1:3").symlink_to("elsewhere")
    assert make_links([NULL], str(tmp_path)) == []
    assert str((tmp_path / "1:3").readlink()) == "elsewhere"


def test_nodes_that_the_host_does_not_have(tmp_path: Path) -> None:
    missing = Node("/dev/no-such-node", 195, 0)
    other_numbers = Node("/dev/null", 195, 0)
    no_device = Node("/etc/passwd", 0, 0)
    assert make_links([missing, other_numbers, no_device], str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
