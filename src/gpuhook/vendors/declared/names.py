"""Names of a declared vendor's accelerators, made from its table in config.toml."""

import sys

from gpuhook.base.config.declared import DRIVER, PCI, VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from gpuhook.base.config.declared import DeclaredTable

LD_CACHE = "/etc/ld.so.cache"
PCI_DEVICES = "/sys/bus/pci/devices"
WRITABLE = "writable-folder"  # a kind of files in its inventory
# Folders with drivers' names.
DRIVER_PLACES = ("/sys/module/", "/sys/bus/pci/drivers/", "/sys/bus/platform/drivers/")
VFIO = "/dev/vfio/"  # its nodes are IOMMU groups
GROUPS = "/sys/kernel/iommu_groups"


def names_of(table: "DeclaredTable") -> "ModuleType":
    """Return a declared vendor's names, which ``registry.complete`` completes; and TABLE."""
    made: Any = type(sys)(__name__)
    made.__file__ = __file__
    made.TABLE = table
    made.NAME, made.TITLE, made.KIND = table.name, table.title, table.kind
    made.NOUN = table.noun
    made.ID_TITLE = "ID"
    made.VARIABLES = {table.variable: ("index", "id")}
    made.VOID = table.variable if table.void == VARIABLE else ""
    made.TYPES = (table.kind.rpartition("/")[2], "part")
    proof = table.present
    made.PCI_VENDOR = proof.removeprefix(PCI) if proof.startswith(PCI) else ""
    made.DRIVER_WORDS = (proof.removeprefix(DRIVER),) if proof.startswith(DRIVER) else ()
    made.LOST_REMEDY = "Use the other devices meanwhile"
    names: ModuleType = made
    return names


def without(names: "ModuleType", variables: "list[str]") -> "ModuleType":
    """Return a vendor's names without some variables, unchanged if it has none of those.

    A vendor without variables also ignores images that predate its variables.
    """
    kept = {name: spaces for name, spaces in names.VARIABLES.items() if name not in variables}
    if len(kept) == len(names.VARIABLES):
        return names
    made = type(sys)(names.__name__)
    made.__dict__.update(vars(names), VARIABLES=kept, LEGACY=names.LEGACY if kept else ())
    return made
