"""systemd-nspawn machines that have devices: their requests, and the files that configure them.

In the state folder, ``nspawn.json`` stores the requests, so that the files can be written again
when the driver has changed. Root writes the files that it describes, so it is used only if only
root could have written it.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import EngineError, FolderError, GpuhookError, RequestError, shown
from gpuhook.base.host import files as host_files
from gpuhook.core.plan.operations import Plan
from gpuhook.core.resolve import Progress, resolve
from gpuhook.hpc.rootfs import fstab, units, work
from gpuhook.tools import root_folder
from gpuhook.tools.engines import installer
from gpuhook.tools.engines.ask import Ask
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.nspawn import NAME as NSPAWN
from gpuhook.tools.engines.store import Store
from gpuhook.tools.root_folder.request import Asked
from gpuhook.vendors import registry

_MACHINES = "/var/lib/machines"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STATE = "nspawn.json"


@dataclass(frozen=True)
class Machine:
    """A machine and its request; ``rootfs`` is its root folder, "" for the default.

    ``config`` is its configuration file, None for the default.
    """

    name: str
    settings: tuple[tuple[str, str | None], ...] = ()
    devices: tuple[str, ...] = ()
    rootfs: str = ""
    config: str | None = None

    def check(self) -> None:
        """Raise EngineError for an invalid machine name."""
        if _NAME.fullmatch(self.name) is None:
            raise EngineError(
                f"{shown(self.name)} can't be a machine's name",
                "Use letters, digits, dots, dashes and underscores, at most 64",
            )

    @property
    def folder(self) -> str | None:
        """Its root folder, None if it isn't a folder: an image is treated like Debian's."""
        path = self.rootfs or os.path.join(_MACHINES, self.name)
        return path if os.path.isdir(path) else None


@dataclass(frozen=True)
class Files:
    """The contents of a machine's .nspawn file and its unit's drop-in, and messages."""

    units: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def files(machine: Machine) -> Files:
    """Return a machine's files, with gpuhook's lines; RequestError if it requests nothing."""
    machine.check()
    config = load(machine.config)
    asked = Asked(machine.settings, machine.devices, privileged=True)
    done, plan = planned(machine.folder, asked, config)
    text = "".join(f"{line}\n" for line in units.machine(plan, done.environment))
    allow = "".join(f"{line}\n" for line in units.allowed(plan))
    drop_in = f"/etc/systemd/system/systemd-nspawn@{machine.name}.service.d/50-gpuhook.conf"
    both = (f"/etc/systemd/nspawn/{machine.name}.nspawn", text), (drop_in, allow)
    return Files(both, (*done.warnings, *units.warnings(plan)))


def planned(rootfs: str | None, asked: Asked, config: Config) -> tuple[work.Done, Plan]:
    """Return the plan for systemd's settings; RequestError if nothing is requested."""
    root_folder.settle(config)
    known = registry.known(config)
    spec = asked.spec(config, known)
    resolved = resolve(spec.data, config, known, Progress())
    if resolved is None or not resolved.grants:
        why = resolved.absent[0] if resolved and resolved.absent else "No device is asked for"
        raise RequestError(why, "Name devices with -e or --device, as gpuhook info lists them")
    done, plan = work.planned(rootfs, resolved, config, spec)
    done.environment = fstab.settings(plan.operations, {})
    return done, plan


# Keeping them fresh ------------------------------------------------------------------------------


def refresh(state: str) -> tuple[list[str], list[GpuhookError]]:
    """Write the files of all machines again; return those that changed, and the errors.

    A failing machine doesn't stop the others: one without its files may not start.
    """
    known = remembered(state)
    if not known:
        return [], []
    store = Store(state)
    changed: list[str] = []
    failed: list[GpuhookError] = []
    with store.locked():
        for machine in known:
            try:
                ask = Ask(runtimes=(), units=files(machine).units)
                outcomes = installer.install(store, list(ENGINES[NSPAWN].install(ask).targets))
            except GpuhookError as error:  # protects: each-machine
                failed.append(error)
            else:
                changed += [each.change.path for each in outcomes if each.change]
    return changed, failed


def remembered(state: str) -> list[Machine]:
    """Return the machines that have devices; FolderError if the file can't be read."""
    path = os.path.join(state, _STATE)
    try:
        host_files.check_writers(path)
        found = json.loads(host_files.read(path))
        return [_machine(each) for each in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FolderError(
            f"{path} can't be read: {error}",
            "Remove it, and run gpuhook install --engine nspawn for each machine again",
        ) from None


def _machine(fields: dict[str, object]) -> Machine:
    settings, devices = fields["settings"], fields["devices"]
    if not isinstance(settings, list) or not isinstance(devices, list):
        raise TypeError("a machine's request isn't a list")
    pairs = tuple((str(name), value) for name, value in settings)
    config = fields.get("config")
    return Machine(
        str(fields["name"]), pairs, tuple(map(str, devices)), str(fields.get("rootfs", "")),
        config if isinstance(config, str) else None,
    )  # fmt: skip


def remember(state: str, machine: Machine) -> None:
    """Store a machine, in place of its earlier request."""
    _save(state, [*(each for each in remembered(state) if each.name != machine.name), machine])


def forget(state: str, paths: Iterable[str]) -> None:
    """Remove the machines with these .nspawn files."""
    gone = {os.path.basename(path).removesuffix(".nspawn") for path in paths}
    known = remembered(state)
    rest = [each for each in known if each.name not in gone]
    if len(rest) < len(known):
        _save(state, rest)


def _save(state: str, machines: list[Machine]) -> None:
    path = os.path.join(state, _STATE)
    try:
        host_files.check_way(path)
        if not machines:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(state)
            return
        os.makedirs(state, exist_ok=True)
        text = json.dumps([asdict(each) for each in machines], indent=2)
        host_files.replace(path, text.encode() + b"\n", 0o600)
    except OSError as error:
        raise FolderError(
            f"{path} can't be written: {error.strerror}",
            "Run this as root, or name another folder with --state-dir",
        ) from None
