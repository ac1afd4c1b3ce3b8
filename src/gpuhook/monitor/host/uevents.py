"""The kernel's events about devices. Source: netlink(7), lib/kobject_uevent.c of the kernel."""

import errno
import socket
from collections.abc import Iterator, Mapping

Event = Mapping[str, object]

GROUP = 1  # the kernel's, not udev's, whose messages have a binary head
_KOBJECT_UEVENT = 15  # include/uapi/linux/netlink.h
_KERNEL = 0  # the kernel's port as a sender
_MOST = 1 << 16  # bytes of an event; the kernel has 2 KiB for its variables


def listen() -> socket.socket:
    """Return a socket that receives events; OSError if this process isn't permitted to."""
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _KOBJECT_UEVENT)
    try:
        made.bind((0, GROUP))
    except OSError:
        made.close()
        raise
    return made


def parse(data: bytes) -> Iterator[Event]:
    """Yield an event's variables; its form is ACTION@PATH, then NAME=VALUE, each NUL-terminated."""
    lines = data.decode("utf-8", "replace").split("\0")
    yield dict(line.split("=", 1) for line in lines[1:] if "=" in line)


class KernelEvents:
    """A reader of the kernel's device events from a socket of its multicast group."""

    def __init__(self, source: socket.socket) -> None:
        self._socket = source
        source.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def read(self) -> Iterator[Event]:
        """Yield the received events, and an empty one for lost events."""
        while True:
            try:
                data, (sender, _) = self._socket.recvfrom(_MOST)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # more came than the buffer holds
                    raise
                yield {}
                continue
            if sender == _KERNEL:  # and no process
                yield from parse(data)
