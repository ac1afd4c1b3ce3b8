"""The OCI bundle: lossless reading and editing of config.json, and the state that hooks receive.

Sources: OCI runtime specification 1.0 to 1.2, config.md and runtime.md (state).
"""

import os

from gpuhook.base.errors import SpecError, StateError, UnusableSpecError
from gpuhook.base.fileio import read_start, replace
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_READ = 64 << 20  # a config.json with 10^6 environment entries has about 40 MiB


class Spec:
    """One config.json: its text, and its parsed data.

    ``text`` keeps bytes that aren't UTF-8 as surrogates, so that they are written unchanged.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        try:
            data = jsontext.loads(text)
        except ValueError as error:
            broken = UnusableSpecError if jsontext.surely_broken(text) else SpecError
            raise broken(
                f"{path} is not valid JSON: {error}",
                "Make the container engine write the bundle again",
            ) from None
        if not isinstance(data, dict):
            raise SpecError(
                f"{path} isn't a JSON object",
                "Make the container engine write the bundle again",
            )
        self.data: dict[str, Any] = data

    @property
    def bundle(self) -> str:
        """The bundle's absolute path; "" if the text isn't in a bundle (podman's precreate)."""
        folder, name = os.path.split(os.path.abspath(self.path))
        return folder if name == "config.json" else ""

    @property
    def root_path(self) -> str:
        """The root filesystem's absolute path on the host (root.path, else the bundle)."""
        bundle = os.path.dirname(os.path.abspath(self.path))
        root = self.data.get("root")
        path = root.get("path") if isinstance(root, dict) else None
        if not isinstance(path, str) or not path:
            return bundle
        return os.path.join(bundle, path)

    @property
    def has_mount_namespace(self) -> bool:
        """True if the container gets a new mount namespace, not an existing one."""
        # protects: namespace-path
        return any(not item.get("path") for item in self._namespaces("mount"))

    @property
    def has_user_namespace(self) -> bool:
        """True if the container is in a user namespace, a new or an existing one."""
        return bool(self._namespaces("user"))

    def _namespaces(self, kind: str) -> "list[dict[str, Any]]":
        linux = self.data.get("linux")
        found = linux.get("namespaces") if isinstance(linux, dict) else None
        every = found if isinstance(found, list) else []
        return [item for item in every if isinstance(item, dict) and item.get("type") == kind]

    @property
    def is_in_scope(self) -> bool:
        """True if systemd creates the container's cgroup: its path is then slice:prefix:name."""
        linux = self.data.get("linux")
        path = linux.get("cgroupsPath") if isinstance(linux, dict) else None
        return isinstance(path, str) and path.count(":") == 2

    def require_mount_namespace(self) -> None:
        """Raise SpecError if the container's mounts would appear and remain on the host."""
        if not self.has_mount_namespace:  # protects: mount-namespace
            raise SpecError(
                f"{self.path} gives the container no mount namespace of its own",
                "Give it one (linux.namespaces): gpuhook's mounts would remain on the host",
            )

    @property
    def device_rules(self) -> "list[Any]":
        """The rules of linux.resources.devices, empty if there are none."""
        node: Any = self.data
        for key in ("linux", "resources", "devices"):
            node = node.get(key) if isinstance(node, dict) else None
        return node if isinstance(node, list) else []

    def hooks(self, stage: str) -> "list[dict[str, Any]]":
        """Return the hooks of a stage (prestart, createRuntime, ...) that are objects."""
        hooks = self.data.get("hooks")
        found = hooks.get(stage) if isinstance(hooks, dict) else None
        return [hook for hook in found if isinstance(hook, dict)] if isinstance(found, list) else []

    def append(self, path: tuple[str, ...], items: "list[Any]") -> "Spec":
        """Return a new spec with items appended to the list at ``path``."""
        try:
            texts = [jsontext.dumps(item) for item in items]
            return Spec(self.path, jsontext.append_to_list(self.text, path, texts))
        except ValueError as error:
            raise self._bad_shape(error) from None

    def replace_items(self, path: tuple[str, ...], changed: dict[int, str]) -> "Spec":
        """Return a new spec with these strings replaced, by their index in the list at ``path``."""
        texts = {index: jsontext.quote_bytes(item) for index, item in changed.items()}
        return Spec(self.path, jsontext.replace_items(self.text, path, texts))

    def put(self, values: "dict[tuple[str, ...], Any]") -> "Spec":
        """Return a new spec with these values, by their paths (object keys from the top).

        Items that are the same objects as in the old list keep their text. SpecError if a path
        leads through a value that isn't an object.
        """
        text = self.text
        try:
            for path, value in values.items():
                text = jsontext.put(text, path, self._written(text, path, value))
            return Spec(self.path, text)
        except ValueError as error:
            raise self._bad_shape(error) from None

    def _written(self, text: str, path: tuple[str, ...], value: "Any") -> str:
        """Return a value as JSON; items that the present list has as well keep their text."""
        old: Any = self.data
        for key in path:
            old = old.get(key) if isinstance(old, dict) else None
        if not isinstance(value, list) or not isinstance(old, list):
            return jsontext.dumps(value)
        kept = dict(zip(map(id, old), jsontext.items(text, path), strict=True))
        inside = [kept.get(id(item)) or jsontext.dumps(item) for item in value]
        return "[" + ",".join(inside) + "]"

    def drop_hooks(self, stage: str, names: tuple[str, ...]) -> "Spec":
        """Return a spec without the hooks of a stage whose path ends in one of the names."""
        hooks = self.data.get("hooks")
        found = hooks.get(stage) if isinstance(hooks, dict) else None
        if not isinstance(found, list):
            return self
        kept = [hook for hook in found if hook_name(hook) not in names]
        if len(kept) == len(found):
            return self
        return self.put({("hooks", stage): kept})  # protects: other-hooks

    def _bad_shape(self, error: ValueError) -> SpecError:
        return SpecError(
            f"{self.path} can't be edited: {error}",
            "Make the container engine write the bundle again",
        )

    def encoded(self) -> bytes:
        """Return the content of the file."""
        return self.text.encode("utf-8", "surrogateescape")

    def write(self) -> None:
        """Replace the file atomically, keeping its mode and owner; SpecError if that fails."""
        try:
            old, data = os.stat(self.path), self.encoded()
            replace(self.path, data, f"{self.path}.gpuhook", finish=lambda fd: _be_like(fd, old))
        except OSError as error:
            raise SpecError(
                f"{self.path} can't be written: {error.strerror}",
                "Make the bundle's folder writable for root and check that its disk isn't full",
            ) from None


def read_spec(path: str) -> Spec:
    """Read a bundle's config.json; SpecError if it can't be used.

    If every low-level runtime refuses it as well, that is an UnusableSpecError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = read_start(fd, _MAX_READ + 1)
        finally:
            os.close(fd)
    except OSError as error:
        there = not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        raise (SpecError if there else UnusableSpecError)(
            f"{path} can't be read: {error.strerror}",
            "Pass the bundle's folder, with a config.json in it, by --bundle",
        ) from None
    if len(data) > _MAX_READ:
        raise SpecError(
            f"{path} is larger than {_MAX_READ >> 20} MiB",
            "Remove environment variables or mounts that the container doesn't need",
        )
    try:
        return Spec(path, data.decode("utf-8", "surrogateescape"))  # protects: bytes-kept
    except UnusableSpecError as error:
        if os.path.isfile(path):
            raise
        # A pipe: a runtime waits until a process writes into it.
        raise SpecError(error.cause, error.remedy) from None


def _be_like(fd: int, old: os.stat_result) -> None:
    """Copy a file's owner and mode; without root's privileges, its owner is the current user.

    Slurm writes a config.json owned by root into a folder of the user who runs the container.
    """
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        try:
            os.fchown(fd, old.st_uid, old.st_gid)
        except PermissionError:
            if os.geteuid() == 0:
                raise
    os.fchmod(fd, old.st_mode & 0o7777)


def hook_name(hook: "Any") -> str:
    """Return the last component of a hook's path, or the empty string."""
    path = hook.get("path") if isinstance(hook, dict) else None
    return path.rpartition("/")[2] if isinstance(path, str) else ""


class ContainerState(Record):
    """The parts that we need of the container state on a hook's standard input."""

    container_id: str
    pid: int
    bundle: str
    root: str | None


def parse_state(data: bytes, *, needs_pid: bool = True) -> ContainerState:
    """Parse the state JSON; StateError if pid or bundle is missing or malformed.

    A createContainer hook receives the process id inside the container, 1, or none. It works
    without one (``needs_pid``), and the returned ContainerState has pid 0. ``bundlePath`` is the
    key of runc before 1.0. ``root`` is crun's addition, in newer versions the value of config.json,
    which may be relative to the bundle.
    """
    try:
        state = jsontext.loads(data.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise _bad_state(f"is not valid JSON: {error}") from None
    if not isinstance(state, dict):
        raise _bad_state("is not a JSON object")
    pid = state.get("pid")
    bundle = state.get("bundle") or state.get("bundlePath")
    root = state.get("root")
    if not needs_pid:
        pid = 0
    elif not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        raise _bad_state("has no pid of a running container")
    if not isinstance(bundle, str) or not bundle.startswith("/"):
        raise _bad_state("has no absolute path of the bundle")
    name = state.get("id")
    return ContainerState(
        name if isinstance(name, str) else "",
        pid,
        bundle,
        os.path.join(bundle, root) if isinstance(root, str) and root else None,
    )


def _bad_state(what: str) -> StateError:
    return StateError(
        f"The container state on standard input {what}",
        "Register gpuhook-prestart as a prestart or createRuntime hook, which receives the state",
    )
