"""Ascend's part of the inventory beyond NPUs: the lists of files that containers get."""

from gpuhook.base.oci.jsontext import Record
from gpuhook.core.inventory import model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.vendors.ascend.variables import AscendOptions

DRIVER_NAME = "devdrv_device_driver"
PCI_DRIVER = f"/sys/bus/pci/drivers/{DRIVER_NAME}"
TABLE, NUMBER = NUMBERS = ("devdrv_sysfs_bdf_to_devid", "dev_id")  # of a device on the bus
CLASS = "/sys/class/devdrv-class"
MANAGER = "/dev/davinci_manager"
UB_FOLDERS = ("/dev/uburma", "/dev/ummu")
LISTS = "/etc/ascend-docker-runtime.d"
DRIVER = "/usr/local/Ascend/driver"
VERSION = f"{DRIVER}/version.info"
# Library folders, in the order of precedence.
LIBRARY_FOLDERS = (f"{DRIVER}/lib64/common", f"{DRIVER}/lib64/driver", f"{DRIVER}/lib64")

FILE, LIBRARY = "file", "library"  # the kinds of files; a list's files have its name


class MountList(Record):
    """A list of files: its name, and ``problem`` if it can't be used ("": it can).

    ``refused`` are lines with paths that no container gets, a sentence each.
    """

    name: str
    problem: str = ""
    refused: tuple[str, ...] = ()


class AscendInventory(model.Inventory, lists=MountList):
    """NPUs with the lists; ``absent`` are paths of lists and optional nodes that don't exist.

    Files of the kind ``file`` are in a list (which is their capability). Those of the kind
    ``library`` are libraries for the loader, in listed folders.
    """

    lists: tuple[MountList, ...] = ()
    absent: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the nodes that should exist, and paths whose appearance changes anything."""
        return [*super().missing(), *self.absent]

    def list_called(self, name: str) -> MountList | None:
        """Return a list by its name, in any case, None if there is none."""
        exact = [each for each in self.lists if each.name == name]
        alike = [each for each in self.lists if each.name.lower() == name.lower()]
        return next(iter(exact or alike), None)

    def asked_lists(self, options: "AscendOptions") -> list[MountList]:
        """Return the lists that a container gets, without duplicates."""
        found = [] if options.nodes_only else [self.list_called(name) for name in options.lists]
        return list({each.name: each for each in found if each is not None}.values())
