"""Check of listed paths: which of them containers may get.

Lists of root (Ascend's, Tegra's, a vendor's table in config.toml) are trusted. Excluded are paths
that would give a container access to its engine, and paths that non-root users can write.
"""

import os
import stat

from gpuhook.base.container.rootfs import find_socket
from gpuhook.base.errors import UntrustedPathError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.base.container.rootfs import Rootfs

# Sockets and data of engines.
_ENGINES = (
    "/run/containerd", "/run/crio", "/run/docker", "/run/docker.sock", "/run/podman", "/run/isula",
    "/run/isulad.sock", "/run/cri-dockerd.sock", "/run/k3s", "/run/user", "/var/lib/containerd",
    "/var/lib/containers", "/var/lib/docker", "/var/lib/kubelet", "/var/lib/rancher",
)  # fmt: skip
_KERNELS = ("/dev", "/proc", "/sys")
# Folders in which a container with write access could change the host, and sockets of daemons.
_SYSTEMS = (
    "/bin", "/boot", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/root", "/run",
    "/sbin", "/usr", "/var/run", "/var/spool",
)  # fmt: skip
# Below /dev: folders with nodes, which the container could remove, and world-writable ones.
_DEVICES = (
    "/dev/block", "/dev/bus", "/dev/char", "/dev/cpu", "/dev/disk", "/dev/dri", "/dev/fd",
    "/dev/infiniband", "/dev/input", "/dev/log", "/dev/mapper", "/dev/mqueue", "/dev/net",
    "/dev/pts", "/dev/shm", "/dev/snd", "/dev/vfio",  # noqa: S108
)  # fmt: skip


class ListedPath:
    """A listed path: its real path below the driver root, and its mode.

    ``real`` is "" if nothing exists, or ``refusal`` says why containers don't get it ("which ...").
    """

    __slots__ = ("mode", "real", "refusal")

    @property
    def is_given(self) -> bool:
        """True if it exists and containers may get it."""
        return bool(self.real) and not self.refusal

    def __init__(self, root: "Rootfs", path: str, *, writable: bool = False) -> None:
        """Check an absolute path without ..; ``writable`` is for a folder to write to."""
        self.mode = 0
        self.real = self.refusal = ""
        try:
            real = root.own_path(path)
            fd = root.open_own(real, writable=writable)
        except (FileNotFoundError, NotADirectoryError):
            return
        except UntrustedPathError:
            self.refusal = "which non-root users may change"
            return
        except OSError as error:
            self.refusal = f"which can't be read ({error.strerror})"
            return
        try:
            self.real, self.mode = real, os.fstat(fd).st_mode
            paths = (plain(path), plain(real))
            self.refusal = _why_not_written(paths) if writable else _why_not(paths, fd, self.mode)
        finally:
            os.close(fd)


def plain(path: str) -> str:
    """Return an absolute path in normal form."""
    return "/" + os.path.normpath(path).lstrip("/")


def _why_not(paths: tuple[str, ...], fd: int, mode: int) -> str:
    for path in paths:
        # If /var/run isn't a link, its target is another folder with the same purpose.
        place = "/run" + path.removeprefix("/var/run") if _is_in(path, "/var/run") else path
        for kept in (*_ENGINES, *_KERNELS):
            if _is_in(place, kept):  # protects: engines-files
                return f"which belongs to {kept}"
            if _is_in(kept, place):
                return f"which contains {kept}"
    if stat.S_ISDIR(mode):
        found = find_socket(fd)
        return f"which contains the socket {found}" if found else ""  # protects: listed-socket
    return "" if stat.S_ISREG(mode) else "which is neither a file nor a folder"


def _why_not_written(paths: tuple[str, ...]) -> str:
    """Return why a folder can't be mounted writable; its content may be other containers' work."""
    for path in paths:
        if path == "/dev":
            return "which belongs to the kernel"
        for kept in (*_ENGINES, *_KERNELS[1:], *_SYSTEMS, *_DEVICES):
            if _is_in(path, kept):  # protects: written-folders
                return f"which belongs to {kept}"
            if _is_in(kept, path):
                return f"which contains {kept}"
    return ""


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
