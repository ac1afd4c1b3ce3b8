"""Checks of LXC containers that have devices: their lines are there, and up to date."""

import os
from collections.abc import Iterator

from gpuhook.base.errors import EngineError, GpuhookError
from gpuhook.hpc.lxc import containers
from gpuhook.hpc.lxc.engine import NAME
from gpuhook.tools.doctor.case import Case, CheckStep
from gpuhook.tools.doctor.cdi import state_folder
from gpuhook.tools.doctor.finding import Finding, failure, ok, warning
from gpuhook.tools.engines import lxc_text
from gpuhook.tools.engines.files import read_text

_INSTALL = "gpuhook install --engine lxc --container NAME"


def lxc(case: Case) -> Iterator[Finding]:
    """Check that containers' lines are current, and that no container lacks its included file."""
    if case.machine.root:  # another host's containers would be planned with our devices
        return
    yield from _lacking()
    known = containers.requests(state_folder(case)).load()
    stale = [
        each.name for each in known if os.path.exists(each.file) and not _is_current(case, each)
    ]
    for name in stale:
        yield warning(
            NAME,
            f"The lines of the LXC container {name} are out of date: it may start without its "
            "devices, or not at all",
            "Start gpuhook-watch.service, which keeps them up to date, or install them again: "
            + _INSTALL.replace("NAME", name),
        )
    if known and not stale:
        ending = "" if len(known) == 1 else "s"
        yield ok(NAME, f"{len(known)} LXC container{ending} with devices, and current lines")


def _lacking() -> Iterator[Finding]:
    """Yield containers that include a missing file, as after a rollback or a migration."""
    for path in containers.every_file():
        try:
            included = lxc_text.parse(read_text(path) or "", path).get(lxc_text.OURS, "")
        except GpuhookError:
            continue
        if included and not os.path.exists(included):
            yield failure(
                NAME,
                f"{path} includes {included}, which doesn't exist: the container can't start",
                f"Remove the line, or add the devices again: {_INSTALL}",
            )


def _is_current(case: Case, container: containers.LxcContainer) -> bool:
    """Tell whether the included file has the lines of today's plan."""
    try:
        (included, text) = containers.files(container, state_folder(case)).units[1]
        return read_text(included) == text
    except EngineError:
        return False
    except GpuhookError:
        return True  # the checks of drivers report it


STEPS = (CheckStep(lxc, engine=NAME),)
