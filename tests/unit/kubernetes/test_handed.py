"""Records of what was handed out that can't be read, or that another version wrote."""

import errno
import json
import os
import time
from pathlib import Path

import pytest

from gpuhook.ground.errors import PluginError, RequestError
from gpuhook.tools.kubernetes import handed
from gpuhook.tools.kubernetes.handed import COMPLETED, Held, Record, Records

DRIVER, UID = "gpu.nvidia.com", "2b2a-1"
HELD = Held("gpu", "n1", "gpu-a", vendor="nvidia", unit="GPU-a", whole="GPU-a", cdi=("k=a",))
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


def record(records: Records) -> Record:
    return Record(DRIVER, UID, "ns", "a", COMPLETED, records.boot, (HELD,), "/x", ({"do": "y"},))


def written(records: Records) -> Path:
    with records.locked():
        records.write(record(records))
    return Path(records.folder) / f"{UID}_{DRIVER}.json"


@pytest.mark.parametrize("data", DAMAGE.values(), ids=[*DAMAGE])
def test_what_can_t_be_read_gives_nothing_away(records: Records, data: bytes) -> None:
    path = written(records)
    lease = records.lease("nvidia", "GPU-b", "GPU-b", "nvidia.com/gpu")
    records.lend([lease])
    path.write_bytes(data)
    assert records.read(DRIVER, UID) is None
    with pytest.raises(PluginError, match=f"{path} can't be read"):
        records.check_readable()
    with pytest.raises(PluginError, match="can't be read"):
        records.lend([lease])
    records.check_readable((DRIVER, UID))  # who does that claim's work again may
    path.unlink()
    records.check_readable()
    [borrowed] = Path(f"{records.folder}/device-plugin").iterdir()
    borrowed.write_bytes(data)
    with pytest.raises(PluginError, match=f"{borrowed} can't be read"):
        records.leases()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has somebody to fear")
@pytest.mark.parametrize("how", ["mode", "owner", "link"])
def test_a_folder_that_others_may_change(records: Records, how: str) -> None:
    """They would say which devices are free."""
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


def test_what_stands_in_the_way(records: Records) -> None:
    """Folders where files should be: root alone could make them."""
    path = written(records)
    path.unlink()
    path.mkdir()
    (Path(records.folder) / ".left").mkdir()
    records.tidy()
    with pytest.raises(PluginError, match="can't be used: Is a directory"):
        records.remove(DRIVER, UID)
    with pytest.raises(PluginError, match="can't be read"):
        records.check_readable()


def test_what_an_earlier_boot_left_is_no_matter(records: Records) -> None:
    path = written(records)
    path.write_text('{"boot": "another", "of": "another version"}')
    records.check_readable()
    Path(f"{records.folder}/device-plugin").mkdir()
    (Path(records.folder) / "device-plugin/x.json").write_text('{"boot": "another"}')
    assert records.leases() == []


def test_a_newer_version_s_record_counts(records: Records) -> None:
    path = written(records)
    data = json.loads(path.read_text())
    data["since"] = [1]
    data["devices"][0]["colour"] = "red"
    path.write_text(json.dumps(data))
    assert records.read(DRIVER, UID) == record(records)
    with pytest.raises(RequestError, match="claim ns/a's"):
        records.lend([records.lease("nvidia", "GPU-a", "GPU-a", "nvidia.com/gpu")])


@pytest.mark.parametrize("step", [-1e6, 0.0, 1e6])
def test_a_lease_is_as_old_as_it_is(
    records: Records, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the time of the day meanwhile."""
    lease = records.lease("nvidia", "GPU-a", "GPU-a", "nvidia.com/gpu")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + step)
    assert 0 <= handed.now() - lease.at < 60


def test_a_lease_outlives_one_that_cannot_be_written(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have another replica of the device."""
    lease = records.lease("nvidia", "GPU-a", "GPU-a", "nvidia.com/gpu")
    records.lend([lease])

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpuhook.tools.kubernetes.handed.files.replace", fail)
    with pytest.raises(PluginError, match="No space left"):
        records.lend([records.lease("nvidia", "GPU-a", "GPU-a", "nvidia.com/gpu")])
    assert records.leases() == [lease]
