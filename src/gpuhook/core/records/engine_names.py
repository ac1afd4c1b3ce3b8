"""Container names of Docker and podman, read from the engines' own files.

The engines aren't asked, because a refusal must not wait for a daemon. Docker's data folder is
found through the files that it mounts in each container; podman keeps a list next to its
containers.
"""

import os

from gpuhook.base.host import files
from gpuhook.base.oci import jsontext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_BYTES = 16 << 20  # of one file
_DOCKERS = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf")  # files that Docker mounts
# Errors for a file that is missing or has another format.
_WHAT_CAN_BE = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError,
)  # fmt: skip


def name_of(record: "dict[str, Any]") -> str:
    """Return the engine's name for the container of a record, "" if it isn't found."""
    if record["engine"] == "podman":
        return of_podman(record["bundle"]).get(record["id"], "")
    return _of_docker(record["bundle"], record["id"]) if record["engine"] == "docker" else ""


def of_podman(bundle: str) -> dict[str, str]:
    """Return the names of the containers in a bundle's store, by container id.

    Empty if podman's file is missing or has another format.
    """
    try:
        answer = _read(f"{os.path.dirname(os.path.dirname(bundle))}/containers.json")
        return {each["id"]: str(each["names"][0]) for each in answer if each.get("names")}
    except _WHAT_CAN_BE:
        return {}


def _of_docker(bundle: str, container: str) -> str:
    try:
        for mount in _read(f"{bundle}/config.json")["mounts"]:
            folder, _, _ = str(mount.get("source")).rpartition("/")
            own = folder.endswith(f"/containers/{container}")
            if own and mount.get("destination") in _DOCKERS:
                name = _read(f"{folder}/config.v2.json")["Name"]
                return name.removeprefix("/") if isinstance(name, str) else ""
    except _WHAT_CAN_BE:
        pass
    return ""


def _read(path: str) -> "Any":
    data = files.read(path, _MOST_BYTES)
    return jsontext.loads(data.decode("utf-8", "surrogateescape"))
