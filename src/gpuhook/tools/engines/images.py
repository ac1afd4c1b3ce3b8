"""An image's environment and files, as reported by the engines."""

import json
import subprocess
from typing import NamedTuple

from gpuhook.base.errors import EngineError, shown
from gpuhook.monitor.host import processes
from gpuhook.tools.engines import docker_api

_PATIENCE = 5.0  # timeout in seconds for Docker's answer
_TIMEOUT = 20  # timeout in seconds for podman, which opens its whole store


class EngineImage(NamedTuple):
    """An engine's description of an image.

    ``environment`` are its variables, NAME=VALUE. ``layers`` are the folders with its files, the
    upper ones first, if the engine's storage has such folders (overlay2, podman's overlay).
    ``architecture`` is its GOARCH, "" if unknown.
    """

    environment: list[str]
    layers: list[str]
    architecture: str


def inspect(image: str) -> EngineImage:
    """Return an image's description; EngineError if no engine on this host has it."""
    for daemon in processes.running("dockerd"):
        for path in docker_api.sockets([daemon]):
            try:
                answer = docker_api.image(path, image, _PATIENCE)
                return _image(answer, daemon.root)
            except (OSError, ValueError):
                continue
    try:
        argv = ["podman", "image", "inspect", "--", image]
        done = subprocess.run(argv, capture_output=True, timeout=_TIMEOUT, check=True)
        [answer] = json.loads(done.stdout)
        return _image(answer, "")
    except (OSError, ValueError, RecursionError, subprocess.SubprocessError):
        raise EngineError(
            f"Neither Docker nor podman on this host has the image {shown(image)}",
            "Pull it first, or give its variables with -e NAME=VALUE",
        ) from None


def _image(answer: object, root: str) -> EngineImage:
    told = answer.get("Architecture") if isinstance(answer, dict) else None
    architecture = told if isinstance(told, str) else ""
    return EngineImage(_variables(answer), _layers(answer, root), architecture)


def _variables(answer: object) -> list[str]:
    config = answer.get("Config") if isinstance(answer, dict) else None
    if not isinstance(config, dict):
        raise OSError("its answer doesn't describe an image")
    found = config.get("Env") or []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _layers(answer: object, root: str) -> list[str]:
    driver = answer.get("GraphDriver") if isinstance(answer, dict) else None
    data = driver.get("Data") if isinstance(driver, dict) else None
    if not isinstance(data, dict):
        return []
    words = [data.get("UpperDir"), *str(data.get("LowerDir") or "").split(":")]
    return [root + word for word in words if isinstance(word, str) and word.startswith("/")]
