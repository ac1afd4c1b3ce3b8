"""The kernel's events about devices, from a bare socket.

``tools.watch`` has pyroute2 for that, which costs more memory than all the rest of a supervisor.
Source: netlink(7), lib/kobject_uevent.c of the kernel.
"""

import socket
from collections.abc import Iterator

from gpuhook.tools.vendors.uevents import Event

_KOBJECT_UEVENT = 15  # include/uapi/linux/netlink.h
_KERNEL_GROUP = 1
_MOST = 1 << 13  # bytes; the kernel's buffer for one is of 2 KiB


class KernelEvents:
    """What the kernel says of devices, as it comes."""

    def __init__(self) -> None:
        """Begin to listen; OSError where this process may not."""
        flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, flags, _KOBJECT_UEVENT)
        try:
            self._socket.bind((0, _KERNEL_GROUP))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    def read(self) -> Iterator[Event]:
        """Yield the events that have come."""
        while True:
            try:
                data, (sender, _) = self._socket.recvfrom(_MOST)
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: more came than the buffer holds
                yield {}
                continue
            if sender == 0:  # the kernel, and no process
                yield parse(data)


def parse(data: bytes) -> Event:
    """Return an event's variables; it is ACTION@PATH, and then NAME=VALUE, each with a zero."""
    lines = data.decode("utf-8", "replace").split("\0")
    return dict(line.split("=", 1) for line in lines[1:] if "=" in line)
