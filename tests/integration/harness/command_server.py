"""A program that has imported our command line, and carries out commands in children.

usage: python3 -I command_server.py PROGRAM

It reads requests from the socket that is its standard input: JSON (arguments, environment, folder,
the process in whose mount namespace that is) with four descriptors, the command's standard ones and
a socket for the answer. That is sent the child's number at its begin, at its end what waitpid(2)
says of it. ``harness.commands`` asks. The interpreter and its options are those with which the
launcher starts a command.
"""

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import socket
import sys
from typing import Any

_LENGTH = 1 << 20
_CLONE_NEWNS = 0x00020000  # linux/sched.h


def main() -> None:
    """Serve until nobody can ask any more."""
    program = sys.argv[1]
    line = importlib.import_module("gpuhook.tools.cli")
    for module in pkgutil.iter_modules(line.__path__, f"{line.__name__}."):
        importlib.import_module(module.name)
    gc.set_threshold(50_000)  # as the launcher does
    gc.freeze()
    asked = socket.socket(fileno=os.dup(0))
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([asked.fileno(), *running], [], [])
        for ended in ready:
            if ended == asked.fileno():
                request, fds, _, _ = socket.recv_fds(asked, _LENGTH, 4)
                if not request:
                    return
                pid = os.fork()
                if pid == 0:
                    _become(program, json.loads(request), fds)
                    line.main()
                answer = socket.socket(fileno=fds[3])
                answer.send(b"%d" % pid)
                running[os.pidfd_open(pid)] = pid, answer
                for fd in fds[:3]:
                    os.close(fd)
            else:
                pid, answer = running.pop(ended)
                os.close(ended)
                answer.send(b"%d" % os.waitpid(pid, 0)[1])
                answer.close()


def _become(program: str, request: Any, fds: list[int]) -> None:
    """Let this process have what a command would have been started with."""
    words, environment, folder, process = request
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, 1 << 16)
    sys.argv = [program, *words]
    os.environ.clear()
    os.environ.update(environment)
    if process != "self":
        namespace = os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), f"setns to the namespace of {process}")
        os.close(namespace)
    os.chdir(folder)


if __name__ == "__main__":
    main()
