"""Locks that root waits for: other users can't open their files, and so can't lock them."""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuhook
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.base.state_directory import StateDirectory
from gpuhook.cluster.device_plugin.status import StatusFile
from gpuhook.cluster.dra import publish
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.core.records import leases
from gpuhook.monitor.containers import attached
from gpuhook.monitor.ledger.records import Records
from gpuhook.monitor.mps.control import Control
from gpuhook.monitor.mps.keep import MpsController
from gpuhook.prefork import instance
from gpuhook.tools.driver_folder.place import FolderPath
from gpuhook.tools.engines.lock import FolderLock
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia import mps
from gpuhook.vendors.nvidia.mps_mounts import BindPipe


def _mps(folder: Path) -> None:
    config = Config()
    config.state_dir = str(folder)
    MpsController(config, print).stop()


def _daemon_of_mps(folder: Path) -> None:
    config = Config()
    config.state_dir = str(folder)
    keeper = MpsController(config, print)
    keeper._make_folders(version=3)
    Control("", keeper.base, version=3).settle()


def _place_of_mps(folder: Path) -> None:
    made = BindPipe(str(folder), mps.MpsState(2, (), "", 0, 1, ()), {}, "")
    with StateDirectory.opened(str(folder)) as claims:
        made._claim(claims)


def _lease(folder: Path) -> None:
    with StateDirectory.opened(str(folder)) as opened, leases.lock(opened):
        pass


def _inventory(folder: Path) -> None:
    config = Config()
    config.state_dir = str(folder)
    vendor = contract.load(registry.BUILT_IN["amd"])
    with StateDirectory.opened(str(folder)) as opened, cache._QueryTurn(opened, config, vendor):
        pass


def _installation(folder: Path) -> None:
    with FolderLock(str(folder / "engines"), "installing", 1.0, GpuhookError).held():
        pass


def _publisher(folder: Path) -> None:
    with publish._LeaderLock(str(folder / "publisher")) as turn:
        assert turn.take()


def _claims(folder: Path) -> None:
    with Records(str(folder)).locked():
        pass


def _driver_folder(folder: Path) -> None:
    with FolderPath(str(folder / "driver")).locked():
        pass


def _status(folder: Path) -> None:
    StatusFile(str(folder)).keep()


def _changes(folder: Path) -> None:
    with StateDirectory.opened(str(folder)) as opened, attached.one_at_a_time(opened):
        pass


def _prefork_server(folder: Path) -> None:
    with StateDirectory.opened(str(folder)) as opened:
        lock = instance.take_name(opened, "lock")
    assert lock is not None
    os.close(lock)


LOCKS: dict[str, Callable[[Path], None]] = {
    "monitor/mps/keep.py": _mps,
    "monitor/mps/control.py": _daemon_of_mps,
    "vendors/nvidia/mps_mounts.py": _place_of_mps,
    "core/records/leases.py": _lease,
    "core/inventory/cache.py": _inventory,
    "tools/engines/lock.py": _installation,
    "cluster/dra/publish.py": _publisher,
    "cluster/device_plugin/status.py": _status,
    "monitor/containers/attached.py": _changes,
    "monitor/ledger/records.py": _claims,
    "prefork/instance.py": _prefork_server,
    "tools/driver_folder/place.py": _driver_folder,
}


@pytest.mark.protects(
    "state-lock",
    "other users can't delay a container start or a service by holding a lock",
    instead="fd = os.open('.', os.O_RDONLY, dir_fd=self.fd)",
)
@pytest.mark.parametrize("name", [*LOCKS])
def test_lock_files_cannot_be_opened_by_other_users(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode must be safe under any umask, in a world-readable folder such as /run/gpuhook."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    modes: list[int] = []
    lock = fcntl.flock

    def look(fd: int, operation: int) -> Any:
        modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", look)
    before = os.umask(0)
    try:
        with contextlib.suppress(GpuhookError, StopIteration):
            LOCKS[name](folder)
    finally:
        os.umask(before)
    assert modes
    assert not any(mode & 0o077 for mode in modes), [*map(oct, modes)]


def test_every_use_of_a_lock_is_reviewed() -> None:
    source = Path(gpuhook.__file__).parent
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(
            r"\block\.take\(|(?<!leases)\.lock\(|\bfcntl\.(flock|lockf)\(", path.read_text()
        )
    }
    assert found == {*LOCKS, "base/host/lock.py", "base/state_directory.py"}
