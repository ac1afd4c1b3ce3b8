"""All checks, in the order in which a person would look."""

from collections.abc import Callable, Iterable, Iterator

from gpuhook.doctor import docker, engines, host, install
from gpuhook.doctor.case import Case
from gpuhook.doctor.finding import Finding, failure
from gpuhook.vendors.nvidia.doctor import driver, nodes

Check = Callable[[Case], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    driver.driver_loaded,
    driver.driver_versions,
    nodes.device_nodes,
    driver.nvml_answers,
    driver.driver_complete,
    driver.loader_cache,
    nodes.dev_char_links,
    install.launchers,
    install.runtime_works,
    install.python,
    install.configuration,
    install.launcher_settings,
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
    host.cdi_specs,
    host.foreign_toolkit,
)


def examine(case: Case, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """Run every check; one that fails itself is a finding and stops no other."""
    for check in checks:
        try:
            yield from check(case)
        except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            name = check.__name__.replace("_", "-")
            text = f"The check {name} itself failed: {type(error).__name__}: {error}"
            yield failure(name, text, "Report it, with gpuhook doctor --report FILE")
