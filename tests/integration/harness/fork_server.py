"""A server that has imported modules, and runs Python code in children, as ``python3 -c`` does.

usage: python3 fork_server.py MODULE...

If MODULE is a package, all its modules are imported. The server reads requests from the socket
that is its standard input. A request is JSON: code, sys.argv, environment, folder, the process
whose mount namespace has this folder, and whether the child is a daemon. It comes with four
descriptors: the child's standard ones, and a socket for the answer. The server first sends the
child's process id to this socket, and at the end the child's status from waitpid(2).
``harness.forked`` is the client.
"""

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import sys
from typing import Any

_LENGTH = 1 << 20
_CLONE_NEWNS = 0x00020000  # linux/sched.h
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve requests until no client is left."""
    for name in sys.argv[1:]:
        found = importlib.import_module(name)
        for module in pkgutil.iter_modules(getattr(found, "__path__", ()), f"{name}."):
            importlib.import_module(module.name)
    gc.set_threshold(50_000)  # as the launcher of commands does
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
                    code = _become(json.loads(request), fds)
                    exec(code, {"__name__": "__main__"})  # noqa: S102 - as python3 -c does
                    return
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


def _become(request: Any, fds: list[int]) -> str:
    """Set this process up as the request describes; return the code to run."""
    code, words, environment, folder, process, is_daemon = request
    libc = ctypes.CDLL(None, use_errno=True)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, 1 << 16)
    sys.argv = words
    os.environ.clear()
    os.environ.update(environment)
    if is_daemon:
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if process != "self":
        namespace = os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY)
        if libc.setns(namespace, _CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), f"setns to the namespace of {process}")
        os.close(namespace)
    os.chdir(folder)
    return str(code)


if __name__ == "__main__":
    main()
