"""The list of all checks in their order, and their execution."""

from collections.abc import Iterable, Iterator

from gpuhook.base.config.model import Config
from gpuhook.tools import extensions
from gpuhook.tools.doctor import (
    cdi,
    cdi_engines,
    docker,
    engines,
    host,
    install,
    settings,
    without_daemon,
)
from gpuhook.tools.doctor.case import DRIVER, Case, Check, CheckStep, step_of
from gpuhook.tools.doctor.finding import Finding, Status, failure
from gpuhook.tools.doctor.vendors import CONFIGURATION, doctors

# CDI specs are compared with a working driver, found from the configuration.
_DOCUMENTS = (CONFIGURATION, DRIVER)

# Checks that concern no vendor's driver; the first one runs before the vendors' checks.
FIRST = CheckStep(install.configuration)
STEPS: tuple[CheckStep, ...] = (
    CheckStep(install.launchers),
    CheckStep(install.low_level_runtime, needs=(CONFIGURATION,)),
    CheckStep(install.runtime_starts, needs=(CONFIGURATION, "launchers", "low-level-runtime")),
    CheckStep(install.python),
    CheckStep(install.launcher_settings, needs=(CONFIGURATION,)),
    CheckStep(install.driver_roots, needs=(CONFIGURATION,)),
    CheckStep(install.saved_inventory, needs=(CONFIGURATION,)),
    CheckStep(install.memory_limits, needs=(CONFIGURATION,)),
    CheckStep(install.shared_memory, needs=(CONFIGURATION,)),
    CheckStep(install.recent_errors, needs=(CONFIGURATION,)),
    CheckStep(install.recent_warnings, needs=(CONFIGURATION,)),
    CheckStep(engines.engine_found),
    CheckStep(docker.docker, engine="docker"),
    CheckStep(engines.containerd, engine="containerd"),
    CheckStep(engines.crio, engine="crio"),
    CheckStep(engines.podman, engine="podman"),
    CheckStep(engines.used, needs=engines.REGISTERED),
    CheckStep(without_daemon.slurm),
    CheckStep(host.kernel),
    CheckStep(host.kernel_events),
    CheckStep(host.cgroups),
    CheckStep(host.security_modules),
    CheckStep(host.rootless, engine="docker"),
    CheckStep(cdi.files, needs=(CONFIGURATION,)),
    CheckStep(cdi.paths, needs=_DOCUMENTS),
    CheckStep(cdi.numbers, needs=_DOCUMENTS),
    CheckStep(cdi.names, needs=_DOCUMENTS),
    CheckStep(cdi.conflicts, needs=(CONFIGURATION,)),
    CheckStep(cdi.resource_limits, needs=(CONFIGURATION,)),
    CheckStep(cdi.refresh_errors, needs=_DOCUMENTS),
    CheckStep(cdi_engines.readers, needs=(CONFIGURATION,)),
    CheckStep(settings.device_settings, needs=_DOCUMENTS),
)


def every_step(config: Config) -> list[CheckStep]:
    """Return all steps: configuration, drivers, ours, the packages', the vendors' others."""
    vendors = list(doctors(config))
    drivers = [step for vendor in vendors for step in vendor.driver_checks]
    hosts = [step for vendor in vendors for step in vendor.host_checks]
    packages = [step for module in extensions.check_modules() for step in module.STEPS]
    return [FIRST, *drivers, *STEPS, *packages, *hosts]


class Examination:
    """A run of the checks, executed while the findings are iterated over.

    ``findings`` are those so far, ``skipped`` the names of checks that were skipped, because a
    check that they need has failed, ``broken`` those of checks that raised an exception.
    """

    def __init__(self, case: Case, steps: Iterable[CheckStep]) -> None:
        self._case = case
        self._steps = steps
        self.findings: list[Finding] = []
        self.skipped: list[str] = []
        self.broken: list[str] = []

    def __iter__(self) -> Iterator[Finding]:
        failed: set[str] = set()
        for step in self._steps:
            if step.engine and self._case.engine not in ("", step.engine):
                continue
            if not failed.isdisjoint(step.needs):
                self.skipped.append(step.name)
                continue
            for finding in self._made(step):
                self.findings.append(finding)
                if finding.status is Status.FAILURE:
                    failed |= {finding.check, step.part}
                yield finding

    def _made(self, step: CheckStep) -> Iterator[Finding]:
        """Run one check; an exception in it becomes a finding."""
        try:
            yield from step.check(self._case)
        except Exception as error:  # noqa: BLE001 - the other checks are useful in any case
            self.broken.append(step.name)
            text = f"The check {step.name} itself failed: {type(error).__name__}: {error}"
            yield failure(step.name, text, "Report it, with gpuhook doctor --report FILE")


def examine(case: Case, checks: Iterable[Check | CheckStep] | None = None) -> Examination:
    """Return an examination of all or the given checks; an exception in one stops no other."""
    return Examination(
        case, every_step(case.config) if checks is None else [step_of(check) for check in checks]
    )
