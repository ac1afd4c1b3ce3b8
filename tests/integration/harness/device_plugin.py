"""gpuhook's device plugin beside a kubelet of the tests', and containers as that starts them."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubelet import Answers, Kubelet

from harness.commands import daemon
from harness.cri import Container, Pod
from harness.installation import Installation

# Looks again often, so that no test waits for it.
INTERVAL_S = 0.2
_CODE = """
import json, sys
from gpuhook.config import load
from gpuhook.kubernetes import service
from gpuhook.kubernetes.settings import Settings
words = {key: tuple(value) if isinstance(value, list) else value
         for key, value in json.loads(sys.argv[1]).items()}
config, sys.argv[0] = sys.argv[2], sys.argv[3]
sys.exit(service.run(Settings(**words), load(config)))
"""


@contextmanager
def device_plugin(
    folder: Path, installation: Installation, config: Path, resource: str, **settings: Any
) -> Iterator[Kubelet]:
    """Run a kubelet and the plugin below a new ``folder``, which has registered ``resource`` then.

    The plugin runs with the tests' own Python, which has gRPC, and takes the programs of
    ``installation`` for its own. ``settings`` are fields of Settings.
    """
    folder.mkdir()
    words = {"kubelet_folder": str(folder / "k"), "interval": INTERVAL_S, **settings}
    argv: list[str | Path] = [sys.executable, "-c", _CODE, json.dumps(words)]
    argv += [config, installation.command]

    def is_ready() -> bool:
        return kubelet.allocatable(resource) > 0

    with Kubelet(folder / "k") as kubelet:
        kubelet.start()
        with daemon(argv, folder / "log", is_ready):
            yield kubelet


def start(
    pod: Pod, image: str, answers: Answers, env: tuple[str, ...] = (), attempt: int = 0
) -> Container:
    """Start a container as the kubelet does with what a plugin has answered."""
    return pod.start(
        image,
        "sleep",
        "1000",
        env=[*env, *(f"{name}={value}" for name, value in answers["envs"].items())],
        devices=answers["cdi_devices"],
        annotations=answers["annotations"],
        mounts=answers["mounts"],
        nodes=answers["devices"],
        attempt=attempt,
    )
