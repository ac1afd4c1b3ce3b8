"""Checks of a declared vendor for the doctor.

A missing driver is a warning only: nothing shows whether this host should have one.
"""

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

from gpuhook.base.errors import DriverError
from gpuhook.core import contract
from gpuhook.tools.doctor.case import Case, VendorChecks
from gpuhook.tools.doctor.finding import Finding, ok, warning


def _check_of(names: ModuleType) -> Callable[[Case], Iterator[Finding]]:
    check_name = f"{names.NAME}-devices"

    def check(case: Case) -> Iterator[Finding]:
        """Check that the devices of the table exist."""
        vendor = contract.load(names)
        try:
            found = vendor.discover(case.config)
        except DriverError as error:
            yield warning(check_name, error.cause, error.remedy)
            return
        labels = ", ".join(device.label for device in found.devices) or "none"
        yield ok(check_name, f"{names.TITLE}'s devices below {found.root}: {labels}")
        if missing := found.missing():
            text = f"{names.TITLE}'s driver has no node {', '.join(missing)}"
            yield warning(check_name, text, "Check udev's rule for it, or load the driver again")

    check.__name__ = check_name.replace("-", "_")
    return check


def of(names: ModuleType) -> SimpleNamespace:
    """Return the contents of this module for the vendor with these names."""
    table = names.TABLE
    paths = [*table.nodes, *table.optional_nodes, *table.control]
    nodes = tuple(path.replace("{n}", "[0-9]*") for path in paths)
    return SimpleNamespace(CHECKS=VendorChecks((_check_of(names),), report_nodes=nodes))
