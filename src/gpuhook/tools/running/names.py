"""Cache of the engines' names for containers, queried with a short timeout."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from gpuhook.core.records import engine_names
from gpuhook.monitor.host import processes
from gpuhook.tools.engines import docker_api

_PATIENCE = 1.0  # timeout in seconds for Docker's answer
_PAUSE = 10.0  # seconds between two queries
_KEPT = 60.0  # seconds after which all names are queried again: a container may be renamed
_SHORTEST_ID = 4  # least characters of an abbreviated id
_ROOT = 0

Called = dict[str, tuple[str, str]]  # a container's id -> its name and its image, "" if unknown


class Names:
    """Names and images of containers by id; ``patience`` is the timeout for a Docker's answer."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, patience: float = _PATIENCE
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._known: Called = {}
        self._again = {"docker": 0.0, "podman": 0.0}
        self._all_again = 0.0

    def ask(self, wanted: Collection[tuple[str, str, str]]) -> None:
        """Query unknown names, and periodically all of them; drop those not wanted.

        ``wanted`` are (engine, id, bundle).
        """
        ids = {container for _, container, _ in wanted}
        self._known = {key: value for key, value in self._known.items() if key in ids}
        now = self._clock()
        kept = self._known if now < self._all_again else {}
        unknown = [each for each in wanted if each[1] not in kept]
        if not kept:
            self._all_again = now + _KEPT
        if any(engine == "docker" for engine, _, _ in unknown) and now >= self._again["docker"]:
            self._again["docker"] = now + _PAUSE
            self._known.update(of_docker(self._patience, docker_sockets()))
        bundles = {bundle for engine, _, bundle in unknown if engine == "podman"}
        if bundles and now >= self._again["podman"]:
            self._again["podman"] = now + _PAUSE
            more = watched().values() if "" in bundles else ()
            self._known.update(_of_podman({*bundles, *more} - {""}))

    def of(self, container: str) -> tuple[str, str]:
        """Return the name and the image, each "" if unknown."""
        return self._known.get(container, ("", ""))


def docker_sockets() -> list[str]:
    """Return the sockets of root's and our own Dockers; a user may have access to root's."""
    users = (_ROOT, os.geteuid())
    return docker_api.sockets(processes.running("dockerd", users=users))


def of_docker(patience: float, sockets: Iterable[str]) -> Called:
    """Return the running containers of the Dockers at the sockets that answer in time."""
    found = {}
    for path in sockets:
        try:
            answer = docker_api.containers(path, patience)
        except (OSError, ValueError):
            continue
        for each in answer:
            names, image = each.get("Names"), each.get("Image")
            if isinstance(names, list) and names and isinstance(each.get("Id"), str):
                found[each["Id"]] = (str(names[0]).removeprefix("/"), str(image or ""))
    return found


def of_podman() -> Called:
    """Return the running containers of podman and CRI-O, which start a conmon for each."""
    found = watched()
    named = _of_podman(found.values())
    return {container: named.get(container, ("", "")) for container in found}


def watched() -> dict[str, str]:
    """Return the bundles of the containers with a conmon, by container id (conmon(8))."""
    found = {}
    for process in processes.running("conmon"):
        ids, bundles = process.option("-c", "--cid"), process.option("-b", "--bundle")
        if ids and bundles:
            found[ids[-1]] = process.root + bundles[-1]
    return found


def _of_podman(bundles: Iterable[str]) -> Called:
    """Return the names in the lists of podman's stores, next to the containers' folders."""
    found: Called = {}
    stores = {os.path.dirname(os.path.dirname(bundle)): bundle for bundle in bundles}
    for bundle in stores.values():
        named = engine_names.of_podman(bundle)
        found |= {container: (name, "") for container, name in named.items()}
    return found


def meant(word: str, called: Mapping[str, str]) -> list[str]:
    """Return the ids that match a word; ``called`` maps ids to names, "" for none.

    The order is Docker's: an id, else a name, else the start of ids.
    """
    if not word or word in called:
        return [word] if word else []
    named = [container for container, name in called.items() if name == word]
    if named or len(word) < _SHORTEST_ID:
        return named
    return [container for container in called if container.startswith(word)]
