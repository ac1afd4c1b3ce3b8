"""The CDI specs and the driver folder of the device plugin's responses, updated to match the host.

A short-lived child writes each, because generating specs takes memory that the supervisor would
otherwise keep for the rest of its life.
"""

import os
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gpuhook.base import names as ours
from gpuhook.base.config.model import DEFAULT_PATH, Config
from gpuhook.base.errors import CdiError, GpuhookError, NoDeviceError
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.monitor.host import child
from gpuhook.monitor.machine import Found
from gpuhook.vendors import registry

if TYPE_CHECKING:
    from gpuhook.core.cdi.generate import GeneratedSpec

_PATIENCE = 60  # seconds
_FOLDER_PATIENCE = 120  # seconds: some hundred megabytes may be copied
_FORMAT = "yaml"


class DriverLocations(Protocol):
    """The driver's locations, as in ``settings.Settings``; the fields mean the same."""

    @property
    def driver_root(self) -> str:
        """The driver root on the host."""

    @property
    def driver_root_ctr_path(self) -> str:
        """The driver root as this process sees it."""

    @property
    def dev_root(self) -> str:
        """The folder on the host above the nodes' /dev."""


@dataclass(frozen=True)
class Chore:
    """The input of this module's functions: the devices ``found``, and the ``failing`` vendors.

    ``tell`` gets a sentence for each change and each problem.
    """

    settings: Settings
    config: Config
    found: Collection[Found]
    failing: Container[str]
    tell: Callable[[str], None]


def bring(chore: Chore) -> bool:
    """Write a CDI spec of each vendor's devices, and remove those of vendors that are gone.

    Specs of failing vendors stay unchanged. Only gpuhook's specs are replaced. If
    ``gpuhook install --cdi`` manages specs, those are updated instead. Return whether everything
    succeeded.
    """
    return child.do(lambda: _bring(chore), _PATIENCE, chore.tell, "CDI specs")


def _bring(chore: Chore) -> bool:
    from gpuhook.tools.cdi import refresh as refreshing  # noqa: PLC0415 - only in the child
    from gpuhook.tools.cdi import write as writing  # noqa: PLC0415
    from gpuhook.tools.engines.files import DEFAULT_STATE  # noqa: PLC0415

    report = refreshing.refresh(DEFAULT_STATE) if os.geteuid() == 0 else None
    if report is not None:
        for line in (*report.done, *report.warnings):
            chore.tell(line)
        for failure in report.failures:
            chore.tell(f"CDI specs: {failure.error}")
        return not report.failures
    here = {vendor.names.NAME: (vendor, inventory) for vendor, inventory in chore.found}
    well = True
    for names in registry.all_vendors(chore.config).values():
        if names.NAME in chore.failing:
            continue
        path = os.path.join(chore.settings.cdi_folder, writing.file_name(names.KIND, _FORMAT))
        try:
            _bring_one(path, chore, here.get(names.NAME))
        except GpuhookError as error:
            chore.tell(f"CDI specs: {error}")
            well = False
    return well


def _bring_one(path: str, chore: Chore, found: Found | None) -> None:
    from gpuhook.core.cdi import folders  # noqa: PLC0415 - as above
    from gpuhook.tools.cdi import refresh as refreshing  # noqa: PLC0415
    from gpuhook.tools.cdi import write as writing  # noqa: PLC0415
    from gpuhook.tools.engines.files import Change  # noqa: PLC0415

    try:
        made = None if found is None else _made(chore.settings, chore.config, found)
    except NoDeviceError as error:
        chore.tell(f"CDI specs: {error.cause}")
        made = None
    is_there = os.path.lexists(path)
    document = folders.examine(path)[1] if is_there else None
    mine = document is not None and refreshing.is_ours(document)
    if made is None:
        if mine:
            refreshing.remove(Change(path, writing.read_old(path), None))
            chore.tell(f"removed {path}")
        return
    if is_there and not mine:
        raise CdiError(f"{path} exists and isn't gpuhook's", "Remove it or move it away")
    if writing.write(path, writing.to_text(made.document, _FORMAT)):
        chore.tell(refreshing.written(made, path))
        for warning in made.warnings:
            chore.tell(warning)


def _made(settings: Settings, config: Config, found: Found) -> "GeneratedSpec":
    """Return the CDI spec of a vendor's devices, with the paths that they have on the host."""
    from gpuhook.core.cdi.generate import GeneratedSpec, SpecSource, generate  # noqa: PLC0415
    from gpuhook.monitor.host.driver_program import our_program  # noqa: PLC0415

    remedy = "Reinstall gpuhook, so that its programs are in one folder"
    hook = settings.cdi_hook_path or our_program(ours.CDI_HOOK, remedy)
    own = config.path and os.path.abspath(config.path)
    made = generate(SpecSource(*found, config, hook, own if own != DEFAULT_PATH else None))
    return GeneratedSpec(on_host(made.document, settings, found[1].root), made.warnings)


def on_host(document: dict[str, Any], settings: DriverLocations, root: str) -> dict[str, Any]:
    """Return a CDI spec with the host's paths, if this process sees another driver root."""
    from gpuhook.tools.cdi import transform  # noqa: PLC0415 - as above

    root = root.rstrip("/")
    if settings.dev_root:
        real = settings.dev_root.rstrip("/")
        document = transform.root(document, f"{root}/dev", f"{real}/dev", transform.HOST)
    if settings.driver_root:
        seen, real = settings.driver_root_ctr_path, settings.driver_root
        document = transform.root(document, seen, real, transform.HOST)
    return document


def keep_driver_folder(chore: Chore) -> bool:
    """Fill the driver folder of the strategy ``mounts``; return whether that succeeded.

    It has the files of the installed driver, and stays unchanged if the driver is gone, or is one
    of the failing ones.
    """

    def work() -> bool:
        from gpuhook.tools.driver_folder.keep import keep as keep_one  # noqa: PLC0415 - only here

        folder = chore.settings.driver_folder
        for vendor, inventory in chore.found:
            is_present = vendor.names.NAME not in chore.failing
            if is_present and keep_one(chore.config, vendor.names, inventory, folder):
                chore.tell(f"{folder} has the files of driver {inventory.version}")
        return True

    return child.do(work, _FOLDER_PATIENCE, chore.tell, "The driver folder")
