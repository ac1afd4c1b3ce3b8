"""gpuhook dra: describe this machine's devices to a cluster, by Dynamic Resource Allocation."""

import os
import re

import click

from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import PluginError, RequestError, printable, shown
from gpuhook.start import contract
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.cdi.write import to_text
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, print_json, raise_last
from gpuhook.tools.dra import access, versions
from gpuhook.tools.dra.api_client import Client
from gpuhook.tools.dra.probe import probe
from gpuhook.tools.kubernetes import dra as describing
from gpuhook.tools.vendors import survey
from gpuhook.vendors import registry

_REGISTRY = "/var/lib/kubelet/plugins_registry"
_PATIENCE = 10.0  # seconds for each call of a probe
_VERSION = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,4})(?:\.[0-9A-Za-z.+-]*)?")


@command(
    examples={
        "gpuhook dra --dry-run --node gpu7": "Print what the node gpu7 would publish, as YAML",
        "gpuhook dra --dry-run --dynamic-mig --format json": "With all MIG devices that could be",
        "gpuhook dra --dry-run --driver amd=gpu.example.com": "Under another driver's name",
    },
)
@click.option("--dry-run", is_flag=True, help="Print the objects, and end; needed for now.")
@click.option(
    "--format", "form", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True,
    help="How to print them.",
)  # fmt: skip
@click.option(
    "--node", metavar="NAME", help="The node's name.  [default: $NODE_NAME, else the host's]"
)
@click.option("--pool", metavar="NAME", help="The pool of its devices.  [default: the node's name]")
@click.option(
    "--driver", "drivers", metavar="VENDOR=NAME", multiple=True,
    help="Another name for a vendor's driver than its maker's own.",
)  # fmt: skip
@click.option(
    "--dynamic-mig", is_flag=True,
    help="Publish every MIG device that GPUs could be divided into, beside the whole GPUs.",
)  # fmt: skip
@click.option(
    "--kubernetes", "release", metavar="VERSION",
    help="The version of the cluster: 1.34 wants counters and devices in one slice.  "
    "[default: the API server's, or with --dry-run 1.35]",
)  # fmt: skip
@click.option(
    "--kubeconfig",
    metavar="FILE",
    help="How to ask the API server, outside of a pod: by a certificate or a token.",
)
@click.option(
    "--api-server", metavar="URL", help="Its address, https://..., in place of the usual one."
)
@click.option(
    "--probe", "is_probe", is_flag=True,
    help="Ask the plugin of this pod ($POD_UID) by its sockets, as the kubelet does, and end.",
)  # fmt: skip
@config_option
def dra(
    dry_run: bool,
    form: str,
    node: str | None,
    pool: str | None,
    drivers: tuple[str, ...],
    dynamic_mig: bool,
    release: str | None,
    kubeconfig: str | None,
    api_server: str | None,
    is_probe: bool,
    config_path: str | None,
) -> None:
    """Describe the machine's devices to a Kubernetes cluster, by Dynamic Resource Allocation.

    Prints the ResourceSlices of every vendor and the DeviceClasses that claims name, as kubectl
    apply takes them. Devices that can't be used have a taint, and the reason is a warning. No
    cluster is needed; with --kubeconfig or --api-server it is asked for its version. That a
    kubelet is served isn't done yet: only --dry-run works.
    """
    if is_probe:
        probe(_REGISTRY, os.environ.get("POD_UID", ""), _PATIENCE)
        return
    if not dry_run:
        raise PluginError(
            "gpuhook dra doesn't serve a kubelet yet",
            "Print what it would publish with --dry-run, and hand devices out with "
            "`gpuhook device-plugin`",
        )
    config = load(config_path)
    choices = describing.Choices(
        node=node or os.environ.get("NODE_NAME") or os.uname().nodename.lower(),
        pool=pool or "",
        drivers=_drivers(drivers, config),
        dynamic=dynamic_mig,
        kubernetes=_kubernetes(release, kubeconfig, api_server),
    )
    found, failed = survey.present(config, lambda vendor: (vendor, _asked(config, vendor)))
    objects, warnings = describing.objects(found, choices, config)
    for warning in warnings:
        click.echo(f"gpuhook: {printable(warning)}.", err=True)
    if form == "json":
        print_json({"apiVersion": "v1", "kind": "List", "items": objects})
    else:
        click.echo("".join(to_text(each, "yaml") for each in objects), nl=False)
    raise_last(failed)


def _asked(config: Config, vendor: contract.Vendor) -> Inventory:
    """Return what a driver says now: a saved inventory may have a GPU that is lost since."""
    return cache.follow(config, vendor, ask=True).inventory


def _drivers(given: tuple[str, ...], config: Config) -> dict[str, str]:
    """Return the drivers' names by vendor; RequestError for a vendor that isn't known."""
    known = [*registry.known(config)]
    found = {}
    for each in given:
        vendor, equals, name = each.partition("=")
        if not equals or vendor not in known:
            raise RequestError(
                f"--driver {shown(each)} names no vendor and its driver",
                f"Write VENDOR=NAME, with one of {', '.join(known)}",
            )
        found[vendor] = name
    return found


def _kubernetes(
    release: str | None, kubeconfig: str | None, api_server: str | None
) -> tuple[int, int]:
    """Return the version of the cluster: as it was given, as the API server says, or our default.

    PluginError where the API server is named and can't be asked.
    """
    if release is not None:
        return _release(release)
    if not kubeconfig and not api_server:
        return describing.COUNTERS_APART
    return versions.release(Client(access.find(kubeconfig, api_server)))


def _release(text: str) -> tuple[int, int]:
    match = _VERSION.fullmatch(text)
    if match is None:
        raise RequestError(f"{shown(text)} isn't a version of Kubernetes", "Write it as 1.35")
    return int(match[1]), int(match[2])
