"""The end of ``gpuhook install``: what an administrator can do next on this host."""

from types import ModuleType

from gpuhook.base.config.loader import load
from gpuhook.base.errors import ConfigError
from gpuhook.monitor.vendors import survey
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia import names as nvidia

IMAGE = "debian:12"
# Engines with a command like docker run.
_RUN = ("docker", "podman")
_NO_DRIVER = (
    "No driver of a GPU is loaded here: install one, until gpuhook info shows its GPUs, or try "
    "simulated GPUs: gpuhook help simulate"
)


def lines(engine: str, runtime: str, *, gpus: bool) -> list[str]:
    """Return the next steps after a change for an engine: a container to try, and the doctor.

    ``gpus`` says whether its --gpus works now. Without a driver the container would fail.
    """
    vendor = _vendor()
    found = [] if vendor else [_NO_DRIVER]
    if engine in _RUN:
        when = "Try it" if vendor else "Then try"
        found.append(f"{when}: {_trial(engine, runtime, vendor or nvidia, gpus=gpus)}")
    return [*found, "Check this host: gpuhook doctor"]


def _trial(engine: str, runtime: str, vendor: ModuleType, *, gpus: bool) -> str:
    """Return a command that starts a container with all devices of a vendor."""
    asks = f"--runtime {runtime} -e {next(iter(vendor.VARIABLES))}=all"
    if vendor.NAME != nvidia.NAME:
        return f"{engine} run --rm {asks} {IMAGE} ls -R /dev"
    return f"{engine} run --rm {'--gpus all' if gpus else asks} {IMAGE} nvidia-smi -L"


def how_to_get_gpus(engine: str) -> str:
    """Return the line for an engine whose --gpus doesn't work."""
    also = ", and devices in compose files, don't" if engine == "docker" else " doesn't"
    return f"{engine}: {engine} run --gpus{also} work yet: gpuhook install --engine {engine} --gpus"


def _vendor() -> ModuleType | None:
    """Return the names of the vendor whose driver this host has loaded, None if none is seen."""
    try:
        config = load()
    except ConfigError:
        return nvidia
    vendors = registry.all_vendors(config)
    return next((vendors[name] for name in survey.loaded(config)), None)
