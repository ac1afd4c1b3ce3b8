"""A node's labels: what the makers' own programs say, put together, and written to the cluster."""

import http.client
import json
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.ground.errors import DriverError, PluginError, shown
from gpuhook.ground.host import files as host_files
from gpuhook.start.contract import Vendor
from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.kubernetes.settings import Settings
from gpuhook.tools.vendors import parts

SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"
# On the node, which labels are ours: those that a later look doesn't find are removed.
OURS = "gpuhook.labels"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"[a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/{_WORD}")
_VALUE = re.compile(rf"({_WORD})?")
_PATIENCE = 10  # seconds
_MOST = 4 << 20  # bytes of an answer
_REMEDY = "Look at the service account's rights: get and patch of nodes"


def labels(
    found: Sequence[tuple[Vendor, Inventory]], settings: Settings, config: Config
) -> tuple[dict[str, str], list[str], list[DriverError]]:
    """Return the labels in the order of their names, what a person should know, and what failed."""
    made: dict[str, str] = {}
    failed = []
    shares = {
        name: parts.Share(each.replicas, renamed=each.rename != name)
        for name, each in settings.sharing.items()
    }
    for vendor, inventory in found:
        module = parts.labels(vendor.names)
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


def text(made: Mapping[str, str]) -> str:
    """Return labels as node-feature-discovery reads them from a file: a line for each."""
    return "".join(f"{key}={value}\n" for key, value in made.items())


# The cluster --------------------------------------------------------------------------------------


class Node:
    """The node that a pod runs on, by the API server that its service account may ask.

    PluginError, with a sentence, for whatever goes wrong with it.
    """

    def __init__(
        self, name: str, environ: Mapping[str, str] = os.environ, secrets: str = SECRETS
    ) -> None:
        self._name = name
        self._host = environ.get("KUBERNETES_SERVICE_HOST", "")
        self._port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._secrets = secrets
        if not self._host:
            raise PluginError(
                "There is no API server to ask: this isn't a pod",
                "Run it in a pod with a service account, or write a file with --output",
            )

    def keep(self, made: Mapping[str, str]) -> bool:
        """Have the node bear these labels, and no other of ours; tell whether that changed any."""
        metadata = self._ask("GET").get("metadata", {})
        there = metadata.get("labels") or {}
        noted = (metadata.get("annotations") or {}).get(OURS, "")
        before = {key for key in noted.split(",") if key}
        gone = dict.fromkeys((before - {*made}) & {*there})
        changed = {key: value for key, value in made.items() if there.get(key) != value}
        ours = ",".join(sorted(made)) or None
        if not changed and not gone and (ours or "") == noted:
            return False
        patch = {"metadata": {"labels": {**gone, **changed}, "annotations": {OURS: ours}}}
        self._ask("PATCH", json.dumps(patch))
        return True

    def _ask(self, method: str, body: str | None = None) -> dict[str, Any]:
        path = f"/api/v1/nodes/{self._name}"
        try:
            status, answer = self._send(method, path, body)
            found: dict[str, Any] = json.loads(answer or b"{}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise PluginError(
                f"The API server at {self._host} can't be asked: {error}", _REMEDY
            ) from None
        if status // 100 != 2 or not isinstance(found, dict):
            why = found.get("message", "") if isinstance(found, dict) else ""
            raise PluginError(
                f"The API server refuses {method} of node {shown(self._name)}: {why or status}",
                _REMEDY,
            )
        return found

    def _send(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        # Read each time: it is renewed.
        token = host_files.read(f"{self._secrets}/token").decode("ascii").strip()
        context = ssl.create_default_context(cafile=f"{self._secrets}/ca.crt")
        connection = http.client.HTTPSConnection(
            self._host, int(self._port), timeout=_PATIENCE, context=context
        )
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST)
        finally:
            connection.close()
