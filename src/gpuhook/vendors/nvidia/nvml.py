"""GPU discovery with NVML, through pynvml, in an isolated child process.

NVML runs vendor code that may hang, crash, change device files or start programs. So it runs in a
child with a deadline and without privileges, below the driver root (chroot) if that isn't /. Its
response is read over a pipe.

pynvml takes 20 ms to import and is only imported in the child.
"""

import os
import select
import time

from gpuhook.base.cgroup.access import in_first_user_namespace
from gpuhook.base.container import kernel
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.base.fileio import write_all
from gpuhook.base.host import signals
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.jsontext import Record
from gpuhook.vendors.nvidia.model import Gpu, Mig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# nvmlBrandType_t in nvml.h, with the names that NVIDIA's tools print.
_BRANDS = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "GRID",
    5: "GeForce",
    6: "TITAN",
    7: "VApps",
    8: "VPC",
    9: "VCS",
    10: "VWS",
    11: "CloudGaming",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}

# nvmlReturn_t in nvml.h -> remedy.
_REMEDIES = {
    4: "Give the configured user ([nvidia-container-cli] user) access to the driver's device nodes",
    9: "Load the driver (modprobe nvidia) and make nvidia-smi work on the host first",
    12: "Install the driver's libraries below the driver root, which gpuhook doctor names",
    18: "The libraries were upgraded under the loaded kernel module: reload it or reboot",
    999: "Check that /dev/nvidiactl can be opened and that nvidia-smi works on the host",
}
_DEFAULT_REMEDY = "Make nvidia-smi work on the host first"
_NOT_SUPPORTED = 3
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16
_UNKNOWN = 999  # also of a GPU that has failed, while the others respond
_NOT_LOADED = 9

_NOBODY = 65534  # the kernel's overflowuid and overflowgid
# Needed by libnvidia-ml.so.1; a separate driver root may contain no C library.
_PRELOAD = ("libm.so.6", "librt.so.1", "libpthread.so.0", "libdl.so.2")
_MAX_ANSWER = 16 << 20
_SIGKILL = 9
# A child that can't be killed, because it hangs in the driver, is left to init.
_REAP_SECONDS = 0.5
_SPARE_SECONDS = 5


class NvmlResponse(Record):
    """NVML's response: versions, the GPUs, and the indices of lost GPUs."""

    driver_version: str
    cuda_version: str
    gpus: tuple[Gpu, ...]
    lost: tuple[int, ...]


def ask(root: str, library: str, user: str, timeout: float) -> NvmlResponse:
    """Query versions and GPUs from the NVML at ``library``, a path below the driver root.

    ``user`` is the name or number to run as ("" for nobody), with an optional :group;
    ``timeout`` is in seconds. Raises DriverError when NVML fails, crashes or is too slow.
    """
    answer = query(root, library, user, timeout, _everything)
    return NvmlResponse(
        answer["driver_version"],
        answer["cuda_version"],
        tuple(Gpu.from_json(gpu) for gpu in answer["gpus"]),
        tuple(answer["lost"]),
    )


def query(
    root: str,
    library: str,
    user: str,
    timeout: float,
    question: "Callable[[Any], dict[str, Any]]",
) -> "dict[str, Any]":
    """Return the result of ``question``, which is called in the child with pynvml.

    The result consists of JSON values. Other arguments and exceptions are those of ``ask``.
    """
    uid, gid = ids(user)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _child(
            writer,
            int(timeout) + _SPARE_SECONDS,
            lambda: _answer(root, library, uid, gid, question),
        )
    os.close(writer)
    try:
        data = _read_until(reader, time.monotonic() + timeout)
    finally:
        os.close(reader)
        # It has responded and is exiting, or will never respond.
        signals.send_to_child(child, _SIGKILL)
        status = kernel.reap(child, _REAP_SECONDS)
    if data is None:
        raise DriverError(
            f"NVML didn't answer within {timeout:g} seconds",
            "Enable persistence mode (nvidia-smi -pm 1), or raise nvml-timeout in config.toml",
        )
    return _decode(data, _SIGKILL if status is None else status, root)


def ids(user: str) -> tuple[int, int]:
    """Return the user and group to run NVML as; DriverError if there is no such user."""
    if not user:
        return _NOBODY, _NOBODY
    name, _, group = user.partition(":")
    try:
        if name.isdecimal() and group:
            return int(name), _group(group)  # needs no passwd entry: enroot's users may have none
        uid, gid = _user(name)
        return uid, _group(group) if group else gid
    except KeyError:
        raise DriverError(
            f"The user {user!r} to run NVML as doesn't exist",
            "Correct [nvidia-container-cli] user in config.toml",
        ) from None


def _user(name: str) -> tuple[int, int]:
    import pwd  # noqa: PLC0415 - only where a user is configured

    entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    return entry.pw_uid, entry.pw_gid


def _group(name: str) -> int:
    import grp  # noqa: PLC0415 - only where a group is configured

    return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid


def _read_until(fd: int, deadline: float) -> bytes | None:
    chunks: list[bytes] = []
    size = 0
    while size <= _MAX_ANSWER:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return None
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


def _decode(data: bytes, status: int, root: str) -> "dict[str, Any]":
    try:
        answer: dict[str, Any] = jsontext.loads(data.decode())
    except ValueError:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no answer"
        raise DriverError(
            f"NVML ended with {how} instead of listing the GPUs",
            "Make nvidia-smi work on the host first",
        ) from None
    if "error" in answer:
        number = answer["number"]
        remedy = _REMEDIES.get(number, _DEFAULT_REMEDY)
        if number == _NOT_LOADED and root != "/":
            remedy += (
                f"; if {root} is a folder of files, without /dev and /proc, it is no driver root: "
                "name its libraries' folder in gpuhook.library-search-paths"
            )
        kind = NoDriverError if number == _NOT_LOADED else DriverError
        raise kind(f"NVML failed: {answer['error'].rstrip('.')}", remedy)
    return answer


# In the child -------------------------------------------------------------------------------


def _child(writer: int, seconds: int, answer: "Callable[[], dict[str, Any]]") -> "NoReturn":
    """Write the response to the pipe and exit in any case."""
    status = 1
    try:
        kernel.keep_only((writer,))  # without the parent's lock and its engine's pipes
        kernel.end_after(seconds)
        try:
            said = answer()
        except Exception as error:  # noqa: BLE001 - reported to the parent
            said = _reason(error)
        write_all(writer, jsontext.dumps(said).encode())
        status = 0
    finally:
        os._exit(status)


def _answer(
    root: str, library: str, uid: int, gid: int, question: "Callable[[Any], dict[str, Any]]"
) -> "dict[str, Any]":
    try:
        pynvml = start(root, library, uid, gid)
    except OSError as error:
        return {"error": f"{library} can't be loaded: {error}", "number": 12}
    try:
        pynvml.nvmlInit()
        return question(pynvml)
    except pynvml.NVMLError as error:
        return {"error": str(error), "number": error.value}


def _reason(error: Exception) -> "dict[str, Any]":
    return {"error": f"{type(error).__name__}: {error}", "number": 0}


def start(root: str, library: str, uid: int, gid: int) -> "Any":
    """Return pynvml with this NVML loaded and all privileges dropped; OSError on failure."""
    import pynvml  # noqa: PLC0415 - 20 ms, and only in a child

    pynvml.nvmlLib = _load(root, library, uid, gid)
    return pynvml


def _load(root: str, library: str, uid: int, gid: int) -> "Any":
    """Load NVML with the least privileges that it needs; OSError on failure."""
    import ctypes  # noqa: PLC0415 - pynvml imports it anyway

    rootless = not in_first_user_namespace()  # checked before chroot, while /proc is the host's
    if root == "/" or os.geteuid() != 0:
        loaded = ctypes.CDLL(root.rstrip("/") + library)
        kernel.give_up_root(uid, gid, rootless=rootless)
        return loaded
    for name in _PRELOAD:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue  # newer C libraries have merged some of them
    os.chroot(root)
    os.chdir("/")
    kernel.give_up_root(uid, gid, rootless=rootless)
    return ctypes.CDLL(library)


def _everything(nvml: "Any") -> "dict[str, Any]":
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    gpus, lost = [], {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_gpu(nvml, index, handle).to_json())
        except nvml.NVMLError as error:
            if error.value not in (_GPU_IS_LOST, _RESET_REQUIRED, _UNKNOWN):
                raise
            lost[index] = error
    unknown = [error for error in lost.values() if error.value == _UNKNOWN]
    if unknown and not gpus:  # not one GPU, but the driver or the access to it
        raise unknown[0]
    return {
        "driver_version": text_of(nvml.nvmlSystemGetDriverVersion()),
        "cuda_version": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": gpus,
        "lost": [*lost],
    }


def _gpu(nvml: "Any", index: int, handle: "Any") -> Gpu:
    """Return a GPU; WSL2 has no minors (-1), and Tegra's NVML lacks some functions."""
    capability = _supported(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle, ())
    brand = _supported(nvml, nvml.nvmlDeviceGetBrand, handle, 0)
    mig_enabled = _mig_enabled(nvml, handle)
    return Gpu(
        index=index,
        minor=_supported(nvml, nvml.nvmlDeviceGetMinorNumber, handle, -1),
        uuid=text_of(nvml.nvmlDeviceGetUUID(handle)),
        pci_bus_id=text_of(_supported(nvml, _bus_id(nvml), handle, "")).upper(),
        name=text_of(nvml.nvmlDeviceGetName(handle)),
        architecture=".".join(map(str, capability)),
        brand=_BRANDS.get(brand, "Unknown"),
        mig_enabled=mig_enabled,
        mig=tuple(_mig(nvml, handle)) if mig_enabled else (),
        memory=_supported(nvml, lambda asked: nvml.nvmlDeviceGetMemoryInfo(asked).total, handle, 0),
    )


def _bus_id(nvml: "Any") -> "Callable[[Any], str | bytes]":
    return lambda handle: nvml.nvmlDeviceGetPciInfo(handle).busId


def _supported(nvml: "Any", ask: "Callable[[Any], Any]", handle: "Any", default: "Any") -> "Any":
    """Return a value of a GPU from NVML, ``default`` if the platform doesn't support it."""
    try:
        return ask(handle)
    except nvml.NVMLError as error:
        if error.value != _NOT_SUPPORTED:
            raise
        return default


def _mig_enabled(nvml: "Any", handle: "Any") -> bool:
    try:
        current: int = nvml.nvmlDeviceGetMigMode(handle)[0]
    except nvml.NVMLError:
        return False  # not a GPU with MIG
    return current == 1


def _mig(nvml: "Any", parent: "Any") -> list[Mig]:
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
        except nvml.NVMLError:
            continue  # no MIG device at this index; a later one may exist
        found.append(
            Mig(
                index=index,
                uuid=text_of(nvml.nvmlDeviceGetUUID(handle)),
                gi=nvml.nvmlDeviceGetGpuInstanceId(handle),
                ci=nvml.nvmlDeviceGetComputeInstanceId(handle),
                name=text_of(nvml.nvmlDeviceGetName(handle)),
                gi_cap=None,
                ci_cap=None,
            )
        )
    return found


def text_of(value: "str | bytes") -> str:
    """Return a text from NVML; older versions of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else value
