"""Readiness notification of a service to systemd; sd_notify(3)."""

import os
import socket


def report_ready() -> None:
    """Report to systemd that the service is ready, if it has asked for that; sd_notify(3)."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.connect(address.replace("@", "\0", 1))
            notify.send(b"READY=1")
