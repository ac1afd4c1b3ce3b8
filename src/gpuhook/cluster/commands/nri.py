"""gpuhook nri: give pods their devices as a plugin of the engine, without a runtime."""

import os
import re
import time
from copy import copy
from functools import cache

import click

from gpuhook.base import names as ours
from gpuhook.base.config.model import DEFAULT_PATH, Config
from gpuhook.base.errors import PluginError, RequestError, printable, shown
from gpuhook.cluster.nri.answer import Given, InjectionMode
from gpuhook.cluster.nri.asked import PATIENCE
from gpuhook.cluster.nri.transport import SOCKET
from gpuhook.monitor.followed import FollowedConfig
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option

_INDEX = re.compile(r"[0-9]{2}")


@command(
    examples={
        "gpuhook nri": "Run as the plugin of this node's containerd or CRI-O",
        "gpuhook nri --gate": "Restrict containers to devices that the kubelet allocated",
    },
)
@click.option(
    "--socket", metavar="PATH", default=SOCKET, show_default=True,
    help="The engine's socket for plugins.",
)  # fmt: skip
@click.option(
    "--index", metavar="NN", default="50", show_default=True,
    help="Two digits that set the order in which the engine calls plugins.",
)  # fmt: skip
@click.option(
    "--gate", is_flag=True,
    help="Give containers only devices from the kubelet, as with gate = true in [gpuhook].",
)  # fmt: skip
@click.option(
    "--pod-resources", metavar="PATH",
    default="/var/lib/kubelet/pod-resources/kubelet.sock", show_default=True,
    help="The kubelet's socket for its allocations (PodResources).",
)  # fmt: skip
@click.option(
    "--cdi", is_flag=True,
    help="Return names of CDI devices (containerd 2.1, CRI-O 1.34); gpuhook install --cdi writes "
    "their CDI specs.",
)  # fmt: skip
@click.option("--hook-path", metavar="PATH", help="The path of gpuhook-cdi-hook on the host.")
@config_option
def nri(
    socket: str,
    index: str,
    gate: bool,
    pod_resources: str,
    cdi: bool,
    hook_path: str | None,
    config_path: str | None,
) -> None:
    """Give pods their devices as a plugin of containerd or CRI-O (NRI).

    Containers that request devices by a vendor's environment variable get them with no
    runtime, no RuntimeClass and no restart of the engine. Runs as root until it is stopped
    (SIGTERM, SIGINT), and reconnects after a restart of the engine.
    """
    if not _INDEX.fullmatch(index):
        raise RequestError(f"--index {shown(index)} isn't two digits", "Use 00 to 99")
    from gpuhook.cluster.nri import service  # noqa: PLC0415 - reports that protobuf is missing

    followed = FollowedConfig(config_path)
    hook = hook_path or our_program(ours.CDI_HOOK, "Give its path with --hook-path")
    kubelet = cache(lambda: _gate(pod_resources, followed.config))
    if gate and not followed.config.gate:
        _tell(
            "gate isn't set in [gpuhook] of config.toml: containers that start without this plugin "
            "have no gate, and runtimes may refuse or read some requests differently"
        )

    def current() -> InjectionMode:
        followed.read()  # protects: nri-settings
        config = copy(followed.config)
        config.path = _own_path(config)
        return InjectionMode(config, hook, cdi, kubelet() if gate or config.gate else None)

    current()  # starts the child before the first container
    service.run(socket, current, _tell, index=index)


def _own_path(config: Config) -> str | None:
    """Return the configuration's path for the hook, None for the default one."""
    path = config.path and os.path.abspath(config.path)
    return None if path == DEFAULT_PATH else path


def _tell(sentence: str) -> None:
    click.echo(f"gpuhook: {printable(sentence.rstrip('.'))}.", err=True)


def _gate(path: str, config: Config) -> Given:
    """Return a function that asks the kubelet for a container's devices; PluginError on failure."""
    from gpuhook.monitor import kubelet  # noqa: PLC0415 - only with a gate
    from gpuhook.monitor.telemetry import TelemetryWorker  # noqa: PLC0415

    place = kubelet.KubeletSocket(path)
    asking = TelemetryWorker(kubelet, "Kubernetes", config, time.monotonic, PATIENCE, "kubelet")
    asking.ask(place)  # starts the child early

    def given(
        namespace: str, pod: str, container: str, uid: str, left: float
    ) -> list[tuple[str, str]]:
        found = asking.ask(place, patience=left)
        if found is None or "pods" not in found:
            raise PluginError(
                f"The kubelet at {path} doesn't report the devices of containers: "
                f"{asking.problem or 'no response'}",
                "Check that the plugin can reach that socket; it isn't needed without --gate",
            )
        names = [
            (resource, name)
            for its_namespace, its_pod, its_name, ids in found["pods"]
            if (its_namespace, its_pod, its_name) == (namespace, pod, container)
            for resource, name in ids
        ]
        return names or kubelet.checkpointed(path, uid, container)

    return given
