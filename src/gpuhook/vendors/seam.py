"""The seam between the house and the makers of accelerators.

``KNOWN`` holds the names of every vendor there is code for: data alone, so that a container
start imports no more of a vendor that it doesn't ask for.
"""

from gpuhook.vendors.nvidia import names as nvidia

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# A vendor's name -> its names (vendors/NAME/names.py), in the order in which they are served.
KNOWN: "dict[str, ModuleType]" = {nvidia.NAME: nvidia}


def package(names: "ModuleType") -> str:
    """Return the package that holds a vendor: the one that its names are in."""
    return names.__name__.rpartition(".")[0]
