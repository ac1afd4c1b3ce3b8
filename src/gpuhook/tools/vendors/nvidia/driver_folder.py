"""What belongs in the driver folder: the plan of a container whose libraries go there.

Changes nothing, and looks at nothing but whether a file may be given to containers.
"""

from collections.abc import Iterable
from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import DriverFolderError, RequestError, listed, shown
from gpuhook.ground.loader.layout import Layout
from gpuhook.start import contract
from gpuhook.start.plan.image import Image
from gpuhook.start.plan.operations import usable
from gpuhook.start.plan.writer import Places
from gpuhook.tools.vendors.nvidia.cluster import NvidiaCluster
from gpuhook.tools.vendors.parts import DriverContent
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.names import NAME

INSIDE = NvidiaCluster.driver_folder  # where CUDA images' PATH and LD_LIBRARY_PATH look
FOLDERS = ("bin", "lib", "lib64")  # lib is for 32-bit libraries
_PROGRAMS = "/usr/bin/"
_ALL = "all"


def content_of(config: Config, inventory: Any, capabilities: Iterable[str] = ()) -> DriverContent:
    """Return what belongs in the driver folder of a machine with this inventory of NVIDIA's.

    ``capabilities`` are the driver's parts to put there, none or "all" stand for all that the
    configuration allows. RequestError for others; DriverFolderError for a platform whose driver
    can't be put in one folder.
    """
    if inventory.platform:
        raise DriverFolderError(
            f"The driver's files of {inventory.platform} have places of their own, and can't be "
            "used from one folder",
            "Use the runtime gpu-py, or CDI",
        )
    vendor = contract.load(registry.KNOWN[NAME])
    granted = contract.Grant.of_document(vendor, inventory, config, ())
    options: Any = granted.request.options
    options.capabilities = _chosen(tuple(capabilities), options.capabilities)
    folders = Layout(f"{INSIDE}/lib64", f"{INSIDE}/lib", uses_cache=False)
    found = DriverContent(inventory.version, inventory.root, FOLDERS)
    places = Places().write(usable(vendor.edits(granted, Image(folders)))[0])
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
    """Return where in the folder a file goes that would be there in a container, "" for nowhere.

    What is neither a library nor a program has a fixed place outside of the folder, where the
    driver looks for it: firmware, sockets, configuration.
    """
    if destination.startswith(f"{INSIDE}/"):
        return destination.removeprefix(f"{INSIDE}/")
    name = destination.removeprefix(_PROGRAMS)
    return f"bin/{name}" if name != destination else ""
