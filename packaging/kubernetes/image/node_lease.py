"""The cluster's lease on restarting an engine: nodes restart theirs one after the other.

A Lease object (coordination.k8s.io/v1) that the manifests create. A holder that doesn't renew it
loses it: whether it does is measured by this node's own clock, from when it saw the last renewal.
A node whose engine doesn't come back keeps renewing, so that the other nodes keep theirs running.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

from node import say

from gpuhook.base.errors import EngineError
from gpuhook.cluster.dra import access
from gpuhook.cluster.dra.api_client import ApiClient, ApiError, segment

DURATION = 300  # seconds without a renewal until another node may take the lease
RENEW_SECONDS = 30.0
POLL_SECONDS = (2.0, 4.0)  # minimum and maximum, so that waiting nodes ask at different times
PATIENCE = 120.0  # seconds to wait for an API server; k3s' server exits with its containerd
REPORT_SECONDS = 60.0
_CONFLICT = 409


class Asks(Protocol):
    """A client of the API server."""

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the object in the response; ApiError if there is none."""


class Lease:
    """The lease ``name`` (NAMESPACE/NAME), for a holder with this node's name."""

    def __init__(
        self,
        name: str,
        holder: str,
        client: Asks,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        namespace, _, name = name.partition("/")
        self._path = (
            f"/apis/coordination.k8s.io/v1/namespaces/{segment(namespace)}/leases/{segment(name)}"
        )
        self._holder = holder
        self._client = client
        self._clock = clock
        self._sleep = sleep
        self._renewed = 0.0

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Wait for the lease and hold it; yield what renews it, to be called often.

        EngineError if the API server can't be asked.
        """
        self._acquire()
        try:
            yield self._renew
        finally:
            self._release()

    def _acquire(self) -> None:
        seen: tuple[object, ...] = ()
        since = reported = -REPORT_SECONDS
        while True:
            found = self._insist("GET")
            spec = found.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            state = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
            now = self._clock()
            if state != seen:
                seen, since = state, now
            is_over = now - since > float(spec.get("leaseDurationSeconds") or DURATION)
            if holder in ("", self._holder) or is_over:  # protects: one-engine-at-a-time
                if self._put(found, self._holder):
                    return
            elif now - reported >= REPORT_SECONDS:
                reported = now
                say(f"waiting to restart the engine: node {holder} restarts its own")
            self._sleep(random.uniform(*POLL_SECONDS))  # noqa: S311 - only spreads requests

    def _renew(self) -> None:
        if self._clock() - self._renewed < RENEW_SECONDS:
            return
        self._renewed = self._clock()
        try:
            self._change(self._holder)
        except ApiError as error:
            say(f"the lease can't be renewed: {error}")

    def _release(self) -> None:
        try:
            self._change("", insists=True)
        except (ApiError, EngineError) as error:
            say(f"the lease ends only in {DURATION} seconds: {error}")

    def _change(self, holder: str, *, insists: bool = False) -> None:
        """Write a holder into the lease, if it is still ours."""
        ask = self._insist if insists else self._client.ask
        found = ask("GET", self._path)
        if (found.get("spec") or {}).get("holderIdentity") == self._holder:
            self._put(found, holder)

    def _put(self, found: dict[str, Any], holder: str) -> bool:
        """Replace the lease as it was read; False if it has changed meanwhile."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {**(found.get("spec") or {}), "holderIdentity": holder, "renewTime": now}
        if holder and holder != (found.get("spec") or {}).get("holderIdentity"):
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec["leaseDurationSeconds"] = DURATION
        try:
            self._insist("PUT", body={**found, "spec": spec})
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            return False
        self._renewed = self._clock()
        return True

    def _insist(
        self, method: str, path: str = "", body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the object in the response, repeating the request after temporary errors."""
        end = self._clock() + PATIENCE
        while True:
            try:
                return self._client.ask(method, path or self._path, body)
            except ApiError as error:
                if not error.may_pass or self._clock() >= end:
                    raise
            self._sleep(POLL_SECONDS[0])


def lease_of(name: str, holder: str) -> Lease | None:
    """Return the lease of that name, None without a name; PluginError if this isn't a pod."""
    return Lease(name, holder, ApiClient(access.find())) if name else None
