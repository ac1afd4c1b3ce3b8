"""The claims of the API server: reading them, and writing their status."""

from collections.abc import Callable
from typing import Any

from gpuhook.base.errors import GpuhookError
from gpuhook.cluster.dra import versions
from gpuhook.cluster.dra.api_client import APPLY, ApiClient, ApiError, segment
from gpuhook.cluster.dra.claim_preparer import ClaimGoneError

Object = dict[str, Any]

# Seconds, together 20 for a claim: the kubelet waits 45 for the whole prepare call.
_PATIENCE = 15.0
_VERSION_PATIENCE = 5.0
_REPORT_PATIENCE = 5.0
_MOST_DEVICES = 32  # of a claim's status
_LONGEST_MANAGER = 128


class ClusterClaims:
    """The claims of one cluster, for the plugin of ``node``.

    For one thread at a time; usable after a fork. ``tell`` gets a sentence for each failed report.
    """

    def __init__(
        self,
        client: ApiClient,
        node: str,
        tell: Callable[[str], None],
        patience: float = _PATIENCE,
    ) -> None:
        self._client = client
        self._manager = f"gpuhook-{node}"[:_LONGEST_MANAGER]
        self._tell = tell
        self._patience = patience
        self._version = versions.KNOWN[0]  # until a server turns out to be older
        self._is_sure = False
        self._said = ""

    def claim(self, namespace: str, name: str, uid: str) -> Object:
        """Return a ResourceClaim in the form of v1, whatever version is served.

        PluginError within the time limit (20 s) if that fails: ClaimGoneError if the claim doesn't
        exist, or is another of that name.
        """
        where = f"{namespace}/{name}"
        try:
            found = self._send("GET", _path(namespace, name))
        except ApiError as error:
            if (error.status, error.reason) != (404, "NotFound"):  # protects: claim-not-found
                raise
            raise ClaimGoneError(
                f"There is no claim {where}", "It was deleted, or has another name"
            ) from None
        metadata = found.get("metadata")
        has = metadata.get("uid") if isinstance(metadata, dict) else None
        if has != uid:  # protects: claim-uid
            raise ClaimGoneError(
                f"The claim {where} was replaced: it has the uid {has}, and {uid} was asked for",
                "Nothing: the kubelet asks again for the one that is there",
            )
        return versions.claim_of(found)

    def report(self, namespace: str, name: str, uid: str, devices: list[Object]) -> None:
        """Write the state of devices into a claim's status; [] removes gpuhook's entries.

        Uses server-side apply, so that other drivers' entries stay. Takes at most 5 s and never
        raises: a failure is logged, the same one once.
        """
        try:
            # The uid prevents writing to a claim that has replaced this one.
            body = {
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": namespace, "uid": uid},
                "status": {"devices": devices[:_MOST_DEVICES]},
            }
            answer = self._send("PATCH", f"{_path(namespace, name)}/status", body)
        except ApiError as error:
            gone = error.status == 404 or (error.status == 409 and not devices)
            self._say("" if gone else f"A claim's status can't be written: {error}")
        except GpuhookError as error:
            self._say(f"A claim's status can't be written: {error}")
        else:
            status = answer.get("status")
            kept = isinstance(status, dict) and status.get("devices")
            self._say(
                ""
                if kept or not devices
                else "The cluster drops devices from claims' status: the feature gate "
                "DRAResourceClaimDeviceStatus is off"
            )

    def _send(self, method: str, path: str, body: Object | None = None) -> Object:
        """Return the response in the version that is served; ApiError if there is none."""
        try:
            return self._send_in(self._version, method, path, body)
        except ApiError as error:
            if error.status != 404 or self._is_sure:
                raise
            version = versions.served(self._client, _VERSION_PATIENCE)
            self._is_sure = True
            if version == self._version:
                raise
        self._version = version
        return self._send_in(version, method, path, body)

    def _send_in(self, version: str, method: str, path: str, body: Object | None) -> Object:
        path = f"/apis/{versions.GROUP}/{version}{path}"
        if body is None:
            return self._client.insist(method, path, self._patience)
        return self._client.ask(
            method,
            path,
            {"apiVersion": f"{versions.GROUP}/{version}", **body},
            query={"fieldManager": self._manager, "force": "true"},
            kind=APPLY,
            patience=_REPORT_PATIENCE,
        )

    def _say(self, sentence: str) -> None:
        """Log a problem, once until it changes; "" for none."""
        if sentence and sentence != self._said:
            self._said = sentence
            self._tell(sentence)


def _path(namespace: str, name: str) -> str:
    return f"/namespaces/{segment(namespace)}/resourceclaims/{segment(name)}"
