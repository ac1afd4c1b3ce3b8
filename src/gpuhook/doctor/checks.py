"""All checks, in the order in which a person would look."""

from collections.abc import Iterable, Iterator

from gpuhook.config import Config
from gpuhook.doctor import cdi, cdi_engines, docker, engines, host, install, kubernetes
from gpuhook.doctor.case import Case
from gpuhook.doctor.finding import Finding, failure
from gpuhook.doctor.vendors import Check, doctors

# Those that are about no vendor's driver.
CHECKS: tuple[Check, ...] = (
    install.launchers,
    install.runtime_works,
    install.python,
    install.configuration,
    install.launcher_settings,
    install.driver_roots,
    install.saved_inventory,
    install.recent_errors,
    engines.engine_found,
    docker.docker,
    engines.containerd,
    engines.crio,
    engines.podman,
    host.kernel,
    host.cgroups,
    host.security_modules,
    host.rootless,
    cdi.files,
    cdi.paths,
    cdi.numbers,
    cdi.names,
    cdi.conflicts,
    cdi.refresh_errors,
    cdi_engines.readers,
    kubernetes.device_plugin,
)


def every_check(config: Config) -> list[Check]:
    """Return the checks of the vendors' drivers, our own, and the vendors' checks of the host."""
    vendors = list(doctors(config))
    first = [check for vendor in vendors for check in vendor.driver_checks]
    last = [check for vendor in vendors for check in vendor.host_checks]
    return [*first, *CHECKS, *last]


def examine(case: Case, checks: Iterable[Check] | None = None) -> Iterator[Finding]:
    """Run every check; one that fails itself is a finding and stops no other."""
    for check in every_check(case.config) if checks is None else checks:
        try:
            yield from check(case)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are of use
            name = getattr(check, "__name__", "unnamed").replace("_", "-")
            text = f"The check {name} itself failed: {type(error).__name__}: {error}"
            yield failure(name, text, "Report it, with gpuhook doctor --report FILE")
