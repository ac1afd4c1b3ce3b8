"""The vendors' parts of the doctor: checks, and files of the driver for the report."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gpuhook.base.config.model import Config
from gpuhook.monitor.vendor_parts import part
from gpuhook.tools.doctor.case import DRIVER, Case, Check, CheckStep, VendorChecks, step_of
from gpuhook.tools.doctor.driver import default_checks
from gpuhook.tools.doctor.finding import Finding, failure
from gpuhook.vendors import registry

# The check of driver locations, which every check of a vendor needs.
CONFIGURATION = "configuration"


class VendorDoctor(NamedTuple):
    """A vendor's part of the doctor; ``name`` is the vendor's."""

    name: str
    driver_checks: tuple[CheckStep, ...]
    host_checks: tuple[CheckStep, ...]
    report_files: tuple[str, ...]
    report_nodes: tuple[str, ...]


def doctors(config: Config) -> Iterator[VendorDoctor]:
    """Yield each vendor's part; if it is unusable, a check that reports that."""
    for name, names in registry.all_vendors(config).items():
        try:
            module = part("tools", names, "doctor")
            checks: VendorChecks = module.CHECKS if module else default_checks(names)
            found = VendorDoctor(
                name,
                tuple(_step(name, check, DRIVER) for check in checks.driver),
                tuple(_step(name, check) for check in checks.host),
                tuple(checks.report_files),
                tuple(checks.report_nodes),
            )
        except Exception as error:  # noqa: BLE001 - the other vendors must still be examined
            found = VendorDoctor(name, (CheckStep(_unusable(name, error)),), (), (), ())
        yield found


def _step(name: str, check: Check | CheckStep, group: str = "") -> CheckStep:
    """Return a vendor's check as a step below that vendor's driver root."""
    step = step_of(check)
    needs = (CONFIGURATION, *step.needs)
    return replace(step, check=_below_its_root(name, step.check), needs=needs, part=group)


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
