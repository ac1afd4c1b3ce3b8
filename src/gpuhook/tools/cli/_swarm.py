"""``gpuhook install --swarm``: the devices that this node offers, and remaining steps."""

from collections.abc import Iterable

from gpuhook.base.config.model import Config
from gpuhook.core import contract
from gpuhook.core.request.sources import swarm_variables
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cli._output import warn
from gpuhook.tools.engines import json_text, swarm
from gpuhook.tools.engines.docker import node_resources
from gpuhook.tools.engines.store import TargetFile


def resources(config: Config) -> tuple[swarm.SwarmResource, ...]:
    """Return the devices of this host that containers can request one by one.

    DriverError if it has none of any vendor. A device that doesn't work is left out.
    """
    offers, failed = survey.present(config, lambda vendor: _offered(vendor, config))
    for error in failed:
        warn(str(error))
    return tuple(resource for found in offers for resource in found)


def _offered(vendor: contract.Vendor, config: Config) -> list[swarm.SwarmResource]:
    inventory = vendor.discover(config)
    devices, reasons = vendor.offered(
        contract.Grant.of_document(vendor, inventory, config, inventory.devices)
    )
    for reason in reasons:
        warn(f"not offered to the swarm: {reason}")
    company, _, sort = vendor.names.KIND.partition("/")
    company = company.partition(".")[0]
    found = []
    for device in devices:
        kind = f"{company}-{vendor.names.TYPES[1] if device.parent else sort}".upper()
        if device.id.isdecimal():  # KIND=0 would be a number of devices without names
            what = f"{vendor.names.NOUN} {device.label}"
            warn(f"not offered to the swarm: {what} has only a number as its name")
        else:
            found.append(swarm.SwarmResource(vendor.names.NAME, kind, device.id))
    return found


def advice(target: TargetFile, devices: Iterable[swarm.SwarmResource], config: Config) -> list[str]:
    """Return the remaining steps, a sentence each, after a node's daemon.json is written."""
    document = json_text.parse(target.text, target.path)
    node = swarm.SwarmNode(node_resources(document, target.path), devices)
    said = swarm_variables(config.swarm_resource)
    known = {variable for _, variable in said}
    wanted = {name: vendors for name, vendors in node.variables().items() if name not in known}
    if not wanted:
        return []
    # Where several vendors share a variable, the form of each name tells its vendor.
    more = [
        name if len(vendors) > 1 else f"{vendors[0]}={name}" for name, vendors in wanted.items()
    ]
    setting = ",".join([*filter(None, [config.swarm_resource]), *more])
    return [f"To serve services' containers: gpuhook config set swarm-resource={setting}"]
