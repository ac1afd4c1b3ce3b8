"""What a container wants of exclusive devices: its record, written before it gets anything.

``leases`` says what that record is worth, and who has a device now.
"""

import os

from gpuhook.errors import DriverError, InjectError
from gpuhook.inventory.cache import get_inventory
from gpuhook.oci.spec import State
from gpuhook.running import leases, records
from gpuhook.vendors import seam

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.config import Config
    from gpuhook.oci.spec import Spec
    from gpuhook.resolve import Resolved
    from gpuhook.vendors.seam import Grant


def concern(resolved: "Resolved", config: "Config") -> bool:
    """Tell whether a container asks for a device that one container alone may have."""
    kinds = [grant.vendor.names.KIND for grant in resolved.grants if grant.devices]
    kinds += [name.partition("=")[0] for name in resolved.cdi_devices]
    return any(kind in config.exclusive for kind in kinds)


def describe(
    state: "State", spec: "Spec", resolved: "Resolved", config: "Config"
) -> "dict[str, Any]":
    """Return the record of a container, with the devices that documents give it.

    Those of a vendor that we know are told by their nodes in ``spec``, which has them already:
    what a document calls 0 need not be what we do. Of others their names are all there is.
    """
    grants = list(resolved.grants)
    names = [name for name in resolved.cdi_devices if name.partition("=")[0] in config.exclusive]
    for kind in dict.fromkeys(name.partition("=")[0] for name in names):
        found = _by_nodes(kind, spec, config)
        if found is not None:
            grants.append(found)
            names = [name for name in names if name.partition("=")[0] != kind]
    record = records.describe(state, spec.data.get("annotations"), grants)
    return {**record, "documents": names}


def _by_nodes(kind: str, spec: "Spec", config: "Config") -> "Grant | None":
    """Return what a spec gives of a known vendor's devices, None where that can't be told."""
    from gpuhook.cdi import hook  # noqa: PLC0415 - for CDI documents alone
    from gpuhook.cdi.generate import grant  # noqa: PLC0415 - as above

    for names in seam.known(config).values():
        if kind == names.KIND:
            vendor = seam.load(names)
            try:
                inventory = get_inventory(config, vendor)
            except DriverError:
                return None
            found = hook.devices(hook.Given(spec.data), inventory)
            return grant(vendor, inventory, config, found) if found else None
    return None


def check(spec: "Spec", resolved: "Resolved", config: "Config") -> None:
    """Raise HeldError where a container has a device that another one asks for.

    To say so before the low-level runtime is called, or where no container is started: it is
    made sure when the record is written.
    """
    record = describe(State("", 0, "", None), spec, resolved, config)
    leases.refuse(record, records.read_all(config.state_dir), config.exclusive)


def take(state: "State", spec: "Spec", resolved: "Resolved", config: "Config") -> None:
    """Write the record of a container that gets its devices by its config.json.

    HeldError where another container has one of them.
    """
    try:
        process = os.open(f"/proc/{state.pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InjectError(
            f"The container's process {state.pid} can't be looked at: {error.strerror}",
            "Look at the runtime's log for why the container ended while it was created",
        ) from None
    try:
        record = describe(state, spec, resolved, config)
        with records.Written(config.state_dir, process, record, exclusive=config.exclusive):
            pass
    finally:
        os.close(process)
