"""The vendors' parts of the doctor: checks, and files of the driver for the report.

A vendor's module ``doctor`` has four tuples. ``DRIVER_CHECKS`` run before all others except the
configuration's, and ``HOST_CHECKS`` after them. Both contain functions, or steps if one check
depends on another's findings. ``REPORT_FILES`` are paths and shell patterns of texts in /proc and
/sys without settings of users' programs, ``REPORT_NODES`` are patterns of nodes.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gpuhook.base.config.model import Config
from gpuhook.tools import vendor_parts
from gpuhook.tools.doctor.case import DRIVER, Case, Check, Step, step_of
from gpuhook.tools.doctor.finding import Finding, failure
from gpuhook.vendors import registry

# The check of driver locations, which every check of a vendor needs.
CONFIGURATION = "configuration"


class VendorDoctor(NamedTuple):
    """A vendor's part of the doctor; ``name`` is the vendor's."""

    name: str
    driver_checks: tuple[Step, ...]
    host_checks: tuple[Step, ...]
    report_files: tuple[str, ...]
    report_nodes: tuple[str, ...]


def doctors(config: Config) -> Iterator[VendorDoctor]:
    """Yield each vendor's part; if it is unusable, a check that reports that."""
    for name, names in registry.known(config).items():
        try:
            module = vendor_parts.doctor(names)
            if module is None:
                continue
            found = VendorDoctor(
                name,
                tuple(_step(name, check, DRIVER) for check in module.DRIVER_CHECKS),
                tuple(_step(name, check) for check in module.HOST_CHECKS),
                tuple(module.REPORT_FILES),
                tuple(module.REPORT_NODES),
            )
        except Exception as error:  # noqa: BLE001 - the other vendors must still be examined
            found = VendorDoctor(name, (Step(_unusable(name, error)),), (), (), ())
        yield found


def _step(name: str, check: Check | Step, part: str = "") -> Step:
    """Return a vendor's check as a step below that vendor's driver root."""
    step = step_of(check)
    needs = (CONFIGURATION, *step.needs)
    return replace(step, check=_below_its_root(name, step.check), needs=needs, part=part)


def _below_its_root(name: str, check: Check) -> Check:
    """Return a vendor's check wrapped to run below that vendor's driver root."""

    @functools.wraps(check)
    def examine(case: Case) -> Iterable[Finding]:
        return check(case.of_vendor(name))

    return examine


def _unusable(name: str, error: Exception) -> Check:
    text = f"The checks of {name} can't be used: {type(error).__name__}: {error}"

    def check(case: Case) -> Iterator[Finding]:
        del case
        yield failure(f"{name}-checks", text, "Report it, with gpuhook doctor --report FILE")

    return check
