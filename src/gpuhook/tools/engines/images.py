"""What an image sets in its containers' environment, asked of the engines that have it."""

import json
import subprocess

from gpuhook.ground.errors import EngineError, shown
from gpuhook.tools.engines import docker_api
from gpuhook.tools.host import processes

_PATIENCE = 5.0  # seconds for Docker's answer
_TIMEOUT = 20  # seconds for podman's, which opens its whole store


def environment(image: str) -> list[str]:
    """Return the image's variables, NAME=VALUE; EngineError where no engine here has it."""
    for path in docker_api.sockets(processes.running("dockerd")):
        try:
            return _variables(docker_api.image(path, image, _PATIENCE))
        except (OSError, ValueError):
            continue
    try:
        argv = ["podman", "image", "inspect", "--", image]
        done = subprocess.run(argv, capture_output=True, timeout=_TIMEOUT, check=True)
        [answer] = json.loads(done.stdout)
        return _variables(answer)
    except (OSError, ValueError, RecursionError, subprocess.SubprocessError):
        raise EngineError(
            f"Neither Docker nor podman has the image {shown(image)} here",
            "Pull it first, or say what it sets with -e NAME=VALUE",
        ) from None


def _variables(answer: object) -> list[str]:
    config = answer.get("Config") if isinstance(answer, dict) else None
    if not isinstance(config, dict):
        raise OSError("it describes no image")
    found = config.get("Env") or []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
