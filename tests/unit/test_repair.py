import os
from pathlib import Path

import pytest

from gpuhook import repair
from gpuhook.containers import Container
from gpuhook.errors import ContainerError

ONE = Container("0123456789ab" + "0" * 52, "docker", 10, "python3")
TWO = Container("0123456fffff" + "0" * 52, "docker", 20, "python3")
POD = Container("pod", "", 30, "pause")


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of engines' command lines, the only one in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def engine(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "expected"),
    [(ONE.name, ONE), (ONE.name[:12], ONE), ("0123456f", TWO), ("pod", POD)],
)
def test_by_id(engines: Path, name: str, expected: Container) -> None:
    assert repair.select([name], [ONE, TWO, POD]) == [expected]


def test_by_the_engines_name(engines: Path) -> None:
    engine(engines, "docker", "exit 1")
    engine(engines, "podman", f'[ "$6" = web ] && echo {TWO.name}')
    assert repair.select(["web", "pod"], [ONE, TWO, POD]) == [TWO, POD]


@pytest.mark.parametrize(
    ("name", "words"),
    [("0123456", "several"), ("po", "no running"), ("", "no running"), ("--all", "no running")],
)
def test_names_that_mean_none_or_several(engines: Path, name: str, words: str) -> None:
    with pytest.raises(ContainerError, match=rf"{words}.*as `gpuhook list` or the engine shows it"):
        repair.select([name], [ONE, TWO, POD])


def test_only_mounted_nodes_count() -> None:
    """Our own /dev/null lies in a mounted /dev, but is not mounted itself."""
    null = (1, 3)
    assert repair.mounted_devices(os.getpid(), [null]) == []


def test_a_process_that_has_ended() -> None:
    with pytest.raises(ContainerError, match="can't be looked into"):
        repair.mounted_devices(2**22 + 1, [])
