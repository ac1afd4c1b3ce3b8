"""GPU memory limits by cgroup, which NVIDIA's driver enforces since release 615.

NVML sets them, in a child process: the driver may hang, crash or be slow to start. The child keeps
root's rights, because NVML requires them for this call. It is started before the container's
process exists, so that nvmlInit runs in parallel with the low-level runtime.

Source: NVML 13.4 (nvml.h): nvmlDeviceSetMemoryLimits_v1 and nvmlDeviceGetMemoryLimits_v1.
"""

import os
import select
import sys
import time

from gpuhook.base.cgroup.dmem import TREE
from gpuhook.base.container import clib, kernel
from gpuhook.base.errors import MemoryLimitError
from gpuhook.base.fileio import write_all
from gpuhook.base.host import signals
from gpuhook.base.oci import jsontext
from gpuhook.core.memory_limiter import MemoryLimiter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import Device, Inventory
    from gpuhook.core.memory_limiter import Bytes, Use

DRIVER = 615
LIBRARY = "libnvidia-ml.so.1"
UNLIMITED = (1 << 64) - 1
_SET, _GET = "nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"
_SPARE_SECONDS = 5
_PATIENCE = 120  # seconds for the container's creation: a hook worker's wait and work
_REAP_SECONDS = 0.5
SIGKILL = 9
_MOST = 1 << 20
_WORD = 8
# nvmlReturn_t in nvml.h -> meaning for these calls.
_MEANINGS = {
    2: "it rejects an argument",
    3: "the driver doesn't account memory by cgroup here",
    4: "only root may do that",
    6: "the driver finds no such GPU, or no cgroup of that path",
    9: "the driver isn't loaded",
    15: "the GPU has fallen off the bus",
    18: "the libraries are of another release than the loaded driver",
}
# The driver's results for a cgroup that never had a limit, with and without its own accounting.
_NEVER_SET = (3, 6)
# Sets limits through the prefork server's open NVML, and returns whether that succeeded. Its
# arguments are driver root and library, cgroup and limits (``nvml_session``).
kept: "Callable[[tuple[str, str], str, Bytes], bool] | None" = None
_OLD = f"Install NVIDIA's driver {DRIVER} or newer, or start without a limit"


class NvmlLimiter(MemoryLimiter):
    """Limits by NVML; MemoryLimitError if this driver or these devices don't support them."""

    is_slow = True

    def __init__(self, grant: "Grant", config: "Config") -> None:
        inventory = grant.inventory
        self._root = inventory.root
        self._timeout = config.nvml_timeout
        self._child: _NvmlChild | None = None
        _check(grant)
        self._library = library_of(inventory)
        memory = {gpu.id: gpu.memory for gpu in inventory.gpus}
        self.memory = {device.id: memory[device.id] for device in grant.devices}
        unknown = [device.label for device in grant.devices if not self.memory[device.id]]
        if unknown:
            raise MemoryLimitError(
                f"NVML doesn't report how much memory GPU {unknown[0]} has",
                "Make nvidia-smi work on the host first",
            )

    def means(self, device: "Device") -> str:  # noqa: ARG002
        """Return the interface's name."""
        return "NVML"

    def begin(self) -> None:
        """Start the child, which calls nvmlInit, unless the prefork server has one."""
        if kept is None:
            self._started()

    def _started(self) -> "_NvmlChild":
        if self._child is None:
            seconds = _PATIENCE + int(self._timeout)
            self._child = _NvmlChild(self._root, self._library, [*self.memory], seconds)
        return self._child

    def set(self, tree: str, folder: str, wanted: "Bytes") -> None:
        """Set the limits with NVML, and check them afterwards."""
        ready = kept if tree == TREE else None
        if ready is None or not ready((self._root, self._library), folder, wanted):
            self._ask(tree, [folder], wanted)

    def used(self, tree: str, folders: "Iterable[str]") -> "dict[str, Use]":
        """Query the memory use of cgroups from NVML."""
        answer = self._ask(tree, [*folders], {})
        return {
            folder: {
                name: (used, None if hard >= UNLIMITED else hard)
                for name, (used, hard) in found.items()
            }
            for folder, found in answer["used"].items()
        }

    def _ask(self, tree: str, folders: list[str], wanted: "Bytes") -> "dict[str, Any]":
        if tree != TREE:
            raise MemoryLimitError(
                f"NVIDIA's driver limits memory by cgroup v2 at {TREE}, and here it is at {tree}",
                "Boot with cgroup v2 only (systemd.unified_cgroup_hierarchy=1)",
            )
        try:
            question = {"folders": folders, "wanted": dict(wanted)}
            answer = self._started().ask(question, self._timeout)
        finally:
            self.close()
        if answer is None:
            raise MemoryLimitError(
                f"NVML hasn't set the limits of the GPUs' memory within {self._timeout:g} seconds",
                "Enable persistence mode (nvidia-smi -pm 1), or raise nvml-timeout in config.toml",
            )
        if "error" in answer:
            raise MemoryLimitError(
                f"The memory of the container's GPUs can't be limited: {answer['error']}",
                "Make the driver account memory by cgroup: gpuhook doctor says what that needs",
            )
        return answer

    def close(self) -> None:
        """Stop the child."""
        if self._child is not None:
            self._child.end()
            self._child = None


def library_of(inventory: "Inventory") -> str:
    """Return the path of NVML below the driver root; MemoryLimitError if there is none."""
    for file in inventory.files:
        if file.kind == "library" and file.soname == LIBRARY:
            return file.path
    raise MemoryLimitError(f"The driver has no {LIBRARY}, which sets limits", _OLD)


def _check(grant: "Grant") -> None:
    inventory = grant.inventory
    if inventory.platform:
        raise MemoryLimitError(
            f"The platform {inventory.platform} has no GPU memory limits",
            "Start the container without a limit",
        )
    major = inventory.version.partition(".")[0]
    if not (major.isdecimal() and int(major) >= DRIVER):
        raise MemoryLimitError(
            f"NVIDIA's driver limits memory since release {DRIVER}, and this is "
            f"{inventory.version}",
            _OLD,
        )
    split = {gpu.id for gpu in inventory.gpus if gpu.mig_enabled}
    for device in grant.devices:
        if device.parent or device.id in split:
            raise MemoryLimitError(
                f"NVIDIA's driver has no limits for GPUs in MIG mode, as {device.label} is",
                "Start the container without a limit: a MIG device has no more than its own memory",
            )
    place = inventory.root.rstrip("/") + TREE
    if not os.path.isdir(place):
        raise MemoryLimitError(
            f"The folder {place} doesn't exist, where the driver looks up cgroups",
            f"Create it: mkdir -p {place}" if inventory.root != "/" else "Mount cgroup v2 there",
        )


class _NvmlChild:
    """A child with NVML initialized for one query."""

    def __init__(self, root: str, library: str, uuids: list[str], seconds: int) -> None:
        reader, self._asks = os.pipe2(os.O_CLOEXEC)
        self._answers, writer = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            _serve(reader, writer, root, library, uuids, seconds)
        os.close(reader)
        os.close(writer)

    def ask(self, question: "dict[str, Any]", timeout: float) -> "dict[str, Any] | None":
        """Return the response, None on timeout; an error if the child has died."""
        end = time.monotonic() + timeout
        data = b""
        try:
            write_all(self._asks, jsontext.dumps(question).encode() + b"\n")
            while len(data) < _MOST:
                left = end - time.monotonic()
                if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                    return None
                chunk = os.read(self._answers, 1 << 16)
                if not chunk:
                    break
                data += chunk
            found: dict[str, Any] = jsontext.loads(data.decode())
        except (OSError, ValueError):
            return {"error": "NVML exited without a response"}
        return found

    def end(self) -> None:
        """Kill the child, and wait a limited time for its exit."""
        os.close(self._asks)
        os.close(self._answers)
        signals.send_to_child(self._pid, SIGKILL)
        kernel.reap(self._pid, _REAP_SECONDS)


# In the child -------------------------------------------------------------------------------


class NvmlError(Exception):
    """An error of NVML: its text and number (0: the call itself succeeded)."""

    def __init__(self, text: str, number: int = 0) -> None:
        super().__init__(text)
        self.number = number


def _serve(
    reader: int, writer: int, root: str, library: str, uuids: list[str], seconds: int
) -> "NoReturn":
    """Answer one query and exit in any case."""
    status = 1
    try:
        kernel.keep_only((reader, writer))  # without the parent's lock and its engine's pipes
        kernel.end_after(seconds + _SPARE_SECONDS)
        kernel.die_with_parent()
        try:
            ready: Any = Setter(root, library)
            ready.find(uuids)
        except Exception as error:  # noqa: BLE001 - reported to the parent
            ready = error
        data = b""
        while not data.endswith(b"\n"):
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                os._exit(0)
            data += chunk
        write_all(writer, jsontext.dumps(_answer(ready, jsontext.loads(data.decode()))).encode())
        status = 0
    finally:
        os._exit(status)


def _answer(ready: "Any", question: "dict[str, Any]") -> "dict[str, Any]":
    if not isinstance(ready, Setter):
        return {"error": _sentence(ready)}
    try:
        if not question["wanted"]:
            return {"used": {folder: ready.used(folder) for folder in question["folders"]}}
        for uuid, limit in question["wanted"].items():
            ready.limit(uuid, question["folders"][0], limit)
    except Exception as error:  # noqa: BLE001 - as above
        return {"error": _sentence(error)}
    return {}


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'NVML'}: {error.strerror}"
    known = isinstance(error, (OSError, AttributeError, NvmlError))
    return str(error) if known else f"{type(error).__name__}: {error}"


class Setter:
    """NVML, initialized, with the handles of GPUs.

    Its methods raise OSError, AttributeError or NvmlError.
    """

    def __init__(self, root: str, library: str) -> None:
        if root != "/":
            _enter(root)
        kernel.set_no_new_privileges()
        self._nvml = clib.CLibrary(library)
        self._call("nvmlInit_v2")
        self._handles: dict[str, Any] = {}

    def find(self, uuids: list[str]) -> None:
        """Look up the handles of GPUs, which ``used`` covers."""
        for uuid in uuids:
            if uuid not in self._handles:
                self._handles[uuid] = self._handle(uuid)

    def limit(self, uuid: str, folder: str, limit: int) -> None:
        """Set a hard limit in bytes, and read it back from the driver."""
        self.find([uuid])
        name = _name(folder)
        self._call(_SET, self._handles[uuid], _struct(name, 0, limit))
        _, hard = self._get(uuid, folder)
        if hard > limit:  # protects: nvml-read-back
            raise NvmlError(f"{_GET} returns {hard} bytes after {limit} were set")

    def used(self, folder: str) -> dict[str, tuple[int, int]]:
        """Return a cgroup's memory use and hard limit on each GPU, in bytes."""
        found = {}
        for uuid in self._handles:
            try:
                found[uuid] = self._get(uuid, folder)
            except NvmlError as error:
                if error.number not in _NEVER_SET:
                    raise
        return found

    def _get(self, uuid: str, folder: str) -> tuple[int, int]:
        name = _name(folder)
        asked = _struct(name, 0, 0, 0)
        self._call(_GET, self._handles[uuid], asked)
        return asked[3] % (1 << 64), asked[2] % (1 << 64)

    def _handle(self, uuid: str) -> "Any":
        found = (clib.c_long * 1)()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode() + b"\0", found)
        return clib.c_long(found[0])

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._nvml, name)(*arguments)
        if result != 0:
            why = _MEANINGS.get(result)
            raise NvmlError(f"{name} returned {result}" + (f" ({why})" if why else ""), result)


def _name(folder: str) -> "Any":
    """Return a path as a C string, in an array that a pointer can refer to."""
    data = os.fsencode(folder) + b"\0"
    data += bytes(-len(data) % _WORD)
    numbers = [
        int.from_bytes(data[at : at + _WORD], sys.byteorder, signed=True)
        for at in range(0, len(data), _WORD)
    ]
    return (clib.c_long * len(numbers))(*numbers)


def _struct(name: "Any", *numbers: int) -> "Any":
    """Return an NVML structure: a pointer to the cgroup's path, then 64-bit numbers.

    The caller keeps the path alive as long as the structure.
    """
    return (clib.c_long * (1 + len(numbers)))(clib.addressof(name), *numbers)


def _enter(root: str) -> None:
    """Change root to a driver root, with the host's cgroups where the driver looks for them."""
    from gpuhook.base.container import isolation  # noqa: PLC0415 - only for such roots

    tree = os.open(TREE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    cgroups = kernel.clone_tree(tree, TREE)
    isolation.own_mounts()
    place = os.open(root + TREE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.attach_mount(cgroups, place, root + TREE)
    for fd in (tree, cgroups, place):
        os.close(fd)
    os.chroot(root)
    os.chdir("/")
