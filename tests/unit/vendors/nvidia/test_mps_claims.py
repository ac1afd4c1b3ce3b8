"""Places of MPS clients: the existing claims decide whether a container gets one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhook.base.errors import HeldError
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core.records import records
from gpuhook.vendors.nvidia import mps
from gpuhook.vendors.nvidia.mps_mounts import BindPipe

PLACES = ("server/c00", "server/c01")


class Client(BindPipe):
    """A container that requests GPU-a from a daemon of version 3 with two places."""

    def __init__(self, folder: Path) -> None:
        gpu = mps.SharedDevice("GPU-a", 0, 0)
        state = mps.MpsState(3, (gpu,), "1-1", 0, 2, PLACES, ready=True)
        super().__init__(str(folder), state, {"GPU-a": "0"}, "")
        self._claims = self.opened = StateDirectory.opened(f"{folder}/{mps.FOLDER}/{mps.CLAIMS}")

    def claim(self) -> int:
        return self._claim(self.opened)


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    folder = tmp_path / mps.FOLDER / mps.CLAIMS
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def client(tmp_path: Path, claims: Path) -> Iterator[Client]:
    made = Client(tmp_path)
    yield made
    made.close()


@pytest.fixture
def ourselves() -> str:
    fd = os.open("/proc/self", os.O_RDONLY)
    try:
        return records.name_of_process(fd)
    finally:
        os.close(fd)


def test_a_claim_is_refused_while_older_containers_hold_all_places(
    claims: Path, client: Client, ourselves: str
) -> None:
    """The older containers use a device that is no longer shared, and fewer places exist now."""
    (claims / "c00").write_text(f"{ourselves} GPU-b")
    (claims / "c01").write_text(f"{ourselves} GPU-b")
    with pytest.raises(HeldError, match="All 2 places of MPS are taken, some by containers from"):
        client.claim()
    assert sorted(each.name for each in claims.iterdir()) == ["c00", "c01", "lock"]
    (claims / "c01").unlink()
    assert client.claim() == 1


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"7", b"x-y GPU-a", b"\0" * 64])
def test_an_mps_place_with_a_damaged_claim_is_free(
    claims: Path, client: Client, damaged: bytes
) -> None:
    (claims / "c00").write_bytes(damaged)
    assert client.claim() == 0
