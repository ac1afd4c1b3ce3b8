"""The cluster interface for preparing claims: reading a claim, and reporting its status.

``cluster.Cluster`` implements it over HTTPS. It is called in single-threaded children with a time
limit, so an object must stay usable after a fork.
"""

from typing import Any, Protocol

from gpuhook.base.errors import PluginError


class ClaimGoneError(PluginError):
    """A claim that was deleted, or replaced by another one: nothing needs its devices any more."""


class Claims(Protocol):
    """The claims of a cluster."""

    def claim(self, namespace: str, name: str, uid: str) -> dict[str, Any]:
        """Return the API server's ResourceClaim, in a version that it serves.

        PluginError, with one sentence, if that fails in time: ClaimGoneError if the server reports
        that the claim is gone, or that another one now has its name (``uid``).
        """

    def report(self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]]) -> None:
        """Write a claim's ``status.devices`` of gpuhook's drivers; a failure is only logged."""
