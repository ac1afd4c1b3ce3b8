"""A node's labels: those of the vendors' own programs, combined and written to the cluster."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, shown
from gpuhook.cluster import vendor_parts
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory.model import Inventory
from gpuhook.vendors import registry

# The node's annotation that lists gpuhook's labels: those that no longer apply are removed.
OURS = "gpuhook.labels"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"[a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/{_WORD}")
_VALUE = re.compile(rf"({_WORD})?")
_MERGE = "application/merge-patch+json"


def labels(
    found: Sequence[tuple[Vendor, Inventory]], settings: Settings, config: Config
) -> tuple[dict[str, str], list[str], list[DriverError]]:
    """Return the labels sorted by name, the warnings, and the drivers' errors."""
    made: dict[str, str] = {}
    failed = []
    shares = {
        name: vendor_parts.Share(
            each.replicas, renamed=each.rename != name, by_mps=bool(each.shares)
        )
        for name, each in settings.sharing.items()
    }
    for vendor, inventory in found:
        module = vendor_parts.labels(vendor.names)
        if module is None:
            continue
        chosen = settings.vendors.get(vendor.names.NAME)
        try:
            with Rootfs(inventory.root) as root:
                made.update(module.labels(config, inventory, root, chosen, shares))
        except DriverError as error:
            failed.append(error)
    good = {key: made[key] for key in sorted(made) if _fits(key, made[key])}
    warnings = [f"No label can say {key}={shown(made[key])}" for key in made if key not in good]
    return good, warnings, failed


def _fits(key: str, value: str) -> bool:
    return bool(_KEY.fullmatch(key) and _VALUE.fullmatch(value))


def _is_vendors(key: str) -> bool:
    """Tell whether a label is in the domain of a vendor whose labels we write, or below it."""
    domain, _, name = key.partition("/")
    known = [
        names for names in registry.BUILT_IN.values() if vendor_parts.labels(names) is not None
    ]
    domains = [names.KIND.partition("/")[0] for names in known]
    return bool(name) and any(f".{domain}".endswith(f".{each}") for each in domains)


def text(made: Mapping[str, str]) -> str:
    """Return labels in node-feature-discovery's file format: a line for each."""
    return "".join(f"{key}={value}\n" for key, value in made.items())


# The cluster --------------------------------------------------------------------------------------


class LabelsClient(Protocol):
    """A client of the API server (``dra.api_client.ApiClient``)."""

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, kind: str = ""
    ) -> dict[str, Any]:
        """Return the object in the response; PluginError, with a sentence, if there is none."""


class ClusterNode:
    """A node of the cluster whose API server ``client`` uses."""

    def __init__(self, name: str, client: LabelsClient) -> None:
        self.name = name
        self._path = f"/api/v1/nodes/{name}"
        self._client = client

    def keep(self, made: Mapping[str, str]) -> bool:
        """Set these labels on the node, and remove gpuhook's others; tell whether any changed."""
        metadata = self._client.ask("GET", self._path).get("metadata", {})
        there = metadata.get("labels") or {}
        noted = (metadata.get("annotations") or {}).get(OURS, "")
        # Any user who may annotate the node controls this text, and must not remove other labels.
        before = {key for key in noted.split(",") if _is_vendors(key)}  # protects: labels-makers
        gone = dict.fromkeys((before - {*made}) & {*there})
        changed = {key: value for key, value in made.items() if there.get(key) != value}
        ours = ",".join(sorted(made)) or None
        if not changed and not gone and (ours or "") == noted:
            return False
        patch = {"metadata": {"labels": {**gone, **changed}, "annotations": {OURS: ours}}}
        self._client.ask("PATCH", self._path, patch, kind=_MERGE)
        return True
