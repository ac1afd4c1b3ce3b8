"""The removal from all nodes before `helm uninstall`: removers in place of the installer's pods."""

import glob
import json
import time
from collections.abc import Callable
from typing import Any

from node import say
from node_lease import Asks

from gpuhook.base.config.source import read_text
from gpuhook.cluster.dra import access
from gpuhook.cluster.dra.api_client import ApiClient, ApiError, segment

# The DaemonSets of removers, as the chart renders them.
REMOVERS = "/uninstall/*.json"
PLUGINS = ("gpuhook", "gpuhook-dra")
POLL_SECONDS = 2.0
REPORT_SECONDS = 60.0
_GONE, _CONFLICT = 404, 409


class Removal:
    """The removal in a namespace of the cluster whose API server ``client`` uses."""

    def __init__(
        self, namespace: str, client: Asks, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._namespace = namespace
        self._sets = f"/apis/apps/v1/namespaces/{segment(namespace)}/daemonsets"
        self._client = client
        self._sleep = sleep

    def run(self, removers: list[dict[str, Any]], runtime_class: str) -> None:
        """Remove gpuhook from the nodes; return when all are done.

        The RuntimeClass goes first, so that no new pod needs gpu-py, then the plugins. ApiError if
        the API server refuses.
        """
        if runtime_class:
            self._delete(f"/apis/node.k8s.io/v1/runtimeclasses/{segment(runtime_class)}")
        for name in PLUGINS:
            self._delete(f"{self._sets}/{name}")
        for remover in removers:
            name = remover["metadata"]["name"]
            generation = self._replace(name, remover)
            if generation is None:
                say(f"there is no DaemonSet {name}: nothing to remove")
                continue
            self._wait(name, generation)
            say(f"{name} is done on all nodes")

    def _replace(self, name: str, remover: dict[str, Any]) -> int | None:
        """Give a DaemonSet the removers' pods; return its generation, None without one."""
        path = f"{self._sets}/{segment(name)}"
        while True:
            try:
                found = self._insist("GET", path)
                spec = {**found["spec"]}
                for part in ("template", "updateStrategy"):
                    spec[part] = remover["spec"][part]
                changed = self._insist("PUT", path, {**found, "spec": spec})
            except ApiError as error:
                if error.status == _GONE:
                    return None
                if error.status != _CONFLICT:
                    raise
            else:
                return int(changed["metadata"]["generation"])

    def _wait(self, name: str, generation: int) -> None:
        """Return when the removers of this generation are ready on all their nodes."""
        reported = -REPORT_SECONDS
        while True:
            status = self._insist("GET", f"{self._sets}/{segment(name)}").get("status") or {}
            wanted = status.get("desiredNumberScheduled", 0)
            done = min(status.get("updatedNumberScheduled", 0), status.get("numberReady", 0))
            if status.get("observedGeneration", 0) >= generation and done >= wanted:
                return
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                say(
                    f"{done} of {wanted} nodes are done; the others say why not: kubectl -n "
                    f"{self._namespace} logs -l app.kubernetes.io/name={name} --all-containers"
                )
            self._sleep(POLL_SECONDS)

    def _delete(self, path: str) -> None:
        try:
            self._insist("DELETE", path)
        except ApiError as error:
            if error.status != _GONE:
                raise

    def _insist(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the object in the response, repeating the request after temporary errors."""
        while True:
            try:
                return self._client.ask(method, path, body)
            except ApiError as error:
                if not error.may_pass:
                    raise
                say(str(error))
            self._sleep(POLL_SECONDS)


def remove_from_all(namespace: str, runtime_class: str) -> None:
    """Remove gpuhook from all nodes, as this pod's account may; return when that is done."""
    removers = [json.loads(read_text(path)) for path in sorted(glob.glob(REMOVERS))]
    Removal(namespace, ApiClient(access.find())).run(removers, runtime_class)
