"""gpuhook labels: the labels of a cluster's node, as the vendors' programs write them."""

import os
import re
import signal
import time

import click

from gpuhook.base.config.model import Config
from gpuhook.base.errors import (
    DriverError,
    GpuhookError,
    NoDriverError,
    PluginError,
    RequestError,
    printable,
    shown,
)
from gpuhook.base.host import files as host_files
from gpuhook.cluster.device_plugin import configure
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.dra import access
from gpuhook.cluster.dra.api_client import ApiClient
from gpuhook.cluster.labels import node_labels
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.followed import FollowedConfig
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cdi.write import write
from gpuhook.tools.cli._help import SecondsParam, command
from gpuhook.tools.cli._output import config_option, format_option, print_json, raise_last, say

_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_FEATURES = "/etc/kubernetes/node-feature-discovery/features.d/gpuhook"


@command(
    examples={
        "gpuhook labels": "Print the labels of this machine",
        f"gpuhook labels --output {_FEATURES} --interval 60": "Keep a file for "
        "node-feature-discovery",
        "gpuhook labels --node gpu7": "Label the node by the API, in a pod",
        "gpuhook labels --node gpu7 --kubeconfig /etc/kubernetes/labels.conf": "The same on the "
        "node itself",
    },
)
@click.option("--output", metavar="FILE", help="The file to replace, where it says something else.")
@click.option("--node", metavar="NAME", help="Label this node by the API, as the pod's account.")
@click.option(
    "--kubeconfig", metavar="FILE", help="How to ask the API, with --node, outside of a pod."
)
@click.option("--remove", is_flag=True, help="Remove the file, or our labels from the node.")
@click.option(
    "--interval", type=SecondsParam(1, 86400), metavar="SECONDS",
    help="Check again at this interval, until stopped.  [default: once]",
)  # fmt: skip
@click.option(
    "--config-file", metavar="FILE",
    help="The device plugin's file, for mig-strategy and sharing.  [default: $CONFIG_FILE]",
)  # fmt: skip
@format_option
@config_option
def labels(
    output: str | None,
    node: str | None,
    kubeconfig: str | None,
    remove: bool,
    interval: float | None,
    config_file: str | None,
    output_format: str,
    config_path: str | None,
) -> None:
    """Print the node labels that the vendors' own programs would set.

    Those of GPU feature discovery and of AMD's node labeller, with the same names and values:
    nvidia.com/gpu.product and so on. Which MIG devices and shares there are, the
    device plugin's file and variables say (MIG_STRATEGY, CONFIG_FILE). Other vendors have none.
    """
    _check(output, node, remove, interval)
    if kubeconfig and not node:
        raise RequestError("--kubeconfig is about a node", "Add --node")
    written_to = node_labels.ClusterNode(node, ApiClient(access.find(kubeconfig))) if node else None
    followed = FollowedConfig(config_path)
    flags = {configure.FILE: config_file} if config_file else {}
    read, warnings = configure.read(flags, os.environ)
    settings = configure.apply(read, followed.config)
    for warning in warnings:
        click.echo(f"gpuhook: {printable(warning)}.", err=True)
    # A pod's first process ignores signals that have no handler, and is killed after 30 s.
    for number in (signal.SIGTERM, signal.SIGINT) if interval is not None else ():
        signal.signal(number, lambda *_: os._exit(0))  # there is nothing to tidy up
    while True:
        try:
            _once(followed.config, settings, output, written_to, output_format, remove=remove)
        except GpuhookError as error:
            if interval is None:
                raise
            click.echo(f"gpuhook: {error}", err=True)
        if interval is None:
            return
        time.sleep(interval)
        if followed.has_changed(lambda text: click.echo(f"gpuhook: {printable(text)}.", err=True)):
            settings = configure.apply(read, followed.config)


def _check(output: str | None, node: str | None, remove: bool, interval: float | None) -> None:
    """Refuse conflicting options."""
    if output and node:
        raise RequestError("--output and --node don't go together", "Use one of them")
    if (remove or interval) and not (output or node):
        raise RequestError(
            "--remove and --interval are about a file or a node", "Add --output or --node"
        )
    if node and not _NODE.fullmatch(node):
        raise RequestError(f"{shown(node)} can't be a node's name", "Write it as kubectl does")


def _once(
    config: Config,
    settings: Settings,
    output: str | None,
    node: node_labels.ClusterNode | None,
    form: str,
    *,
    remove: bool,
) -> None:
    made: dict[str, str] = {}
    failed: list[DriverError] = []
    if not remove:
        try:
            found, failed = survey.present(config, lambda vendor: (vendor, _asked(config, vendor)))
        except NoDriverError:
            found = []
        made, warnings, more = node_labels.labels(found, settings, config)
        failed = [*failed, *more]
        for warning in warnings:
            click.echo(f"gpuhook: {printable(warning)}.", err=True)
    if output or node:
        raise_last(failed)  # what is there stays: the driver may answer the next time
    if node:
        if node.keep(made):
            say(f"node {node.name} has {len(made)} labels")
    elif output:
        _write(os.path.abspath(output), made)
    elif form == "json":
        print_json(made)
    else:
        click.echo(node_labels.text(made), nl=False)
    raise_last(failed)


def _write(path: str, made: dict[str, str]) -> None:
    """Write the labels to a file; without any it is removed, as readers then have none."""
    if made:
        if write(path, node_labels.text(made)):
            say(f"wrote {path}")
        return
    host_files.check_way(path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PluginError(
            f"{path} can't be removed: {error.strerror}", "Run this as root"
        ) from None
    say(f"removed {path}")


def _asked(config: Config, vendor: contract.Vendor) -> Inventory:
    """Return the driver's current state: a saved inventory may have a GPU that is lost since."""
    return cache.follow(config, vendor, ask=True).inventory
