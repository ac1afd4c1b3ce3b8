"""The end of ``gpuhook install``: what an administrator can do next on this host."""

import os

from gpuhook.base.config.loader import load
from gpuhook.base.errors import ConfigError
from gpuhook.core import contract
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.model import CONTROL
from gpuhook.vendors.nvidia.names import NAME

IMAGE = "debian:12"
# Engines with a command like docker run.
_RUN = ("docker", "podman")


def lines(engine: str, runtime: str, *, gpus: bool) -> list[str]:
    """Return the next steps after a change for an engine: a container to try, and the doctor.

    ``gpus`` says whether its --gpus works now.
    """
    found = [f"Try it: {trial(engine, runtime, gpus=gpus)}"] if engine in _RUN else []
    return [*found, "Check this host: gpuhook doctor"]


def trial(engine: str, runtime: str, *, gpus: bool) -> str:
    """Return a command that starts a container with all devices of this host's vendor."""
    vendor = _vendor()
    if vendor == NAME:
        variable = next(iter(registry.KNOWN[vendor].VARIABLES))
        asks = "--gpus all" if gpus else f"--runtime {runtime} -e {variable}=all"
        return f"{engine} run --rm {asks} {IMAGE} nvidia-smi -L"
    variable = next(iter(registry.KNOWN[vendor].VARIABLES))
    return f"{engine} run --rm --runtime {runtime} -e {variable}=all {IMAGE} ls -R /dev"


def how_to_get_gpus() -> str:
    """Return the line for a Docker whose --gpus doesn't work."""
    return (
        "docker: docker run --gpus, and devices in compose files, don't work yet: "
        "gpuhook install --engine docker --gpus"
    )


def _vendor() -> str:
    """Return the name of the vendor whose driver this host has, NVIDIA's if none is seen."""
    try:
        config = load()
    except ConfigError:
        return NAME
    for name, names in registry.KNOWN.items():
        root = config.driver_root_of(name).rstrip("/")
        traces = [CONTROL.path] if name == NAME else contract.load(names).traces()
        if any(os.path.lexists(root + path) for path in traces):
            return name
    return NAME
