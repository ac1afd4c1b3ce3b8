"""The vendor Ascend: NPUs from the driver, files from the host's lists."""

from gpuhook.base.errors import DriverError, RequestError
from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory import fingerprint
from gpuhook.vendors.ascend import names, variables
from gpuhook.vendors.ascend.model import (
    CLASS,
    LIBRARY_FOLDERS,
    LISTS,
    MANAGER,
    NUMBERS,
    PCI_DRIVER,
    UB_FOLDERS,
    VERSION,
    AscendInventory,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import DeviceNode
    from gpuhook.core.plan.image import Image
    from gpuhook.core.plan.operations import Operation
    from gpuhook.core.request.reader import RequestReader

_NODES = ("davinci", "vdavinci")


class Ascend(Vendor):
    """Ascend NPUs and vNPUs, from the kernel's interfaces."""

    names = names
    inventory = AscendInventory
    hook_modules = ("gpuhook.vendors.ascend.edits",)

    def driver_markers(self) -> "Sequence[str]":
        return (PCI_DRIVER, CLASS, MANAGER)

    def cache_key(self, config: "Config") -> "list[Any]":
        root = self.root(config).rstrip("/")
        lists = fingerprint.names(root + LISTS)
        # After the driver was loaded again, the same names may mean other devices.
        places = {root + PCI_DRIVER: NUMBERS, root + CLASS: ("dev",)}
        return [
            [
                [name, *(fingerprint.text(f"{folder}/{name}/{file}") for file in files)]
                for folder, files in places.items()
                for name in fingerprint.names(folder)
            ],
            [name for name in fingerprint.names(f"{root}/dev") if name.startswith(_NODES)],
            [fingerprint.names(root + folder) for folder in UB_FOLDERS],
            [fingerprint.status(root + LISTS)],
            [[name, fingerprint.status(f"{root}{LISTS}/{name}")] for name in lists],
            fingerprint.text(root + VERSION),
            [fingerprint.status(root + folder) for folder in LIBRARY_FOLDERS],
        ]

    def options(self) -> variables.AscendOptions:
        return variables.AscendOptions()

    def read(self, reading: "RequestReader", options: variables.AscendOptions) -> None:
        variables.read(reading, options)

    def check(self, grant: "Grant") -> None:
        for each in grant.inventory.asked_lists(grant.request.options):
            if each.problem:
                raise DriverError(
                    f"Ascend's list of files {LISTS}/{each.name}.list can't be used: "
                    f"{each.problem}",
                    f"Correct it, or set {variables.OPTIONS}={variables.NODES_ONLY}",
                )
        _check_places(grant.nodes)

    def warnings(self, grant: "Grant") -> list[str]:
        options, inventory = grant.request.options, grant.inventory
        unknown = [
            f"{variables.LISTS} names the list {name}, which this host doesn't have"
            for name in (() if options.nodes_only else options.lists)
            if inventory.list_called(name) is None
        ]
        asked = inventory.asked_lists(options)
        return unknown + [sentence for each in asked for sentence in each.refused]

    def nodes(self, grant: "Grant") -> "list[tuple[DeviceNode, str]]":
        found = super().nodes(grant)
        if not grant.request.options.no_ub:
            return found
        return [each for each in found if each[0].path.rpartition("/")[0] not in UB_FOLDERS]

    def environment(self, grant: "Grant") -> list[EnvironmentSetting]:  # noqa: ARG002
        return [
            EnvironmentSetting("ASCEND_DOCKER_RUNTIME", "True", "Ascend's programs look for it")
        ]

    def edits(self, grant: "Grant", image: "Image") -> "list[Operation]":
        from gpuhook.vendors.ascend import edits  # noqa: PLC0415 - only for the hook

        return edits.edits(grant, image)


def _check_places(nodes: "list[tuple[DeviceNode, str]]") -> None:
    """Refuse an NPU and a vNPU with one number: both would be the same node in a container."""
    taken: dict[str, DeviceNode] = {}
    for node, _ in nodes:
        place = node.inside or node.path
        before = taken.setdefault(place, node)
        if before is not node:
            raise RequestError(
                f"{before.path} and {node.path} would both be {place} in the container",
                "Request one of the two",
            )


VENDOR = Ascend()
