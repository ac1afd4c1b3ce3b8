"""NVML that is kept ready to limit memory, so that no container waits for a driver to start.

It is in a child of the process that stands ready, made after a container had a limit. As the child
of one container (``limits``) it keeps root's rights, because NVML demands them, and has no
descriptor but its own. It ends with that process, and some time after the last container with a
limit, because no driver can be unloaded that is in use.

It is asked through a socket that only that process and its children have; a question brings the
pipe for its answer. After anything but a yes in time the container's helper goes its own way.
"""

import _socket
import fcntl
import os
import select
import sys
import time

from gpuhook.ground.container import kernel
from gpuhook.ground.errors import LimitError
from gpuhook.ground.host import signals
from gpuhook.ground.oci import jsontext
from gpuhook.vendors.nvidia import limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.ground.config.model import Config
    from gpuhook.start.inventory.model import Inventory
    from gpuhook.start.limiter import Bytes

_KEPT = 60.0  # seconds after the last container with a limit
_PATIENCE = 1.0  # seconds that an answer may take
_BEAT = 1.0  # seconds after which it puts off its end again
_END = 3  # seconds after which the kernel kills what doesn't
_MOST = 1 << 16  # bytes of a question
_FREE = 16  # the first descriptor that is in nobody's way (``standby``)
_WORD = 4  # bytes of a descriptor's number
_YES, _NO = b"y", b"n"


class ReadyNvml:
    """The child, if there is one: its parent keeps it, and that one's further children ask it."""

    def __init__(self, poll: "select.poll") -> None:
        """Take what its parent waits with for something to happen."""
        self._poll = poll
        self._pid = self._news = 0
        self._until = 0.0
        self._key = "", ""
        self._socket: _socket.socket | None = None

    def keep(self, inventory: "Inventory | None", config: "Config") -> None:
        """Have it ready, now that a container has had its limits. Where it can't be, it isn't."""
        self._until = time.monotonic() + _KEPT
        if self._pid or inventory is None:
            return
        try:
            self._key = inventory.root, limits.library_of(inventory)
            self._start(int(config.nvml_timeout))
        except (LimitError, OSError):  # the next container says what is wrong
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
        # Where no child that asks has a descriptor of its own.
        moved = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _FREE)
        ours.close()
        self._pid, self._news, self._socket = pid, news, _socket.socket(fileno=moved)

    def hear(self, descriptor: int) -> bool:
        """Take in that NVML is ready, or that the child has ended; False: it's somebody else's."""
        if not self._pid or descriptor != self._news:
            return False
        if os.read(self._news, 1):
            limits.kept = self.ask
            return True
        limits.kept = None
        self._poll.unregister(self._news)
        os.close(self._news)
        self.forget()
        os.waitpid(self._pid, 0)
        self._pid = 0
        return True

    def end_in_time(self) -> None:
        """End the child if there were no limits for long enough; ``hear`` has the rest."""
        if self._pid and time.monotonic() >= self._until:
            limits.kept = None
            signals.send_to_child(self._pid, limits.SIGKILL)

    def descriptors(self) -> tuple[int, ...]:
        """Return what a process has to hold that may ask."""
        return () if self._socket is None else (self._socket.fileno(),)

    def forget(self) -> None:
        """Have no way to ask any more."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def ask(self, key: tuple[str, str], folder: str, wanted: "Bytes") -> bool:
        """Have it set limits for a cgroup; tell whether that is done. For children of the parent.

        ``key`` are driver root and library: it has to be the driver that is meant.
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
        except OSError:  # it has ended, or has too many questions
            return False
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)


# In the child -------------------------------------------------------------------------------


def _run(
    parent: int, socket: _socket.socket, telling: int, key: tuple[str, str], patience: int
) -> "NoReturn":
    """Answer until the parent ends, whatever happens; never return into its code."""
    try:
        kernel.keep_only((socket.fileno(), telling))
        kernel.end_after(max(patience, 1))  # 0 would be no end
        kernel.die_with_parent()
        if os.getppid() == parent:
            setter = limits.Setter(*key)
            kernel.end_after(_END)
            os.write(telling, _YES)
            while True:
                _answer(socket, setter)
    finally:
        os._exit(1)


def _answer(socket: _socket.socket, setter: limits.Setter) -> None:
    """Wait for a question, and deal with it."""
    happened = select.select([socket.fileno()], [], [], _BEAT)[0]
    kernel.end_after(_END)
    if not happened:
        return
    data, beside, _, _ = socket.recvmsg(_MOST, 64)
    pipes = [int.from_bytes(each[:_WORD], sys.byteorder) for _, _, each in beside]
    if not data or len(pipes) != 1:
        raise OSError("this is no question")
    question = jsontext.loads(data.decode())
    done = _YES
    try:
        for uuid, limit in question["wanted"].items():
            setter.limit(uuid, question["folder"], limit)
    except (AttributeError, limits.NvmlError):
        done = _NO
    try:
        os.write(pipes[0], done)
    except OSError:  # whoever asked has waited long enough
        pass
    os.close(pipes[0])
