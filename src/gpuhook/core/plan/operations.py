"""Operations of a plan: small objects that execute, describe, serialise and write themselves.

``prepare`` runs in the host's mount namespace and opens sources in the driver root. ``execute``
runs in the container's mount namespace and changes it below its root. All changes go through
``kernel`` and ``rootfs``. ``write_to`` writes an operation in another format, with a method of
``PlanWriter``.
"""

import os
import stat

from gpuhook.base.container import kernel
from gpuhook.base.container.rootfs import DriverRoots, SocketError, refuse_socket
from gpuhook.base.errors import InjectError, LdCacheError, UntrustedPathError
from gpuhook.base.loader import ldcache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from gpuhook.base.container.changes import ContainerRootfs
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.base.oci.process import EnvironmentSetting
    from gpuhook.core.inventory.model import DeviceNode

    class _Writer(Protocol):  # core.plan.writer.PlanWriter; it imports this module
        def other(self, op: "Operation") -> None: ...
        def rule(self, op: "AllowDevice") -> None: ...
        def variable(self, op: "SetVariable") -> None: ...
        def group(self, op: "AddGroup") -> None: ...
        def node(self, op: "BindDevice") -> None: ...
        def mount(self, op: "BindFile") -> None: ...
        def copy(self, file: "BindFile", aliases: tuple[tuple[str, str], ...]) -> None: ...
        def link(self, op: "Symlink") -> None: ...
        def cache(self, op: "UpdateLdCache") -> None: ...


_ATTRIBUTES = {
    "ro": kernel.MOUNT_ATTR_RDONLY,
    "nosuid": kernel.MOUNT_ATTR_NOSUID,
    "nodev": kernel.MOUNT_ATTR_NODEV,
    "noexec": kernel.MOUNT_ATTR_NOEXEC,
}

FILE_OPTIONS = ("ro", "nosuid", "nodev")
FOLDER_OPTIONS = ("nosuid", "nodev")  # of a writable folder
SOCKET_OPTIONS = ("nosuid", "nodev", "noexec")
DEVICE_OPTIONS = ("ro", "nosuid", "noexec")
# Files here are skipped if their mount point would have to be made in a volume, or if non-root
# users may have put them there. Other optional files are skipped only in volumes.
_OPTIONAL_FOLDERS = (
    "/etc/", "/lib/firmware/", "/run/", "/usr/lib/firmware/", "/usr/share/", "/var/run/",
)  # fmt: skip
# Folders of packages: discovery has searched them for sockets, so starts don't.
_SETTLED_FOLDERS = ("/usr/", "/lib/", "/lib64/", "/opt/", "/etc/", "/nix/store/")

LD_CACHE = "/etc/ld.so.cache"
_MAX_LD_CACHE = 64 << 20
_MAX_WRITTEN = 1 << 20


def attributes_of(options: tuple[str, ...]) -> int:
    """Return the MOUNT_ATTR_* bits of mount options."""
    bits = 0
    for option in options:
        bits |= _ATTRIBUTES[option]
    return bits


class Operation:
    """One operation of a plan, and its reason."""

    kind = ""
    shown: tuple[str, ...] = ("kind", "reason")  # its fields in JSON
    by_runtime = False  # whether only config.json can express it
    last = False  # whether it comes after all others, joined with those of other vendors
    allows: tuple[int, int] | None = None  # the device to allow in the container's cgroup
    source = destination = ""  # paths on the host and in the container, if it has any
    leads_to = ""  # for a link: its target
    root = "/"  # the driver root of its source
    left_out = ""  # why it is skipped, if ``prepare`` or ``is_usable`` decided so

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def is_in(self, spec: "dict[str, Any]") -> bool:  # noqa: ARG002
        """Tell whether the runtime has done it: only for operations it does, by the spec."""
        return False

    @property
    def optional(self) -> bool:
        """True if it is skipped when a volume of the container is in its way."""
        return False

    def is_usable(self, host: "Rootfs") -> bool:  # noqa: ARG002
        """Tell whether its source in ``root`` (opened as ``host``) can be used now.

        If not, ``left_out`` says why, "" for a source that doesn't exist and isn't needed.
        UntrustedPathError if the container can't do without it.
        """
        return True

    def is_kept(self, image: "Rootfs") -> bool:  # noqa: ARG002
        """Tell whether the image's own file at the destination stays, in modes without a hook."""
        return False

    def prepare(self, host: "Rootfs") -> None:
        """Open its sources in ``root``, which is opened as ``host``."""

    def execute(self, container: "ContainerRootfs") -> None:
        """Execute the operation below the container's root."""

    def close(self) -> None:
        """Release what ``prepare`` opened."""

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation in a format, with the writer's method for its kind."""
        writer.other(self)

    def joined(self, others: "list[Any]") -> "Operation":  # noqa: ARG002
        """Return one operation for this and others of its kind, if it is ``last``."""
        return self

    def describe(self) -> str:
        """Describe the operation in words."""
        return self.kind

    def to_json(self) -> "dict[str, Any]":
        """Return the fields in ``shown`` as JSON values."""
        values = ((name, getattr(self, name)) for name in self.shown)
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values}


class _Bind(Operation):
    """Base of operations that mount something from the driver root in the container."""

    cleared = 0  # MOUNT_ATTR_* bits of the source's mount that ours must not have
    shown: tuple[str, ...] = ("kind", "source", "destination", "options", "reason")

    def __init__(
        self,
        root: str,
        path: str,
        destination: str,
        options: tuple[str, ...],
        reason: str,
    ) -> None:
        super().__init__(reason)
        self.root = root
        self.path = path
        self.source = root.rstrip("/") + path
        self.destination = destination
        self.options = options
        self._folder = False
        self._status: os.stat_result | None = None
        self._tree = -1

    def describe(self) -> str:
        """Describe the mount and its options."""
        return f"mount {self.source} on {self.destination} ({','.join(self.options)})"

    def check(self, status: os.stat_result) -> None:
        """Raise InjectError if the source has the wrong type."""

    def is_usable(self, host: "Rootfs") -> bool:
        """Tell whether the source can be mounted; OSError if it can't be opened."""
        fd = self._opened(host)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def _opened(self, host: "Rootfs") -> int | None:
        """Return a descriptor of the source, None to skip the operation."""
        return host.open(self.path)

    def prepare(self, host: "Rootfs") -> None:
        """Clone the source into a detached mount with its final flags."""
        fd = self._opened(host)
        if fd is None:
            return
        try:
            status = self._status = os.fstat(fd)
            self.check(status)
            self._folder = stat.S_ISDIR(status.st_mode)
            self._tree = kernel.clone_tree(fd, self.source)
        finally:
            os.close(fd)
        attributes = attributes_of(self.options)  # protects: mount-flags
        kernel.set_mount_attributes(self._tree, attributes, self.source, self.cleared)

    def execute(self, container: "ContainerRootfs") -> None:
        """Mount the clone on the destination; create the mount point if it is missing."""
        if self._tree < 0:
            if self.left_out:
                container.skipped.append(f"{self.describe()}: {self.left_out}")
            return
        target = container.mount_point(self.destination, folder=self._folder, source=self._status)
        if target is None:
            return
        try:
            container.attach(self._tree, target, self.destination)
        finally:
            os.close(target)

    def close(self) -> None:
        """Close the clone, which drops it if it wasn't mounted."""
        if self._tree >= 0:
            os.close(self._tree)
            self._tree = -1


class BindFile(_Bind):
    """Mount of a driver file or folder; never a socket, nor a folder that contains one."""

    kind = "bind"

    @property
    def optional(self) -> bool:
        """True for a convenience: a vendor's file, or firmware."""
        return self._is_convenience

    @property
    def _is_convenience(self) -> bool:
        return self.destination.startswith(_OPTIONAL_FOLDERS)

    def _opened(self, host: "Rootfs") -> int | None:
        try:
            fd = host.open_own(self.path)
            if not self.path.startswith(_SETTLED_FOLDERS):
                refuse_socket(fd, self.source)
        except UntrustedPathError as error:
            if not (self._is_convenience or isinstance(error, SocketError)):
                raise
            self.left_out = error.cause
            return None
        return fd

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation as a mount."""
        writer.mount(self)

    def check(self, status: os.stat_result) -> None:
        """Accept files and folders."""
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise InjectError(
                f"{self.source} is neither a file nor a folder",
                "Reinstall the driver",
            )


class BindPart(BindFile):
    """Mount of an optional driver part: skipped if a volume is in its way."""

    optional = True


class BindFolder(BindFile):
    """Mount of a writable host folder that the administrator has declared.

    Containers write there, so its content isn't checked: sockets in it aren't refused.
    """

    def __init__(self, root: str, path: str, destination: str, reason: str) -> None:
        super().__init__(root, path, destination, FOLDER_OPTIONS, reason)

    def _opened(self, host: "Rootfs") -> int:
        return host.open_own(self.path, writable=True)

    def check(self, status: os.stat_result) -> None:
        """Accept a folder."""
        if not stat.S_ISDIR(status.st_mode):
            raise InjectError(f"{self.source} isn't a folder", "Make it one, or don't declare it")


class BindSocket(_Bind):
    """Mount of a driver daemon's socket, if it exists at that moment."""

    kind = "bind"
    optional = True  # daemons come and go

    def _opened(self, host: "Rootfs") -> int | None:
        try:
            return host.open_socket(self.path)
        except UntrustedPathError as error:
            self.left_out = error.cause
        except OSError:
            pass  # it doesn't exist
        return None


class BindDevice(_Bind):
    """Mount of a driver's device node, under the same or another name."""

    kind = "device"
    cleared = kernel.MOUNT_ATTR_NODEV  # protects: nodev-cleared
    shown = (*_Bind.shown, "major", "minor")

    def __init__(self, root: str, node: "DeviceNode", reason: str) -> None:
        super().__init__(root, node.path, node.inside or node.path, DEVICE_OPTIONS, reason)
        self.node = node
        self.major, self.minor = node.numbers

    def describe(self) -> str:
        """Describe the node, its numbers, and its destination if that differs."""
        where = f" on {self.destination}" if self.node.inside else ""
        return f"mount the device node {self.source} ({self.major}:{self.minor}){where}"

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation as a node."""
        writer.node(self)

    def check(self, status: os.stat_result) -> None:
        """Accept only the character device with the expected numbers."""
        numbers = (os.major(status.st_rdev), os.minor(status.st_rdev))
        if not stat.S_ISCHR(status.st_mode) or numbers != (self.major, self.minor):
            raise InjectError(
                f"{self.source} is not the character device {self.major}:{self.minor}",
                "Remove it and let the driver's own program or udev create it again",
            )


class AllowDevice(Operation):
    """Permission for a device in the container's cgroup: in the OCI spec, or by the hook.

    A plan's permissions are all granted together, before anything else: see ``inject``.
    """

    kind = "allow-device"
    access = "rw"
    shown = ("kind", "major", "minor", "access", "reason")

    def __init__(self, numbers: tuple[int, int], reason: str) -> None:
        super().__init__(reason)
        self.allows = self.major, self.minor = numbers

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation as a rule."""
        writer.rule(self)

    def describe(self) -> str:
        """Describe the device and the access."""
        return f"allow c {self.major}:{self.minor} {self.access} in the device cgroup"


class SetVariable(Operation):
    """Variable of the container's process: set by the runtime, in config.json."""

    kind = "environment"
    by_runtime = True

    def __init__(self, setting: "EnvironmentSetting") -> None:
        super().__init__(setting.reason)
        self.setting = setting

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation as a variable."""
        writer.variable(self)

    def describe(self) -> str:
        """Describe the variable and its value."""
        if self.setting.front:
            return f"put {self.setting.value} in front of {self.setting.name}"
        return f"set {self.setting.name}={self.setting.value}"

    def is_in(self, spec: "dict[str, Any]") -> bool:
        """Tell whether the process has the variable."""
        from gpuhook.base.oci import process  # noqa: PLC0415 - rarely needed

        return process.has_variable(spec, self.setting)

    def to_json(self) -> "dict[str, Any]":
        """Add name and value."""
        setting = self.setting
        return {
            "kind": self.kind,
            "name": setting.name,
            "value": setting.value,
            "front": setting.front,
            "reason": self.reason,
        }


class AddGroup(Operation):
    """Supplementary group of the container's process: added by the runtime, in config.json."""

    kind = "group"
    by_runtime = True
    shown = ("kind", "gid", "reason")

    def __init__(self, gid: int, reason: str) -> None:
        super().__init__(reason)
        self.gid = gid

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation as a group."""
        writer.group(self)

    def describe(self) -> str:
        """Describe the group."""
        return f"put the process in the host's group {self.gid}"

    def is_in(self, spec: "dict[str, Any]") -> bool:
        """Tell whether the process is in the group."""
        from gpuhook.base.oci import process  # noqa: PLC0415 - as above

        inside = process.group_inside(spec, self.gid)
        return inside is not None and process.missing_group(spec, self.gid) is None


class Symlink(Operation):
    """Symbolic link next to a library.

    With ``replace`` it points to ``target`` afterwards, whatever the image has there. Without it,
    a name of the image stays, except links that an earlier start left. ``renewed`` also replaces
    a link to another version of ``target``: for names that only the driver has.
    """

    kind = "symlink"
    shown = ("kind", "destination", "target", "reason")
    optional = True  # loaders find libraries without it, or only builds use it

    def __init__(
        self, destination: str, target: str, *, replace: bool, reason: str, renewed: bool = False
    ) -> None:
        super().__init__(reason)
        self.destination = destination
        self.target = target
        self.leads_to = os.path.join(os.path.dirname(destination), target)
        self._replace = replace
        self._renewed = renewed

    def is_kept(self, image: "Rootfs") -> bool:
        """Tell whether the image has its own file there."""
        if self._replace or not image.has_name(self.destination):
            return False
        return not image.is_leftover(self.destination, self.target, renewed=self._renewed)

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation as a link."""
        writer.link(self)

    def describe(self) -> str:
        """Describe the link and its target."""
        return f"link {self.destination} to {self.target}"

    def execute(self, container: "ContainerRootfs") -> None:
        """Create the link."""
        container.make_link(
            self.destination, self.target, replace=self._replace, renewed=self._renewed
        )


class UpdateLdCache(Operation):
    """Addition of the driver's libraries to the container's /etc/ld.so.cache.

    ``libraries`` are (SONAME, absolute path in the container, cache flags) in order of
    precedence. Always the last operation: it is atomic, and nothing after it can fail. If the
    image's cache is damaged, ``ldconfig``, a host program, makes a new one; LdCacheError without
    it.
    """

    kind = "ldcache"
    shown = ("kind", "destination", "libraries", "reason")
    destination = LD_CACHE
    last = True

    def __init__(
        self, libraries: tuple[tuple[str, str, int], ...], reason: str, ldconfig: str = ""
    ) -> None:
        super().__init__(reason)
        self.libraries = libraries
        self.ldconfig = ldconfig
        self._program = -1

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation as libraries of the cache."""
        writer.cache(self)

    def describe(self) -> str:
        """Describe how many libraries are added."""
        return f"add {len(self.libraries)} libraries to {LD_CACHE}"

    def joined(self, others: "list[UpdateLdCache]") -> "UpdateLdCache":
        """Return one operation for the libraries of all."""
        if not others:
            return self
        libraries = tuple(each for op in (self, *others) for each in op.libraries)
        return UpdateLdCache(libraries, self.reason, self.ldconfig)

    def prepare(self, host: "Rootfs") -> None:  # noqa: ARG002 - not the driver root's program
        """Copy the host's ldconfig, which the container's mount namespace doesn't have."""
        if self.ldconfig:
            from gpuhook.base.loader import ldconfig_fallback  # noqa: PLC0415 - rarely enabled

            self._program = ldconfig_fallback.load(self.ldconfig)

    def close(self) -> None:
        """Close the copy."""
        if self._program >= 0:
            os.close(self._program)
            self._program = -1

    def execute(self, container: "ContainerRootfs") -> None:
        """Merge and replace the file; leave it if nothing changes."""
        old = container.read_file(LD_CACHE, _MAX_LD_CACHE)
        if old is None and not container.may_write(LD_CACHE):
            # Without a cache the loader searches its default folders, which have the libraries.
            container.skipped.append(f"{LD_CACHE}: it would have to be made in a volume")
            return
        libraries = self._placed(container.lacks) if container.lacks else self.libraries
        try:
            new = ldcache.merge(old, libraries, LD_CACHE)
        except LdCacheError as error:
            if self._program < 0:
                error.remedy = error.remedy.replace("image", container.holder(LD_CACHE))
                raise
            from gpuhook.base.loader import ldconfig_fallback  # noqa: PLC0415 - as in prepare

            made = ldconfig_fallback.build(self._program, container)
            new = ldcache.merge(made, libraries, "the cache that the host's ldconfig made")
        if new != old:
            container.replace_file(LD_CACHE, new, 0o644)

    def _placed(self, lacks: dict[str, str]) -> list[tuple[str, str, int]]:
        """Return the libraries by their files if a volume lacks a link to one."""
        found = []
        for soname, path, flags in self.libraries:
            place = path
            while place in lacks:
                place = lacks[place]
            if place:
                found.append((soname, place, flags))
        return found

    def to_json(self) -> "dict[str, Any]":
        """Add the libraries' names."""
        return {**super().to_json(), "libraries": [soname for soname, _, _ in self.libraries]}


class WriteFile(Operation):
    """File with given content; replaces a file of the image."""

    kind = "write"
    shown = ("kind", "destination", "mode", "content", "reason")

    def __init__(self, destination: str, content: str, mode: int, reason: str) -> None:
        super().__init__(reason)
        self.destination = destination
        self.content = content
        self.mode = mode

    @property
    def optional(self) -> bool:
        """True: containers work without our files."""
        return True

    def describe(self) -> str:
        """Describe the file."""
        return f"write {self.destination}"

    def execute(self, container: "ContainerRootfs") -> None:
        """Replace the file; leave it if it has the same content."""
        new = self.content.encode()
        if container.read_file(self.destination, _MAX_WRITTEN) != new:
            container.replace_file(self.destination, new, self.mode)

    def to_json(self) -> "dict[str, Any]":
        """Add the mode in octal digits."""
        return {**super().to_json(), "mode": f"{self.mode:04o}"}


def usable(operations: "list[Operation]") -> "tuple[list[Operation], list[str]]":
    """Return the operations whose sources can be used now, and why others can't.

    UntrustedPathError if a container can't do without one.
    """
    found, left_out = [], []
    with DriverRoots() as roots:
        for op in operations:
            try:
                done = op.is_usable(roots.of(op.root))
            except OSError:
                done = True  # a missing root is reported when it is opened
            if done:
                found.append(op)
            elif op.left_out:
                left_out.append(op.left_out)
    return found, left_out


class Plan:
    """Ordered list of operations."""

    def __init__(self, operations: "list[Operation]") -> None:
        self.operations = operations

    @property
    def devices(self) -> list[tuple[int, int]]:
        """The (major, minor) pairs that the container may open."""
        return [op.allows for op in self.operations if op.allows is not None]
