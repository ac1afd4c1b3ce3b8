"""What the vendors' folders have for the doctor: checks, and what the report shows of a driver.

A vendor's module ``doctor`` has four tuples. ``DRIVER_CHECKS`` are made before all others but the
configuration's, and ``HOST_CHECKS`` after them; both hold functions, or steps where one check
needs what another has found. ``REPORT_FILES`` are paths and shell patterns of texts in /proc and
/sys that hold no setting of a user's program, ``REPORT_NODES`` patterns of nodes.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gpuhook.ground.config.model import Config
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure
from gpuhook.tools.doctor.step import DRIVER, Check, Step, step_of
from gpuhook.tools.vendors import parts
from gpuhook.vendors import registry

# What says where drivers are, and so what every check of a vendor needs.
CONFIGURATION = "configuration"


class VendorDoctor(NamedTuple):
    """What one vendor has for the doctor; ``name`` is the vendor's."""

    name: str
    driver_checks: tuple[Step, ...]
    host_checks: tuple[Step, ...]
    report_files: tuple[str, ...]
    report_nodes: tuple[str, ...]


def doctors(config: Config) -> Iterator[VendorDoctor]:
    """Yield what each known vendor has; where that can't be used, one check that says so."""
    for name, names in registry.known(config).items():
        try:
            module = parts.doctor(names)
            if module is None:
                continue
            found = VendorDoctor(
                name,
                tuple(_step(name, check, DRIVER) for check in module.DRIVER_CHECKS),
                tuple(_step(name, check) for check in module.HOST_CHECKS),
                tuple(module.REPORT_FILES),
                tuple(module.REPORT_NODES),
            )
        except Exception as error:  # noqa: BLE001 - the other vendors are to be examined
            found = VendorDoctor(name, (Step(_unusable(name, error)),), (), (), ())
        yield found


def _step(name: str, check: Check | Step, part: str = "") -> Step:
    """Return a vendor's check as a step, which looks below that vendor's driver root."""
    step = step_of(check)
    needs = (CONFIGURATION, *step.needs)
    return replace(step, check=_below_its_root(name, step.check), needs=needs, part=part)


def _below_its_root(name: str, check: Check) -> Check:
    """Return a vendor's check, which looks below that vendor's driver root."""

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
