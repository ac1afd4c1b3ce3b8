"""``gpuhook dra``'s supervisor: monitors the host, and processes claims in children.

The server process also publishes devices.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gpuhook.base.errors import PluginError, shown
from gpuhook.cluster.dra.claim_preparer import ClaimPreparer, Claims
from gpuhook.cluster.dra.devices import DeviceRegistry
from gpuhook.cluster.dra.options import DraOptions
from gpuhook.cluster.dra.publish import Publisher, wanted
from gpuhook.cluster.dra.work import TIMEOUT, ClaimJob
from gpuhook.cluster.kubelet_endpoint import supervisor
from gpuhook.cluster.kubelet_endpoint.supervisor import EndpointSupervisor, Signals, give_back, tell
from gpuhook.monitor import kubelet
from gpuhook.monitor.followed import FollowedConfig
from gpuhook.monitor.ledger.records import Records
from gpuhook.monitor.service_metrics import Calls

_MOST = 16  # claims that are processed at once; others wait for one to end
_BUSY = "Work on other claims took all of the time. The kubelet tries again"
_SWEEP = 600.0  # seconds between two searches for leftover claims
_KUBELET = 5.0  # seconds for the kubelet to report pods' devices
_POLL = 1.0  # seconds between checks whether a killed process has ended
METRICS = "gpuhook_dra_claim"  # the start of its metrics' names
_UNKNOWN, _HEALTHY, _UNHEALTHY = 0, 1, 2  # as in api, which this process doesn't import


def run(
    devices: DeviceRegistry,
    options: DraOptions,
    claims: Claims,
    publisher: Publisher | None,
    followed: FollowedConfig | None = None,
) -> int:
    """Serve this node's kubelet, as ``supervisor.run``; return the exit status."""
    give_back()  # before children are started, which would share the pages
    return supervisor.run(
        lambda signals: DraSupervisor(devices, options, claims, publisher, signals, followed)
    )


class DraSupervisor(EndpointSupervisor):
    """The supervisor of ``gpuhook dra``."""

    def __init__(
        self,
        devices: DeviceRegistry,
        options: DraOptions,
        claims: Claims,
        publisher: Publisher | None,
        signals: Signals,
        followed: FollowedConfig | None,
    ) -> None:

        def serve(fd: int) -> int:
            # gRPC is imported only here: it has threads, and a process with them can't fork.
            from gpuhook.cluster.dra import server  # noqa: PLC0415

            return server.ClaimServer(options, publisher, fd, tell).run()

        super().__init__(
            signals,
            devices.observed,
            serve,
            Calls(METRICS, "Claims", ("driver", "operation")),
            options.metrics_listen,
            [options.registry, options.plugins],
            followed,
        )
        self._devices = devices
        self._publisher = publisher
        self._handing = ClaimPreparer(
            devices, claims, options, partial(in_use, options.pod_resources)
        )
        self._jobs: list[ClaimJob] = []
        # Calls that wait for a free slot, each with the time until which the kubelet waits.
        self._calls: list[tuple[float, Mapping[str, Any]]] = []
        self._old: set[str] = set()  # drivers that served claims before
        self._sweep_at = 0.0
        self._dying: list[ClaimJob] = []

    def _look(self) -> None:
        self._devices.tend()
        records = Records(self._devices.config.state_dir)
        records.make()
        self._old = {driver for driver, _ in records.claims()}
        self._report()

    def end(self) -> None:
        """Stop all children."""
        self._server.end()
        for job in (*self._jobs, *self._dying):
            job.stop()
        super().end()

    def _work(self) -> list[float | None]:
        if self._devices.tend():
            self._report()
        if self._server.tend():
            self._calls = []  # no kubelet waits for them any more, and their numbers are reused
            for job in self._jobs:
                job.call = 0
        for job in [*self._jobs]:
            job.tend()
            self._take_from(job)
        self._dying = [job for job in self._dying if not job.is_gone()]
        if self._clock() >= self._sweep_at:
            self._sweep_at = self._clock() + _SWEEP
            self._begin({"call": 0, "do": "sweep", "driver": "", "claim": {}})
        while self._calls and self._clock() >= self._calls[0][0]:  # protects: dra-in-time
            self._reply(self._calls.pop(0)[1]["call"], {"error": _BUSY})
        while len(self._jobs) < _MOST and (call := self._next()) is not None:
            self._begin(call)
        times = [
            self._sweep_at,
            *(job.deadline for job in self._jobs),
            *(at for at, _ in self._calls[:1]),
        ]
        return [*times, *(self._clock() + _POLL for _ in self._dying)]

    def _workers(self) -> Sequence[ClaimJob]:
        return self._jobs

    def _called(self, call: Mapping[str, Any]) -> None:
        if call["claim"]:
            self._calls.append((self._clock() + TIMEOUT, call))
        else:
            self._reply(call["call"], {})

    # Claims -----------------------------------------------------------------------------------

    def _next(self) -> Mapping[str, Any] | None:
        """Take the first call that can be started, None for none.

        Calls about one claim are processed in order. A restarted kubelet may request to unprepare a
        claim whose preparation it started before and no longer knows.
        """
        busy = {job.about for job in self._jobs}
        for number, (_, call) in enumerate(self._calls):
            if _about(call) not in busy:  # protects: dra-in-order
                del self._calls[number]
                return call
        return None

    def _begin(self, call: Mapping[str, Any]) -> None:
        claim = call["claim"]
        what = (
            f"claim {shown(claim['namespace'])}/{shown(claim['name'])}" if claim else "old claims"
        )
        job = ClaimJob(self._clock, call["call"], _about(call), what)
        job.begin(self._handing, call["do"], call["driver"], claim)
        self._jobs.append(job)

    def _take_from(self, job: ClaimJob) -> None:
        """Forward the messages of a claim's child, and remove the job if it has ended."""
        for sentence in job.sentences:
            tell(sentence)
        job.sentences.clear()
        if job.answer is not None and job.call:
            self._reply(job.call, job.answer)
            job.call = 0
        if job.has_ended:
            self._jobs.remove(job)
            job.leave()
            self._dying.append(job)

    def _reply(self, call: int, answer: Mapping[str, Any]) -> None:
        """Answer a call of the server."""
        self._server.answer(json.dumps({"call": call, "answer": answer}).encode() + b"\n")

    def _report(self) -> None:
        """Send the server all drivers, their devices' health, and the devices to publish."""
        pool = self._devices.choices.pool or self._devices.choices.node
        state: dict[str, list[dict[str, Any]]] = {name: [] for name in sorted(self._old)}
        self._old |= {*self._devices.drivers()}
        for known in self._devices.look():
            failure = self._devices.failure(known)
            health = _UNKNOWN if failure else _UNHEALTHY if known.reason else _HEALTHY
            state.setdefault(known.driver, []).append(
                {
                    "pool": pool,
                    "device": known.name,
                    "health": health,
                    "message": failure or known.reason,
                }
            )
        slices = {} if self._publisher is None else wanted(self._devices)
        self._server.give(json.dumps({"state": state, "slices": slices}).encode() + b"\n")


def _about(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the driver and the claim's uid of a call."""
    return call["driver"], call["claim"].get("uid", "")


def in_use(socket: str) -> kubelet.DevicesInUse | None:
    """Return the kubelet's list of pods' devices, None if it doesn't answer."""
    with suppress(PluginError):
        return kubelet.used(socket, _KUBELET)
    return None
