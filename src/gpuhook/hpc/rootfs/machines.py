"""systemd-nspawn machines that have devices: the files that configure them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from gpuhook.base.config.loader import load
from gpuhook.base.errors import GpuhookError
from gpuhook.hpc.rootfs import units
from gpuhook.hpc.rootfs.nspawn_engine import NAME as NSPAWN
from gpuhook.hpc.rootfs.requests import FolderRequest, Requests, planned

_MACHINES = "/var/lib/machines"


@dataclass(frozen=True)
class NspawnMachine(FolderRequest):
    """A machine and its request; its root folder is by default in /var/lib/machines."""

    @property
    def folder(self) -> str | None:
        """Its root folder, None if it isn't a folder: an image is treated like Debian's."""
        path = self.rootfs or os.path.join(_MACHINES, self.name)
        return path if os.path.isdir(path) else None


@dataclass(frozen=True)
class MachineFiles:
    """The contents of a machine's .nspawn file and its unit's drop-in, and messages."""

    units: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def guest(request: FolderRequest, prefix: str) -> NspawnMachine:
    """Return the machine of a request."""
    del prefix
    return NspawnMachine(**vars(request))


def files(machine: NspawnMachine, state: str = "", prefix: str = "") -> MachineFiles:  # noqa: ARG001
    """Return a machine's files, with gpuhook's lines; RequestError if it requests nothing."""
    machine.check("a machine's")
    done, plan = planned(machine.folder, machine.asked, load(machine.config))
    text = "".join(f"{line}\n" for line in units.machine(plan, done.environment))
    allow = "".join(f"{line}\n" for line in units.allowed(plan))
    drop_in = f"/etc/systemd/system/systemd-nspawn@{machine.name}.service.d/50-gpuhook.conf"
    both = (f"/etc/systemd/nspawn/{machine.name}.nspawn", text), (drop_in, allow)
    return MachineFiles(both, (*done.warnings, *units.warnings(plan)))


def refresh(state: str) -> tuple[list[str], list[GpuhookError]]:
    """Write the files of all machines again; return those that changed, and the errors."""
    return _requests(state).refresh(lambda machine: files(machine).units)


def remember(state: str, machine: NspawnMachine) -> None:
    """Store a machine, in place of its earlier request."""
    _requests(state).put(machine)


def forget(state: str, paths: Iterable[str]) -> None:
    """Remove the machines with these .nspawn files."""
    _requests(state).drop({os.path.basename(path).removesuffix(".nspawn") for path in paths})


def _requests(state: str) -> Requests[NspawnMachine]:
    return Requests(state, NSPAWN, NspawnMachine)
