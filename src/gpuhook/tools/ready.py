"""Report to systemd, which started a service, that it is ready; sd_notify(3)."""

import os
import socket


def report_ready() -> None:
    """Tell systemd, where it has asked for that, that the first look is over; sd_notify(3)."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.connect(address.replace("@", "\0", 1))
            notify.send(b"READY=1")
