"""Existing content of a config.json's volumes, for modes without a hook in the container.

A low-level runtime creates missing mount points. In a volume, it would create them in the host's
folder, or fail if that is read-only.
"""

import os

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import in_volume
from gpuhook.core import spec_devices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TypeVar

    from gpuhook.core.plan.operations import Operation

    Step = TypeVar("Step", bound=Operation)


class Volumes:
    """Mounts of a config.json in a container with this root."""

    def __init__(self, spec: "dict[str, Any]", root: Rootfs) -> None:
        self._root = root
        self._sources: dict[str, str] = {}
        for mount in spec_devices.objects(spec.get("mounts")):
            source, place = mount.get("source"), mount.get("destination")
            if not (isinstance(source, str) and isinstance(place, str) and _is_bind(mount)):
                continue
            if source.startswith("/"):
                self._sources[self._real(os.path.normpath(place))] = source

    def fit(self, operations: "Iterable[Step]") -> "tuple[list[Step], list[str]]":
        """Return the remaining operations, and why others can't be done, a sentence each.

        What a volume already contains is skipped silently. VolumeError for an operation that a
        container needs.
        """
        found, left_out = [], []
        for op in operations:
            source, inside = self._volume_of(op.destination)
            status = _status(source, inside) if source else None
            if source and status is None:  # protects: spec-volumes
                error = in_volume(os.path.basename(op.destination))
                if not op.optional:
                    raise error
                left_out.append(f"{op.describe()}: {error.cause}")
            elif status is None or not _is_same(status, op.source):
                found.append(op)
        return found, left_out

    def _volume_of(self, path: str) -> tuple[str, str]:
        """Return the source of the volume that has a path, and the path in it; "" for none."""
        real = self._real(path) if path and self._sources else ""
        above = os.path.dirname(real)
        while len(above) > 1:
            if above in self._sources:
                return self._sources[above], real[len(above) :]
            above = os.path.dirname(above)
        return "", ""

    def _real(self, path: str) -> str:
        """Return a path with links to folders of the image resolved."""
        folder, name = os.path.split(path)
        if folder == path:
            return path
        try:
            folder = self._root.real_path(folder)
        except OSError:
            folder = self._real(folder)
        return os.path.join(folder, name)


def _is_bind(mount: "dict[str, Any]") -> bool:
    options = mount.get("options")
    words = options if isinstance(options, list) else ()
    return mount.get("type") == "bind" or "bind" in words or "rbind" in words


def _status(source: str, inside: str) -> os.stat_result | None:
    try:
        with Rootfs(source) as volume:
            return volume.stat(inside)
    except OSError:
        return None


def _is_same(status: os.stat_result, source: str) -> bool:
    try:
        return bool(source) and os.path.samestat(status, os.stat(source))
    except OSError:
        return False
