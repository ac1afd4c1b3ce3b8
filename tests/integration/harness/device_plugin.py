"""gpuhook's device plugin with a test kubelet, and containers started as the kubelet does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kubelet import Answers, Kubelet

from harness.commands import daemon
from harness.cri import Container, Pod
from harness.forked import PROGRAM
from harness.installation import Installation

# A short interval, so that no test waits for the next check.
INTERVAL_S = 0.2


@contextmanager
def device_plugin(
    folder: Path, installation: Installation, config: Path, resource: str, *options: str
) -> Iterator[Kubelet]:
    """Run a kubelet and the device plugin below a new ``folder``.

    The block begins once the plugin has registered ``resource``. The plugin uses the programs
    of ``installation`` as its own.
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
    """Start a container as the kubelet does with a device plugin's answers."""
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
