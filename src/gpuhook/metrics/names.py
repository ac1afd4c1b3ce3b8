"""What engines call their containers, asked of them with a short limit and remembered."""

import json
import os
from collections.abc import Callable, Collection

from gpuhook.engines import docker_api
from gpuhook.host import files, processes

_PATIENCE = 1.0  # seconds for Docker's answer
_PAUSE = 10.0  # seconds between two questions
_LIMIT = 16 << 20  # bytes of podman's list


class Names:
    """Names and images of containers by their ids."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, tuple[str, str]] = {}
        self._again = {"docker": 0.0, "podman": 0.0}

    def look(self, wanted: Collection[tuple[str, str, str]]) -> None:
        """Ask for those that aren't known: (engine, id, bundle); forget the others."""
        ids = {container for _, container, _ in wanted}
        self._known = {key: value for key, value in self._known.items() if key in ids}
        unknown = [each for each in wanted if each[1] not in self._known]
        now = self._clock()
        if any(engine == "docker" for engine, _, _ in unknown) and now >= self._again["docker"]:
            self._again["docker"] = now + _PAUSE
            for path in docker_api.sockets(processes.running("dockerd")):
                self._known.update(_of_docker(path))
        bundles = {bundle for engine, _, bundle in unknown if engine == "podman" and bundle}
        if bundles and now >= self._again["podman"]:
            self._again["podman"] = now + _PAUSE
            for folder in {os.path.dirname(os.path.dirname(bundle)) for bundle in bundles}:
                self._known.update(_of_podman(folder))

    def of(self, container: str) -> tuple[str, str]:
        """Return the name and the image, "" for each that isn't known."""
        return self._known.get(container, ("", ""))


def _of_docker(path: str) -> dict[str, tuple[str, str]]:
    try:
        answer = docker_api.containers(path, _PATIENCE)
    except (OSError, ValueError):
        return {}
    found = {}
    for each in answer:
        names, image = each.get("Names"), each.get("Image")
        if isinstance(names, list) and names and isinstance(each.get("Id"), str):
            found[each["Id"]] = (str(names[0]).removeprefix("/"), str(image or ""))
    return found


def _of_podman(folder: str) -> dict[str, tuple[str, str]]:
    """Return what stands in the list of podman's store, beside the containers' folders."""
    try:
        answer = json.loads(files.read(f"{folder}/containers.json", _LIMIT))
        return {each["id"]: (str(each["names"][0]), "") for each in answer if each.get("names")}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError):
        return {}
