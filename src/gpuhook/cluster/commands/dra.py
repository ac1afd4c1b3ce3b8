"""gpuhook dra: this host's devices for a cluster's claims, by Dynamic Resource Allocation."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError, printable, shown
from gpuhook.cluster.device_plugin.configure import look_at
from gpuhook.cluster.dra import access, versions
from gpuhook.cluster.dra import slices as describing
from gpuhook.cluster.dra.api_client import ApiClient
from gpuhook.cluster.dra.options import DraOptions
from gpuhook.cluster.dra.probe import probe
from gpuhook.monitor.followed import ConfigChanged, FollowedConfig, start_again
from gpuhook.monitor.ledger.records import FOLDER
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cdi.write import to_text
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, print_json, raise_last
from gpuhook.vendors import registry

# Options for serving a kubelet: a field of dra.options.DraOptions, and its help text.
_PLACES = {
    "plugins": "The kubelet's folder for the drivers' sockets.",
    "registry": "The kubelet's folder for the registration of drivers.",
    "cdi_folder": "The folder for the CDI specs of claims, which engines read.",
    "cdi_hook_path": "The hook's path on the host.  [default: in this program's folder]",
    "driver_root": "The driver root on the host.",
    "driver_root_ctr_path": "The driver root as this process sees it, in a pod.",
    "dev_root": "The folder on the host that contains the nodes' /dev, if not the driver root.",
}
_PATIENCE = 60.0  # seconds for each call of a probe; a hanging driver takes 30
_NUMBER = re.compile(r"[0-9]{1,3}")
_MOST_SHARES = 128
_LONGEST = 10**9  # seconds
_FOR_SERVICE = ("recovery", "device_metadata", "metrics_listen", *_PLACES)
_FOR_PROBE = ("is_probe", "registry", "config_path")  # the options that a probe uses
_VERSION = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,4})(?:\.[0-9A-Za-z.+-]*)?")


def _seconds(_context: click.Context, _option: click.Parameter, value: float) -> float:
    if not 0 <= value <= _LONGEST:
        raise click.BadParameter(f"{value} isn't a number of seconds from 0 to {_LONGEST}")
    return value


def _check_options(is_probe: bool, dry_run: bool, dynamic: bool) -> None:
    """Raise RequestError for an option that would have no effect, or that can't be served."""
    context = click.get_current_context()
    for each in context.command.params:
        name = str(each.name)
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if is_probe:
            mode = "" if name in _FOR_PROBE else "isn't for --probe"
        elif dry_run:
            mode = "isn't for --dry-run" if name in _FOR_SERVICE else ""
        else:
            mode = "is for --dry-run" if name in ("form", "release") else ""
        if mode:
            raise RequestError(f"{each.opts[0]} {mode}", "Omit one of the two")
    if dynamic and not dry_run:
        raise RequestError(
            "gpuhook doesn't prepare MIG devices that have to be created first",
            "Use --dynamic-mig only with --dry-run",
        )


def _check_places(given: dict[str, Any]) -> None:
    """Raise RequestError for a path that the kubelet or engines would interpret differently."""
    usual = DraOptions()
    for name in _PLACES:
        path = given[name]
        if not path.startswith("/") and (path or getattr(usual, name)):
            raise RequestError(
                f"--{name.replace('_', '-')} {shown(path)} isn't an absolute path",
                "Start it with /",
            )


def _places(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for paths, each with its variable."""
    usual = DraOptions()
    for name, text in reversed(_PLACES.items()):
        default = getattr(usual, name)
        shown_default = f"{text}  [default: {default}]" if default else text
        command = click.option(
            f"--{name.replace('_', '-')}", envvar=f"GPUHOOK_{name.upper()}", metavar="PATH",
            default=default, help=shown_default,
        )(command)  # fmt: skip
    return command


@command(
    examples={
        "gpuhook dra": "Publish this node's devices, and prepare claims for its kubelet",
        "gpuhook dra --dry-run --node gpu7": "Print what the node gpu7 would publish, as YAML",
        "gpuhook dra --dry-run --dynamic-mig --format json": "Include all possible MIG devices",
        "gpuhook dra --dry-run --driver amd=gpu.example.com": "Print it with another driver name",
        "gpuhook dra --share nvidia=4": "Share a GPU between four claims, a quarter each",
    },
)
@click.option("--dry-run", is_flag=True, help="Print what would be published, and exit.")
@click.option(
    "--format", "form", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True,
    help="The output format of --dry-run.",
)  # fmt: skip
@click.option(
    "--node", metavar="NAME", help="The node's name.  [default: $NODE_NAME, else the host name]"
)
@click.option("--pool", metavar="NAME", help="The pool of its devices.  [default: the node's name]")
@click.option(
    "--driver", "drivers", metavar="VENDOR=NAME", multiple=True,
    help="A name for a vendor's driver, in place of the default; may be repeated.",
)  # fmt: skip
@click.option(
    "--share", "shared", metavar="VENDOR[=N]", multiple=True,
    help="Share a vendor's devices between claims, each with a part of the memory: of any size, "
    "or N equal parts.",
)  # fmt: skip
@click.option(
    "--dynamic-mig", is_flag=True,
    help="Publish every possible MIG device, in addition to whole GPUs.",
)  # fmt: skip
@click.option(
    "--list-attributes", is_flag=True,
    help="Publish numaNode as a list for devices near several nodes: the cluster must have the "
    "feature gate DRAListTypeAttributes on.",
)  # fmt: skip
@click.option(
    "--kubernetes", "release", metavar="VERSION",
    help="The cluster's version for --dry-run: 1.34 needs counters and devices in one slice.  "
    "[default: the version of the given API server, or 1.35]",
)  # fmt: skip
@click.option(
    "--kubeconfig",
    metavar="FILE",
    help="Access to the API server outside a pod, with a certificate or a token.",
)
@click.option(
    "--api-server",
    metavar="URL",
    help="The API server's address, https://..., in place of the default.",
)
@click.option(
    "--probe", "is_probe", is_flag=True,
    help="Query this pod's plugin ($POD_UID) through its sockets, as the kubelet does, and exit.",
)  # fmt: skip
@click.option(
    "--device-metadata", is_flag=True,
    help="Describe a claim's devices to its containers by files, as Kubernetes 1.37 defines them.",
)  # fmt: skip
@click.option(
    "--metrics-listen", metavar="HOST:PORT", default="", envvar="GPUHOOK_METRICS_LISTEN",
    help="Serve metrics of claims for Prometheus at this address.  [default: nowhere]",
)  # fmt: skip
@click.option(
    "--recovery", metavar="SECONDS", default=300.0, show_default=True, callback=_seconds,
    help="Time without errors until a responding device is healthy again; 0 for never.",
)  # fmt: skip
@_places
@config_option
def dra(
    dry_run: bool,
    form: str,
    node: str | None,
    pool: str | None,
    drivers: tuple[str, ...],
    shared: tuple[str, ...],
    dynamic_mig: bool,
    list_attributes: bool,
    release: str | None,
    kubeconfig: str | None,
    api_server: str | None,
    is_probe: bool,
    config_path: str | None,
    **service: Any,
) -> None:
    """Offer the host's devices to a Kubernetes cluster, by Dynamic Resource Allocation.

    Publishes the devices of every vendor, and prepares claims' devices for the node's kubelet,
    until it is stopped (SIGTERM, SIGINT). A second instance, as during an update, needs its own
    name: $POD_UID. --dry-run prints the ResourceSlices and DeviceClasses in the format of kubectl
    apply. Unusable devices have a taint, and the reason is printed as a warning. No cluster is
    needed for that.
    """
    _check_options(is_probe, dry_run, dynamic_mig)
    _check_places(service)
    if is_probe:
        probe(service["registry"], os.environ.get("POD_UID", ""), _PATIENCE)
        return
    followed = FollowedConfig(config_path)
    config = followed.config
    choices = describing.Choices(
        node=node or os.environ.get("NODE_NAME") or os.uname().nodename.lower(),
        pool=pool or "",
        drivers=_drivers(drivers, config),
        dynamic=dynamic_mig,
        shares=_shares(shared, config),
        lists=list_attributes,
    )
    if not dry_run:
        options = DraOptions(instance=os.environ.get("POD_UID", ""), **service)
        try:
            sys.exit(_serve(followed, choices, options, kubeconfig, api_server))
        except ConfigChanged:
            start_again()
    choices = replace(choices, kubernetes=_kubernetes(release, kubeconfig, api_server))
    _show(choices, config, form)


def _show(choices: describing.Choices, config: Config, form: str) -> None:
    """Print the objects for the API server, and warnings."""
    # Queries each driver: a saved inventory may have a GPU that is lost since. Saves nothing.
    found, failed = survey.present(config, lambda vendor: (vendor, vendor.discover(config)))
    objects, warnings = describing.objects(found, choices, config)
    for warning in warnings:
        click.echo(f"gpuhook: {printable(warning)}.", err=True)
    if form == "json":
        print_json({"apiVersion": "v1", "kind": "List", "items": objects})
    else:
        click.echo("".join(to_text(each, "yaml") for each in objects), nl=False)
    raise_last(failed)


def _serve(
    followed: FollowedConfig,
    choices: describing.Choices,
    options: DraOptions,
    kubeconfig: str | None,
    api_server: str | None,
) -> int:
    """Serve the kubelet, and publish, until told to stop; return the exit status."""
    from gpuhook.cluster.dra import cluster, publish, service  # noqa: PLC0415 - not needed above
    from gpuhook.cluster.dra.devices import DeviceRegistry  # noqa: PLC0415
    from gpuhook.cluster.kubelet_endpoint.supervisor import check_packages, tell  # noqa: PLC0415

    check_packages()
    config = followed.config
    root = look_at(options.driver_root, options.driver_root_ctr_path, config)
    options = replace(options, driver_root=root)
    way = access.find(kubeconfig, api_server)
    devices = DeviceRegistry(config, choices, tell, recovery=options.recovery)
    claims = cluster.ClusterClaims(ApiClient(way), choices.node, tell)
    lock = f"{config.state_dir}/{FOLDER}/publisher"
    publisher = publish.Publisher(way, choices.node, tell, lock=lock)
    return service.run(devices, options, claims, publisher, followed)


def _drivers(given: tuple[str, ...], config: Config) -> dict[str, str]:
    """Return the drivers' names by vendor; RequestError for an unknown vendor."""
    vendors = [*registry.all_vendors(config)]
    found = {}
    for each in given:
        vendor, equals, name = each.partition("=")
        if not equals or vendor not in vendors:
            raise RequestError(
                f"--driver {shown(each)} isn't a vendor and its driver",
                f"Write VENDOR=NAME, with one of {', '.join(vendors)}",
            )
        found[vendor] = name
    return found


def _shares(given: tuple[str, ...], config: Config) -> dict[str, int]:
    """Return the number of shares by vendor, 0 for any size; RequestError for invalid input."""
    vendors = [*registry.all_vendors(config)]
    found = {}
    for each in given:
        vendor, equals, number = each.partition("=")
        if vendor not in vendors:
            raise RequestError(
                f"--share {shown(each)} doesn't start with a vendor",
                f"Write VENDOR or VENDOR=N, with one of {', '.join(vendors)}",
            )
        if equals and not (_NUMBER.fullmatch(number) and 2 <= int(number) <= _MOST_SHARES):
            raise RequestError(
                f"--share {shown(each)} has no number of shares",
                f"Write a number from 2 to {_MOST_SHARES} after =, or omit both",
            )
        found[vendor] = int(number or 0)
    return found


def _kubernetes(
    release: str | None, kubeconfig: str | None, api_server: str | None
) -> tuple[int, int]:
    """Return the cluster's version: the given one, the API server's, or the default.

    PluginError if the API server is named and doesn't respond.
    """
    if release is not None:
        return _release(release)
    if not kubeconfig and not api_server:
        return describing.COUNTERS_APART
    return versions.release(ApiClient(access.find(kubeconfig, api_server)))


def _release(text: str) -> tuple[int, int]:
    match = _VERSION.fullmatch(text)
    if match is None:
        raise RequestError(f"{shown(text)} isn't a version of Kubernetes", "Write it as 1.35")
    return int(match[1]), int(match[2])
