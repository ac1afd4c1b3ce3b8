"""Entry point and supervisor of the prefork server, which saves starts the wait for Python.

After a container with GPUs was created, a small server keeps running: for a minute without work,
unless the configuration says otherwise. It has imported all modules, loaded configuration and
inventory (``snapshot``), and forked a spare worker. The launcher (launchers/launcher.c) sends it a
bundle; the server passes that to the worker (``server``). The worker edits config.json as
``runtime_shim`` would, responds with the new one, and then is that container's hook worker
(``worker``). The server forks another spare worker for the next request.

A file named after its process id, in a folder that only root may enter, leads to the server. The
launcher takes that name only as a number: it opens /proc/PID and checks that the process is in the
same namespaces and has that folder and this launcher open, before it opens the pipes there.
Requests come through one pipe (``REQUEST_PIPE``), responses go through many (``slots``). If a pipe
ends before a response, or none comes in time, the launcher asks another server, then starts Python,
as after any response that isn't a config.json for its own process id.

The supervisor is the server's parent and only cleans up after it. If configuration, inventory or
our own files have changed since they were loaded, a worker or the server notices, and all exit.
"""

import _signal  # type: ignore[import-not-found]
import os
import select

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.container import kernel
from gpuhook.base.errors import GpuhookError
from gpuhook.base.host import signals
from gpuhook.core import contract
from gpuhook.prefork import instance, slots
from gpuhook.prefork.server import Server, poll
from gpuhook.prefork.slots import FOLDER_FD, LAUNCHER
from gpuhook.prefork.snapshot import LoadedState
from gpuhook.prefork.worker import NAME
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_START = 60  # seconds for loading everything; a driver may have to be queried
# Seconds between timer renewals, and until the kernel kills the supervisor. No start waits for it.
_RENEWAL, _TIMER = 2.0, 5


def main(launcher: str, argv: list[str]) -> "NoReturn":
    """Run the prefork server until it ends; ``argv`` is the option, the lock, and the seconds.

    The server ends after that many seconds without a request; 0 means never.
    """
    try:
        kernel.end_after(_START)  # protects: stopped-start
        kernel.set_name(NAME)
        instance.reset_process_attributes()  # protects: ordinary
        _signal.signal(_signal.SIGTERM, _end)
        _, lock, seconds = argv
        config = load()
        folder = instance.open_folder(config)
        if folder is not None and config.helper and config.standby:
            name = instance.lock_name(launcher)
            _place_descriptors(folder.fd, launcher, int(lock))
            if float(seconds):
                instance.leave_caller_cgroups()
            try:
                slots.remove_forgotten()
                _import_all(config)
                _supervise(Server(LoadedState(config.path, launcher), launcher, float(seconds)))
            finally:
                os.unlink(name, dir_fd=FOLDER_FD)  # the launcher may have been replaced
    except (GpuhookError, OSError):
        pass  # the next container's start is a cold one, and reports the error
    finally:
        os._exit(0)


def _end(*_: object) -> "NoReturn":
    raise SystemExit


def _place_descriptors(folder: int, launcher: str, lock: int) -> None:
    """Move the descriptors to the numbers that workers expect; close all others but the lock."""
    program = os.open(launcher, os.O_PATH | os.O_CLOEXEC)
    free = [slots.moved(fd) for fd in (folder, program, lock)]
    os.dup2(free[0], FOLDER_FD, inheritable=False)
    os.dup2(free[1], LAUNCHER, inheritable=False)
    kernel.keep_only((FOLDER_FD, LAUNCHER, free[2]))


def _supervise(server: Server) -> None:
    """Fork the server, wait for its end, and remove the files that it leaves behind.

    The server must be our child, so that the kernel resumes stopped workers (``Server.run``).
    """
    pid = os.fork()
    if pid == 0:
        server.run(os.getppid())
    try:
        exited = select.poll()
        exited.register(os.pidfd_open(pid), select.POLLIN)
        while not poll(exited, _RENEWAL, _TIMER):
            pass
    finally:
        signals.send_to_child(pid, _signal.SIGKILL)
        os.waitpid(pid, 0)
        slots.remove_forgotten()


def _import_all(config: Config) -> None:
    """Import all modules that a container may need, so that no worker imports any."""
    vendors = registry.all_vendors(config).values()
    for vendor in map(contract.load, vendors):
        vendor.import_hook_modules()
        for name in vendor.optional_modules(config):
            __import__(name)
    import json.decoder  # noqa: F401, PLC0415 - for workers, as all that follows

    from gpuhook import cdi_hook, inject  # noqa: F401, PLC0415
    from gpuhook.base.cgroup import bpf, device_program, v2  # noqa: F401, PLC0415
    from gpuhook.base.host import lock  # noqa: F401, PLC0415
    from gpuhook.base.loader import ldconfig_fallback  # noqa: F401, PLC0415
    from gpuhook.base.oci import lost_bundle, process  # noqa: F401, PLC0415
    from gpuhook.core import dev_char, edit, memory_limiter, memory_limits, resource_limits, verdict  # noqa: F401, PLC0415
    from gpuhook.core.cdi import apply, hook, parse_cache, worker_mounts  # noqa: F401, PLC0415
    from gpuhook.core.plan import spec_edits  # noqa: F401, PLC0415
    from gpuhook.core.records import engine_names, exclusive_request  # noqa: F401, PLC0415
