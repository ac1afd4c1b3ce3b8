"""What handing out devices needs of the cluster: a claim as the API server has it, and a report.

``cluster.Cluster`` is what does so over HTTPS. Called in children that have one thread and a time
limit; an object must bear being used after a fork.
"""

from typing import Any, Protocol

from gpuhook.ground.errors import PluginError


class ClaimGoneError(PluginError):
    """A claim isn't there any more, or another has its name now: nobody needs its devices."""


class Claims(Protocol):
    """The claims of a cluster."""

    def claim(self, namespace: str, name: str, uid: str) -> dict[str, Any]:
        """Return a ResourceClaim as the API server has it, of a version that it serves.

        PluginError, with one sentence, where it can't be had in time: ClaimGoneError where the
        server says that it is gone, or is another one that has its name by now (``uid``).
        """

    def report(self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]]) -> None:
        """Write a claim's ``status.devices`` of our drivers; a failure is logged, and no more."""
