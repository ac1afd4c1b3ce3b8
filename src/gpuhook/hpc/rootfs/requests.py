"""Stored requests of machines and containers, whose configuration files have their devices.

In the state folder, a JSON file per engine stores the requests, so that the files can be written
again when the driver has changed. Root writes the files that it describes, so it is used only if
only root could have written it.
"""

import contextlib
import os
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from gpuhook.base.config.model import Config
from gpuhook.base.errors import EngineError, FolderError, GpuhookError, RequestError, shown
from gpuhook.core.plan.operations import Plan
from gpuhook.core.resolve import Progress, resolve
from gpuhook.hpc.rootfs import fstab, work
from gpuhook.tools import root_folder
from gpuhook.tools.engines import installer
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.state_file import StateFile
from gpuhook.tools.engines.store import Store
from gpuhook.tools.root_folder.request import CallerRequest
from gpuhook.vendors import registry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Units = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FolderRequest:
    """The request of a machine or container; ``rootfs`` is its root folder, "" for the default.

    ``config`` is gpuhook's configuration file, None for the default. ``file`` is its own
    configuration file, if its place doesn't follow from its name.
    """

    name: str
    settings: tuple[tuple[str, str | None], ...] = ()
    devices: tuple[str, ...] = ()
    rootfs: str = ""
    config: str | None = None
    file: str = ""

    def check(self, whose: str) -> None:
        """Raise EngineError for an invalid name; ``whose`` is a genitive for the message."""
        if _NAME.fullmatch(self.name) is None:
            raise EngineError(
                f"{shown(self.name)} can't be {whose} name",
                "Use letters, digits, dots, dashes and underscores, at most 64",
            )

    @property
    def asked(self) -> CallerRequest:
        """The devices that it requests."""
        return CallerRequest(self.settings, self.devices, privileged=True)


Guest = TypeVar("Guest", bound=FolderRequest)


class Requests(Generic[Guest]):
    """The stored requests of one engine's machines or containers, of type ``kind``."""

    def __init__(self, state: str, engine: str, kind: type[Guest]) -> None:
        self._state = state
        self._engine = engine
        self._kind = kind
        remedy = f"Remove it, and run gpuhook install --engine {engine} for each again"
        self._file = StateFile(os.path.join(state, f"{engine}.json"), FolderError, remedy)

    def load(self) -> list[Guest]:
        """Return all requests; FolderError if the file can't be read."""
        return self._file.load(lambda found: [self._made(each) for each in found]) or []

    def _made(self, fields: dict[str, object]) -> Guest:
        settings, devices = fields["settings"], fields["devices"]
        if not isinstance(settings, list) or not isinstance(devices, list):
            raise TypeError("a request isn't a list")
        pairs = tuple((str(name), value) for name, value in settings)
        rootfs, config, file = (fields.get(name) for name in ("rootfs", "config", "file"))
        return self._kind(
            str(fields["name"]), pairs, tuple(map(str, devices)), str(rootfs or ""),
            config if isinstance(config, str) else None, str(file or ""),
        )  # fmt: skip

    def refresh(self, units: Callable[[Guest], Units]) -> tuple[list[str], list[GpuhookError]]:
        """Write the files of all again; return those that changed, and the errors.

        ``units`` returns the files of one. A failing one doesn't stop the others: one without its
        files may not start.
        """
        known = self.load()
        if not known:
            return [], []
        store = Store(self._state)
        changed: list[str] = []
        failed: list[GpuhookError] = []
        with store.locked():
            for each in known:
                try:
                    ask = EngineRequest(runtimes=(), units=units(each))
                    answer = ENGINES[self._engine].install(ask)
                    outcomes = installer.install(store, list(answer.targets))
                except GpuhookError as error:  # protects: each-machine
                    failed.append(error)
                else:
                    changed += [each.change.path for each in outcomes if each.change]
        return changed, failed

    def put(self, request: Guest) -> None:
        """Store a request, in place of an earlier one of that name."""
        self._save([*(each for each in self.load() if each.name != request.name), request])

    def drop(self, names: Collection[str]) -> None:
        """Remove the requests of these names."""
        known = self.load()
        rest = [each for each in known if each.name not in names]
        if len(rest) < len(known):
            self._save(rest)

    def _save(self, requests: list[Guest]) -> None:
        if requests:
            self._file.save([asdict(each) for each in requests])
            return
        self._file.remove()
        with contextlib.suppress(OSError):
            os.rmdir(self._state)


def planned(
    rootfs: str | None, asked: CallerRequest, config: Config
) -> tuple[work.WorkResult, Plan]:
    """Return the plan for a configuration file; RequestError if nothing is requested."""
    root_folder.settle(config)
    vendors = registry.all_vendors(config)
    spec = asked.spec(config, vendors)
    resolved = resolve(spec.data, config, vendors, Progress())
    if resolved is None or not resolved.grants:
        why = resolved.absent[0] if resolved and resolved.absent else "No device is asked for"
        raise RequestError(why, "Name devices with -e or --device, as gpuhook info lists them")
    done, plan = work.planned(rootfs, resolved, config, spec)
    done.environment = fstab.settings(plan.operations, {})
    return done, plan
