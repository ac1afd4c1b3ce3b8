"""The contents of the driver folder, from the plan of a container with its libraries there.

Nothing is changed. The only check of files is whether containers may get them.
"""

from collections.abc import Iterable
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverFolderError, RequestError, listed, shown
from gpuhook.base.loader.layout import Layout
from gpuhook.core import contract
from gpuhook.core.plan.image import Image
from gpuhook.core.plan.operations import usable
from gpuhook.core.plan.writer import PlanIndex
from gpuhook.tools.driver_folder import DriverContent
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.names import NAME

INSIDE = "/usr/local/nvidia"  # where CUDA images' PATH and LD_LIBRARY_PATH look
FOLDERS = ("bin", "lib", "lib64")  # lib is for 32-bit libraries
_PROGRAMS = "/usr/bin/"
_ALL = "all"


def content_of(config: Config, inventory: Any, capabilities: Iterable[str] = ()) -> DriverContent:
    """Return the contents of the driver folder for this NVIDIA inventory.

    ``capabilities`` are the driver's parts to include; none or "all" mean all that the
    configuration allows. RequestError for others; DriverFolderError for a platform whose driver
    can't be put in one folder.
    """
    if inventory.platform:
        raise DriverFolderError(
            f"The driver's files of {inventory.platform} have fixed paths, and can't be used from "
            "one folder",
            "Use the runtime gpu-py, or CDI",
        )
    vendor = contract.load(registry.BUILT_IN[NAME])
    granted = contract.Grant.of_document(vendor, inventory, config, ())
    options: Any = granted.request.options
    options.capabilities = _chosen(tuple(capabilities), options.capabilities)
    folders = Layout(f"{INSIDE}/lib64", f"{INSIDE}/lib", uses_cache=False)
    found = DriverContent(inventory.version, inventory.root, FOLDERS)
    places = PlanIndex().write(usable(vendor.edits(granted, Image(folders)))[0])
    for op in places.mounts.values():
        if place := _place(op.destination):
            found.files[place] = op.path
    for link in places.links.values():
        if place := _place(link.destination):
            found.links[place] = link.target
    return found


def _chosen(asked: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    if not asked or _ALL in asked:
        return allowed
    refused = [shown(word) for word in asked if word not in allowed]
    if refused:
        raise RequestError(
            f"{listed(refused)} can't be put in the driver folder",
            f"Choose from {', '.join(allowed)}, or allow more with supported-driver-capabilities",
        )
    return tuple(sorted(set(asked)))


def _place(destination: str) -> str:
    """Return the path in the folder of a file with this path in a container, "" for none.

    Files that are neither libraries nor programs have fixed paths outside of the folder, where the
    driver looks for them: firmware, sockets, configuration.
    """
    if destination.startswith(f"{INSIDE}/"):
        return destination.removeprefix(f"{INSIDE}/")
    name = destination.removeprefix(_PROGRAMS)
    return f"bin/{name}" if name != destination else ""
