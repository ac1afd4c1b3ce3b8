"""NVML kept open to set memory limits, so that no container waits for nvmlInit.

It runs in a child of the prefork server, started after a container had a limit. Like the child of
one container (``nvml_limiter``) it keeps root's rights, because NVML requires them, and has no
descriptors except its own. It exits with the server, and some time after the last container with a
limit, because a driver in use can't be unloaded.

Queries come through a socket that only the server and its children have; each query passes the
pipe for its response. Without success in time, the container's hook worker starts NVML itself.
"""

import _socket
import fcntl
import os
import select
import sys
import time

from gpuhook.base.container import kernel
from gpuhook.base.errors import MemoryLimitError
from gpuhook.base.host import signals
from gpuhook.base.oci import jsontext
from gpuhook.vendors.nvidia import nvml_limiter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.base.config.model import Config
    from gpuhook.core.inventory.model import Inventory
    from gpuhook.core.memory_limiter import Bytes

_KEPT = 60.0  # seconds after the last container with a limit
_PATIENCE = 1.0  # seconds for a response
_BEAT = 1.0  # seconds between two extensions of its deadline
_END = 3  # seconds of the deadline, after which the kernel kills it
_MOST = 1 << 16  # bytes of a query
_FREE = 16  # the first descriptor that no other part uses (``prefork``)
_WORD = 4  # bytes of a descriptor number
_YES, _NO = b"y", b"n"


class NvmlSession:
    """The child with NVML, if there is one: managed by its parent, queried by its siblings."""

    def __init__(self, poll: "select.poll") -> None:
        """Take the poll object of the parent's event loop."""
        self._poll = poll
        self._pid = self._news = 0
        self._until = 0.0
        self._key = "", ""
        self._socket: _socket.socket | None = None

    def keep(self, inventory: "Inventory | None", config: "Config") -> None:
        """Start the child, after a container had a limit. Failures are ignored."""
        self._until = time.monotonic() + _KEPT
        if self._pid or inventory is None:
            return
        try:
            self._key = inventory.root, nvml_limiter.library_of(inventory)
            self._start(int(config.nvml_timeout))
        except (MemoryLimitError, OSError):  # the next container reports the problem
            return
        self._poll.register(self._news, select.POLLIN)

    def _start(self, patience: int) -> None:
        kind = _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, kind)
        news, telling = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run(parent, theirs, telling, self._key, patience)
        theirs.close()
        os.close(telling)
        # To a number that the children with queries don't use themselves.
        moved = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _FREE)
        ours.close()
        self._pid, self._news, self._socket = pid, news, _socket.socket(fileno=moved)

    def hear(self, descriptor: int) -> bool:
        """Handle that NVML is ready, or the child has exited; False for other descriptors."""
        if not self._pid or descriptor != self._news:
            return False
        if os.read(self._news, 1):
            nvml_limiter.kept = self.ask
            return True
        nvml_limiter.kept = None
        self._poll.unregister(self._news)
        os.close(self._news)
        self.forget()
        os.waitpid(self._pid, 0)
        self._pid = 0
        return True

    def end_in_time(self) -> None:
        """Kill the child if there were no limits for long enough; ``hear`` reaps it."""
        if self._pid and time.monotonic() >= self._until:
            nvml_limiter.kept = None
            signals.send_to_child(self._pid, nvml_limiter.SIGKILL)

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that a process needs for queries."""
        return () if self._socket is None else (self._socket.fileno(),)

    def forget(self) -> None:
        """Close the socket for queries."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def ask(self, key: tuple[str, str], folder: str, wanted: "Bytes") -> bool:
        """Set limits for a cgroup; return whether that succeeded. Called in the parent's children.

        ``key`` is driver root and library, which have to be those of the child.
        """
        if key != self._key or self._socket is None:  # protects: ready-driver
            return False
        reader, writer = os.pipe2(os.O_CLOEXEC)
        question = jsontext.dumps({"folder": folder, "wanted": dict(wanted)}).encode()
        number = writer.to_bytes(_WORD, sys.byteorder)
        pipe = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, number)
        try:
            self._socket.sendmsg([question], [pipe], _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL)
            os.close(writer)
            writer = -1
            happened = select.select([reader], [], [], _PATIENCE)[0]
            return bool(happened) and os.read(reader, 1) == _YES  # protects: ready-yes
        except OSError:  # it has exited, or its queue is full
            return False
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)


# In the child -------------------------------------------------------------------------------


def _run(
    parent: int, socket: _socket.socket, telling: int, key: tuple[str, str], patience: int
) -> "NoReturn":
    """Answer queries until the parent exits; never return into its code."""
    try:
        kernel.keep_only((socket.fileno(), telling))
        kernel.end_after(max(patience, 1))  # 0 would be no deadline
        kernel.die_with_parent()
        if os.getppid() == parent:
            setter = nvml_limiter.Setter(*key)
            kernel.end_after(_END)
            os.write(telling, _YES)
            while True:
                _answer(socket, setter)
    finally:
        os._exit(1)


def _answer(socket: _socket.socket, setter: nvml_limiter.Setter) -> None:
    """Wait for a query, and answer it."""
    happened = select.select([socket.fileno()], [], [], _BEAT)[0]
    kernel.end_after(_END)
    if not happened:
        return
    data, ancillary, _, _ = socket.recvmsg(_MOST, 64)
    pipes = [int.from_bytes(each[:_WORD], sys.byteorder) for _, _, each in ancillary]
    if not data or len(pipes) != 1:
        raise OSError("this is not a query")
    question = jsontext.loads(data.decode())
    done = _YES
    try:
        for uuid, limit in question["wanted"].items():
            setter.limit(uuid, question["folder"], limit)
    except (AttributeError, nvml_limiter.NvmlError):
        done = _NO
    try:
        os.write(pipes[0], done)
    except OSError:  # the caller has timed out
        pass
    os.close(pipes[0])
