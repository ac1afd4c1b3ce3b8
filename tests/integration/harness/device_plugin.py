"""gpuhook's device plugin next to a test kubelet, and containers as that starts them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kubelet import Answers, Kubelet

from harness.commands import daemon
from harness.cri import Container, Pod
from harness.forked import PROGRAM
from harness.installation import Installation

# Looks again often, so that no test waits for it.
INTERVAL_S = 0.2


@contextmanager
def device_plugin(
    folder: Path, installation: Installation, config: Path, resource: str, *options: str
) -> Iterator[Kubelet]:
    """Run a kubelet and the plugin below a new ``folder``, which has registered ``resource`` then.

    The plugin takes the programs of ``installation`` for its own.
    """
    folder.mkdir()
    argv: list[str | Path] = [sys.executable, "-c", PROGRAM, installation.command]
    argv += ["device-plugin", f"--config={config}", f"--interval={INTERVAL_S}"]
    argv += [f"--kubelet-socket={folder}/k/kubelet.sock", *options]

    with Kubelet(folder / "k") as kubelet:
        kubelet.start()
        with daemon(argv, folder / "log", lambda: kubelet.allocatable(resource) > 0):
            yield kubelet


def start(
    pod: Pod,
    image: str,
    answers: Answers,
    env: tuple[str, ...] = (),
    attempt: int = 0,
    name: str = "main",
    command: tuple[str, ...] = ("sleep", "1000"),
) -> Container:
    """Start a container as the kubelet does with what a plugin has answered."""
    return pod.start(
        image,
        *command,
        name=name,
        env=[*env, *(f"{name}={value}" for name, value in answers["envs"].items())],
        devices=answers["cdi_devices"],
        annotations=answers["annotations"],
        mounts=answers["mounts"],
        nodes=answers["devices"],
        attempt=attempt,
    )
