"""Requests to attach devices to running containers: the container, and what it is to get."""

import os
from collections.abc import Collection, Sequence

from gpuhook.base.config.model import Config
from gpuhook.base.errors import ContainerError, RequestError
from gpuhook.base.oci.spec import Spec, read_spec
from gpuhook.core import contract
from gpuhook.core.contract import Grant
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import records
from gpuhook.core.request.reader import Request
from gpuhook.core.resolve import resolve
from gpuhook.monitor.containers import attach as changes
from gpuhook.monitor.containers import attached, live
from gpuhook.monitor.containers.target import AttachTarget
from gpuhook.tools.root_folder.request import CallerRequest
from gpuhook.tools.running import bundles
from gpuhook.tools.running.find import ContainerMatch
from gpuhook.vendors import registry

_PODS = {"kubernetes", "cri-o"}


def target(
    found: ContainerMatch, inventories: Collection[Inventory], config: Config
) -> AttachTarget:
    """Return a container whose devices can be changed; ContainerError, RequestError if it can't."""
    if os.geteuid():
        raise ContainerError("Only root can attach and detach devices", "Run this as root")
    if not found.bundle:
        raise ContainerError(
            f"The config.json of {found.id} wasn't found", "Start it by an engine of root"
        )
    spec = read_spec(f"{found.bundle}/config.json")
    record = (found.holder.record if found.holder is not None else None) or {}
    annotations = spec.data.get("annotations")
    written = annotations if isinstance(annotations, dict) else {}
    engines = {found.engine, records.engine_of(found.bundle, written)}
    if engines & _PODS or record.get("pod"):  # protects: attach-pod
        raise RequestError(
            f"{found.id} is in a pod, whose devices the kubelet allocates",
            "Request devices in the pod's resources or by a claim",
        )
    pair = (record["pid"], record["started"]) if record else None
    first = pair or bundles.first_process(found.id, found.bundle)
    return AttachTarget(found.id, live.FirstProcess(*first), spec, inventories, config)


def wanted(
    container: AttachTarget, words: Sequence[str], config: Config
) -> tuple[list[Grant], Spec]:
    """Return the grants of new devices, and the request with their other options.

    Options are those of the container's environment, under the policy for a start.
    """
    vendors = registry.all_vendors(config)
    named = changes.named(words, container.inventories, config)
    process = container.spec.data.get("process")
    env = process.get("env") if isinstance(process, dict) else None
    pairs = [word.partition("=") for word in env or () if isinstance(word, str)]
    selecting = {variable for names in vendors.values() for variable in names.VARIABLES}
    heard = tuple((name, value) for name, _, value in pairs if name not in selecting)
    if not config.accept_envvar_unprivileged:
        heard = ()
    driver = tuple(f"{names.KIND}=none" for names, _, _ in named)
    request = CallerRequest(heard, driver).spec(config, vendors)
    allocation = resolve(request.data, config, vendors, inventories=container.inventories)
    granted = {each.vendor.names.NAME: each for each in allocation.grants} if allocation else {}
    record = container.record()
    before = {(each["vendor"], name) for each in record["given"] for name in each["selected"]}
    grants = []
    for names, inventory, devices in named:
        if both := [device.label for device in devices if (names.NAME, device.id) in before]:
            raise changes.has_already(container.id, both)
        labels = tuple(device.label for device in devices)
        driver_only = granted[names.NAME]
        options = driver_only.request.options
        asked = Request(names.NAME, attached.SOURCE, labels, selectors=labels, options=options)
        grant = Grant(driver_only.vendor, asked, inventory, tuple(devices))
        contract.check_others(grant, config)
        grants.append(grant)
    return grants, request
