"""Files for containers with Ascend NPUs, and the loader's access to the libraries.

Pure: reads nothing, changes nothing.
"""

from gpuhook.base.loader import layout
from gpuhook.base.names import machine_name
from gpuhook.core.plan.operations import FILE_OPTIONS, BindFile, UpdateLdCache
from gpuhook.vendors.ascend.model import FILE, LIBRARY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import DriverFile
    from gpuhook.core.plan.image import Image
    from gpuhook.core.plan.operations import Operation
    from gpuhook.vendors.ascend.model import AscendInventory


def edits(grant: "Grant", image: "Image") -> "list[Operation]":
    """Return the operations, in order; the loader's cache last."""
    inventory: AscendInventory = grant.inventory
    lists = {each.name for each in inventory.asked_lists(grant.request.options)}
    files = [file for file in inventory.files if file.kind == FILE and file.capability in lists]
    binds = _outermost(files)
    operations: list[Operation] = [
        BindFile(inventory.root, file.path, file.target, FILE_OPTIONS, f"list {file.capability}")
        for file in binds
    ]
    libraries = [
        file
        for file in inventory.files
        if file.kind == LIBRARY and any(_holds(bind, file) for bind in binds)
    ]
    flags = layout.cache_flags(machine_name(), bits32=False)
    if libraries and flags is not None and image.layout.uses_cache:
        entries = [(str(file.soname), file.target, flags) for file in libraries]
        operations.append(UpdateLdCache(tuple(entries), "driver libraries", image.ldconfig))
    return operations


def _outermost(files: "list[DriverFile]") -> "list[DriverFile]":
    """Return the files and folders that aren't inside another folder of the list."""
    found: list[DriverFile] = []
    for file in sorted(files, key=lambda each: (each.target.count("/"), each.target)):
        if not any(each.target == file.target or _holds(each, file) for each in found):
            found.append(file)
    return found


def _holds(folder: "DriverFile", file: "DriverFile") -> bool:
    """Tell whether a folder's mount also puts a file at its own destination."""
    inside = file.target.removeprefix(f"{folder.target}/")
    return inside != file.target and file.path == f"{folder.path}/{inside}"
