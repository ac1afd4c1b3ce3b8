"""Ledger records that can't be read, that another version wrote, or of another owner."""

import errno
import json
import os
import time
from pathlib import Path

import pytest

from gpuhook.base import fileio
from gpuhook.base.errors import PluginError, RequestError
from gpuhook.monitor.ledger import records as ledger
from gpuhook.monitor.ledger.records import (
    COMPLETED,
    MPS,
    POD,
    ChangedSetting,
    HeldDevice,
    OwnerRecord,
    Records,
    in_the_way,
)

DRIVER, UID = "gpu.nvidia.com", "2b2a-1"
HELD = HeldDevice("gpu", "n1", "gpu-a", vendor="nvidia", unit="GPU-a", whole="GPU-a", cdi=("k=a",))
DAMAGE = {
    "empty": b"",
    "cut off": b'{"driver": "gpu.nvidia.com", "uid"',
    "no object": b"[]",
    "no text": b"\xff\xfe",
    "without devices": b'{"driver": "gpu.nvidia.com", "uid": "2b2a-1"}',
    "too long": b" " * (1 << 21),
}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    tmp_path.chmod(0o755)
    made = Records(str(tmp_path))
    made.make()
    return made


SETTING = ChangedSetting("nvidia", "GPU-a", "compute-mode", 3, 0)


def record(records: Records) -> OwnerRecord:
    what = ((HELD,), "/x", ({"do": "y"},))
    return OwnerRecord(DRIVER, UID, "ns", "a", COMPLETED, records.boot, *what, settings=(SETTING,))


def mps_record(records: Records) -> OwnerRecord:
    return OwnerRecord("", "", "", "", COMPLETED, records.boot, (HELD,), owner=MPS)


def lend(records: Records, unit: str) -> None:
    records.lend("nvidia", "nvidia.com/gpu", [(unit, unit)])


def lent(records: Records) -> list[OwnerRecord]:
    return [each for each in records.current() if each.owner == POD]


def written(records: Records) -> Path:
    with records.locked():
        records.write(record(records))
    return Path(records.folder) / f"claim_{UID}_{DRIVER}.json"


@pytest.mark.protects(
    "dra-unreadable", "no device is allocated while the record of a device's owner is unreadable"
)
@pytest.mark.parametrize("data", DAMAGE.values(), ids=[*DAMAGE])
def test_no_device_is_allocated_while_a_record_is_unreadable(records: Records, data: bytes) -> None:
    path = written(records)
    lend(records, "GPU-b")
    path.write_bytes(data)
    assert records.read(DRIVER, UID) is None
    with pytest.raises(PluginError, match=f"{path} can't be read"):
        records.check_readable()
    with pytest.raises(PluginError, match="can't be read"):
        lend(records, "GPU-b")
    records.check_readable(record(records).key)  # new work on that claim itself is allowed
    path.unlink()
    records.check_readable()
    [borrowed] = Path(records.folder).glob("pod_*")
    borrowed.write_bytes(data)
    with pytest.raises(PluginError, match=f"{borrowed} can't be read"):
        records.check_readable()
    lend(records, "GPU-b")  # which writes the record again
    records.check_readable()
    (Path(records.folder) / "mps.json").write_bytes(data)
    with pytest.raises(PluginError, match="Run gpuhook mps stop"):
        records.check_readable()


@pytest.mark.protects(
    "dra-folder",
    "records of DRA claims are in a folder that only root can change",
    instead="os.makedirs(self.folder, exist_ok=True)\n"
    "return StateDirectory(os.open(self.folder, os.O_RDONLY), self.folder)",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has somebody to fear")
@pytest.mark.parametrize("how", ["mode", "owner", "link"])
def test_a_ledger_folder_changeable_by_others_is_refused(records: Records, how: str) -> None:
    """Other users could then decide which devices are free."""
    folder = Path(records.folder)
    if how == "mode":
        folder.chmod(0o777)
    elif how == "owner":
        os.chown(folder, 1000, 0)
    else:
        folder.rename(folder.parent / "other")
        folder.symlink_to(folder.parent / "other")
    with pytest.raises(PluginError, match=f"{folder} can't be used"), records.locked():
        pass


def test_a_folder_in_place_of_a_record_is_an_error(records: Records) -> None:
    """Only root can make a folder where a file should be."""
    path = written(records)
    path.unlink()
    path.mkdir()
    (Path(records.folder) / ".left").mkdir()
    records.tidy()
    with pytest.raises(PluginError, match="can't be used: Is a directory"):
        records.forget(record(records).key)
    with pytest.raises(PluginError, match="can't be read"):
        records.check_readable()


def test_records_of_an_earlier_boot_are_ignored(records: Records) -> None:
    path = written(records)
    path.write_text('{"boot": "another", "of": "another version"}')
    records.check_readable()
    (Path(records.folder) / "pod_x.json").write_text('{"boot": "another"}')
    (Path(records.folder) / "mps.json").write_text('{"boot": "another"}')
    records.check_readable()
    assert records.current() == []
    assert records.mps() is None


def test_a_record_of_a_newer_version_is_read(records: Records) -> None:
    path = written(records)
    data = json.loads(path.read_text())
    data["since"] = [1]
    data["devices"][0]["colour"] = "red"
    data["settings"][0]["since"] = 1
    path.write_text(json.dumps(data))
    assert records.read(DRIVER, UID) == record(records)
    with pytest.raises(RequestError, match="claim ns/a "):
        lend(records, "GPU-a")


@pytest.mark.parametrize("step", [-1e6, 0.0, 1e6])
def test_a_leases_age_is_unaffected_by_clock_changes(
    records: Records, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock may be set to any time in the meantime."""
    lend(records, "GPU-a")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + step)
    [found] = lent(records)
    assert 0 <= ledger.now() - found.at < 60


@pytest.mark.protects(
    "dra-lease-kept",
    "a device plugin's lease is kept while a newer one can't be written",
    instead="folder.remove(record.key)\n<the statement>",
)
def test_a_lease_stays_while_a_newer_one_cannot_be_written(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may still have another replica of the device."""
    lend(records, "GPU-a")
    before = lent(records)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fileio, "replace", fail)
    with pytest.raises(PluginError, match="No space left"):
        lend(records, "GPU-a")
    assert lent(records) == before


@pytest.mark.protects(
    "record-owner",
    "a record is used only for the owner that its file name states",
    instead="is_its = True",
)
@pytest.mark.parametrize("name", ["uid", "driver", "owner"])
def test_a_record_under_another_owners_name_is_an_error(records: Records, name: str) -> None:
    """A record that was copied or renamed for another claim proves nothing about either."""
    path = written(records)
    other = {
        "uid": f"claim_3c3b-2_{DRIVER}.json",
        "driver": f"claim_{UID}_gpu.amd.com.json",
        "owner": "mps.json",
    }[name]
    path.rename(path.with_name(other))
    assert records.read(DRIVER, UID) is None
    assert records.current() == []
    assert records.mps() is None
    assert records.read("gpu.amd.com", UID) is None
    assert records.read(DRIVER, "3c3b-2") is None
    with pytest.raises(PluginError, match=f"{other} can't be read"):
        records.check_readable()


def test_a_part_conflicts_with_its_gpu_and_shares_do_not_conflict(records: Records) -> None:
    """Conflicts don't depend on the owner; admin access and shares of one device don't conflict."""
    with records.locked():
        records.write(mps_record(records))
        records.write(record(records))
    assert records.mps() == mps_record(records)
    assert records.others(record(records).key) == [mps_record(records)]
    part = HeldDevice(vendor="nvidia", unit="MIG-1", whole="GPU-a")
    others = [
        HeldDevice(vendor="amd", unit="GPU-a", whole="GPU-a"),
        HeldDevice(vendor="nvidia", unit="GPU-b", whole="GPU-b"),
        HeldDevice(vendor="nvidia", unit="GPU-a", whole="GPU-a", admin=True),
    ]
    found = in_the_way([part, *others], records.current())
    assert [(ours, each.owner) for ours, _, each in found] == [(part, "claim"), (part, "mps")]
    shares = [
        HeldDevice(device="a", vendor="nvidia", unit="GPU-a", share=each) for each in ("1", "2")
    ]
    assert not shares[0].conflicts(shares[1])
    assert HeldDevice(vendor="nvidia", unit="MIG-2", whole="GPU-a").conflicts(part) is False
