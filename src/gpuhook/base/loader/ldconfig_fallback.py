"""A cache made by the host's ldconfig for an image whose own is damaged: a last resort.

Off unless [gpuhook] ldconfig-fallback is set, because a program of the host then reads
untrusted files. It runs with:

- a sealed copy of itself in memory, which nothing in a container can change or reach; it
  is static, so it loads no loader and no library of the image;
- the container's files as its root, read-only and noexec, in its own mount namespace,
  with an empty /proc, /sys and /dev; network, IPC, UTS, PID and cgroup namespaces are new;
- no environment, no descriptor but the program's and its output's, the ids of the
  container's root user, no capability, and limits on time, memory, files and output.

It can write only to a small tmpfs. gpuhook takes the cache from there, parses it with
its own reader and writes it with its own writer: ldconfig changes nothing in the image.
"""

import os
import resource
import select
import signal

from gpuhook.base.container import isolation, kernel
from gpuhook.base.container.changes import ContainerRootfs
from gpuhook.base.container.rootfs import read_all
from gpuhook.base.errors import ElfError, LdCacheError
from gpuhook.base.host import signals
from gpuhook.base.loader import elf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

TIMEOUT_S = 10.0
_MIB = 1 << 20
RESOURCE_LIMITS = (
    (resource.RLIMIT_CPU, 10),
    (resource.RLIMIT_AS, 2048 * _MIB),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_FSIZE, 16 * _MIB),
    (resource.RLIMIT_CORE, 0),
)
_NAMESPACES = (
    isolation.CLONE_NEWCGROUP
    | isolation.CLONE_NEWUTS
    | isolation.CLONE_NEWIPC
    | isolation.CLONE_NEWPID
    | isolation.CLONE_NEWNET
)
_HARMLESS = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOEXEC
# Folders that engines create in every container; the first existing one takes the result.
_COVERED = ("/dev", "/proc", "/sys")
_RESULT = "ld.so.cache"
_MAX_SAID = 4096


def load(path: str) -> int:
    """Return a descriptor of a sealed copy of the host's program; LdCacheError if unusable."""
    try:
        with open(path, "rb") as file:
            program = file.read(64 * _MIB)
        if elf.loader(program, path):
            raise _unfit(path, "it is not statically linked")
        return isolation.sealed_program("ldconfig", program)
    except ElfError as error:
        raise _unfit(path, error.cause) from None
    except OSError as error:
        raise _unfit(path, str(error)) from None


def _unfit(path: str, why: str) -> LdCacheError:
    return LdCacheError(
        f"The host's ldconfig {path} can't be used: {why}",
        "Set [nvidia-container-cli] ldconfig to a static ldconfig, or ldconfig-fallback to false",
    )


def build(program: int, container: ContainerRootfs) -> bytes:
    """Return the cache that the ``load``-ed ldconfig makes for the container's libraries.

    This process is in the container's mount namespace. LdCacheError gives the reason of a failure.
    """
    user, group = container.owner
    options = {"mode": "0700", "uid": str(user), "gid": str(group), "size": "32m"}
    said = os.memfd_create("ldconfig's words", os.MFD_CLOEXEC)
    output = kernel.new_tmpfs(options, _HARMLESS)
    try:
        pid = isolation.fork(_NAMESPACES)
        if pid == 0:
            _be_ldconfig(program, container.folder("/"), output, said, container.owner)
        status = _wait(pid)
        if status == 0:
            fd = os.open(_RESULT, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=output)
            try:
                return read_all(fd, 16 * _MIB, _RESULT)
            finally:
                os.close(fd)
        raise _failed(_ending(status) + _words(said))
    except OSError as error:
        raise _failed(str(error)) from None
    finally:
        os.close(output)
        os.close(said)


def _failed(why: str) -> LdCacheError:
    return LdCacheError(
        f"/etc/ld.so.cache is damaged, and the host's ldconfig can't create a new one: {why}",
        "Run ldconfig in the image, or delete the file from it",
    )


def _ending(status: int | None) -> str:
    if status is None:
        return f"it took more than {TIMEOUT_S:.0f} seconds"
    if status < 0:
        return f"it was killed by signal {-status}"
    return f"it exited with status {status}"


def _words(said: int) -> str:
    """Return the end of its output: printable, because the image influences it."""
    text = os.pread(said, _MAX_SAID, 0).decode("ascii", "replace").strip()
    line = "".join(c if c.isprintable() else "?" for c in text.rpartition("\n")[2])
    return f" ({line[:200]})" if line else ""


def _wait(pid: int) -> int | None:
    """Return how the process exited, None if it had to be killed."""
    ended = False
    try:
        pidfd = os.pidfd_open(pid)
        try:
            waiting = select.poll()
            waiting.register(pidfd, select.POLLIN)
            ended = bool(waiting.poll(TIMEOUT_S * 1000))
        finally:
            os.close(pidfd)
    finally:
        if not ended:
            signals.send_to_child(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if ended else None


def _be_ldconfig(
    program: int, root: int, output: int, said: int, owner: tuple[int, int]
) -> "NoReturn":
    """Turn this forked process into ldconfig; a failure on the way is its last output."""
    try:
        os.fchdir(root)
        isolation.own_mounts()
        isolation.change_root(isolation.clone_here(_HARMLESS | kernel.MOUNT_ATTR_RDONLY))
        target = _cover(output)
        _keep_only(program, said)
        for limit, value in RESOURCE_LIMITS:
            resource.setrlimit(limit, (value, value))
        isolation.drop_privileges(*owner)
        kernel.die_with_parent()
        argv = ["ldconfig", "-X", "-C", f"{target}/{_RESULT}"]
        os.execve(program, argv, {})  # noqa: S606 - a sealed copy of a program of the host
    except BaseException as error:  # noqa: BLE001 - this process has no caller
        os.write(said, str(error).encode("ascii", "replace"))
    finally:
        os._exit(127)


def _keep_only(program: int, said: int) -> None:
    """Close every descriptor but two close-on-exec ones, and set new standard ones."""
    os.dup2(os.open("/", os.O_RDONLY), 0)
    first, second = sorted((program, said))
    os.closerange(3, first)
    os.closerange(first + 1, second)
    os.closerange(second + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.dup2(said, 1)
    os.dup2(said, 2)


def _cover(output: int) -> str:
    """Mask paths that lead out of the root; return the folder that the output is mounted on."""
    target = ""
    for path in _COVERED:
        try:
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        kernel.attach_mount(_nothing() if target else output, fd, path)
        os.close(fd)
        target = target or path
    if not target:
        raise FileNotFoundError(f"none of {', '.join(_COVERED)} is a folder of the image")
    return target


def _nothing() -> int:
    return kernel.new_tmpfs({"mode": "0555", "size": "4k"}, _HARMLESS | kernel.MOUNT_ATTR_RDONLY)
