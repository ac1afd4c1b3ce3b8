"""gpuhook nri: give pods their devices as an engine's plugin, without a runtime."""

import os
import re
import time
from copy import copy
from functools import cache

import click

from gpuhook.ground import names as ours
from gpuhook.ground.config.model import DEFAULT_PATH, Config
from gpuhook.ground.errors import PluginError, RequestError, printable, shown
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option
from gpuhook.tools.config.followed import Followed
from gpuhook.tools.host.programs import our_program
from gpuhook.tools.nri import SOCKET
from gpuhook.tools.nri.answer import Given, Way
from gpuhook.tools.nri.asked import PATIENCE

_INDEX = re.compile(r"[0-9]{2}")


@command(
    examples={
        "gpuhook nri": "Serve the containerd or CRI-O of this node, as a service",
        "gpuhook nri --gate": "Give containers no device but those that the kubelet gave them",
    },
)
@click.option(
    "--socket", metavar="PATH", default=SOCKET, show_default=True,
    help="The engine's socket for plugins.",
)  # fmt: skip
@click.option(
    "--index", metavar="NN", default="50", show_default=True,
    help="Two digits by which the engine calls plugins in order.",
)  # fmt: skip
@click.option(
    "--gate", is_flag=True,
    help="Give containers only what the kubelet has given them, as with gate = true in [gpuhook].",
)  # fmt: skip
@click.option(
    "--pod-resources", metavar="PATH",
    default="/var/lib/kubelet/pod-resources/kubelet.sock", show_default=True,
    help="The kubelet's socket that says so.",
)  # fmt: skip
@click.option(
    "--cdi", is_flag=True,
    help="Answer with names of CDI devices (containerd 2.1, CRI-O 1.34), which gpuhook install "
    "--cdi describes.",
)  # fmt: skip
@click.option("--hook-path", metavar="PATH", help="Where the host has gpuhook-cdi-hook.")
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
    (SIGTERM, SIGINT), and connects again after the engine's restart.
    """
    if not _INDEX.fullmatch(index):
        raise RequestError(f"--index {shown(index)} isn't two digits", "Use 00 to 99")
    from gpuhook.tools.nri import service  # noqa: PLC0415 - says what is missing: protobuf

    followed = Followed(config_path)
    hook = hook_path or our_program(ours.CDI_HOOK, "Give its place with --hook-path")
    kubelet = cache(lambda: _gate(pod_resources, followed.config))
    if gate and not followed.config.gate:
        _tell(
            "gate isn't set in [gpuhook] of config.toml: what starts while this plugin is away, or "
            "by words that runtimes read in different ways, has no gate or is refused"
        )

    def current() -> Way:
        followed.read()  # protects: nri-settings
        config = copy(followed.config)
        config.path = _own_path(config)
        return Way(config, hook, cdi, kubelet() if gate or config.gate else None)

    current()  # so that the child is there before the first container
    service.run(socket, current, _tell, index=index)


def _own_path(config: Config) -> str | None:
    """Return the configuration's path for the hook, None for the default one."""
    path = config.path and os.path.abspath(config.path)
    return None if path == DEFAULT_PATH else path


def _tell(sentence: str) -> None:
    click.echo(f"gpuhook: {printable(sentence.rstrip('.'))}.", err=True)


def _gate(path: str, config: Config) -> Given:
    """Return a function that asks the kubelet for a container's devices; PluginError on failure."""
    from gpuhook.tools.metrics import kubelet  # noqa: PLC0415 - with a gate alone
    from gpuhook.tools.metrics.telemetry import Telemetry  # noqa: PLC0415

    place = kubelet.Place(path)
    asking = Telemetry(kubelet, "Kubernetes", config, time.monotonic, PATIENCE, "kubelet")
    asking.ask(place)  # so that the child stands ready

    def given(namespace: str, pod: str, container: str, left: float) -> list[tuple[str, str]]:
        found = asking.ask(place, patience=left)
        if found is None or "pods" not in found:
            raise PluginError(
                f"The kubelet at {path} doesn't say which devices containers have: "
                f"{asking.problem or 'it is silent'}",
                "See that the plugin can reach that socket; without --gate it isn't asked",
            )
        return [
            (resource, name)
            for its_namespace, its_pod, its_name, ids in found["pods"]
            if (its_namespace, its_pod, its_name) == (namespace, pod, container)
            for resource, name in ids
        ]

    return given
