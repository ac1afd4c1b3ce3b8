"""Checks of MPS, if config.toml shares GPUs by it."""

from collections.abc import Iterator

from gpuhook.base.errors import GpuhookError
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure, ok


def mps_answers(case: Case) -> Iterator[Finding]:
    """Check that the control daemon of [gpuhook.mps] answers."""
    if not case.config.mps_devices:
        return
    from gpuhook.tools.mps import status  # noqa: PLC0415 - few share devices by MPS

    try:
        status.check(case.config)
    except GpuhookError as error:
        yield failure("mps", f"GPUs are shared by MPS, and {error.cause}", error.remedy)
    else:
        yield ok("mps", "MPS' control daemon answers")
