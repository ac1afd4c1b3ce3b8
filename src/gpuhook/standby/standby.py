"""The process that stands ready for the next container, so that no start waits for Python.

After a container with GPUs was created a small process stays, for a minute without work unless
the configuration says otherwise. It has everything imported, and configuration and inventory
loaded (``around``), and a child that is forked ahead. The launcher (launchers/launcher.c) hands it
a bundle; it hands that on to the child (``server``), which edits config.json as the runtime would,
answers with the new one, and is that container's helper from then on (``child``). For the next
question another child is forked.

The process is found by a file that has its process id for a name, in a folder that root alone
may enter. The launcher takes that name for a number and no more: it opens /proc/PID, and checks
there that the process is in the same namespaces and has that very folder and this very launcher
open, before it opens the process' pipes there. Questions come through one pipe, ``DOOR``; for
answers there are many, the ``seats``. Where one ends before an answer, or none comes in time, the
launcher starts Python, as after any answer that isn't a config.json for its own process id.

The process is the child of another, which does nothing but to tidy up after it. If anything is not
as it was when all was loaded, the configuration, the inventory, our own files, the child answers
so, and everything ends.
"""

import _signal  # type: ignore[import-not-found]
import os
import select

from gpuhook.ground import preload
from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import Config
from gpuhook.ground.container import kernel
from gpuhook.ground.errors import GpuhookError
from gpuhook.ground.host import signals
from gpuhook.standby import place, seats
from gpuhook.standby.around import Around
from gpuhook.standby.child import NAME
from gpuhook.standby.seats import LAUNCHER, MARK
from gpuhook.standby.server import Server, poll
from gpuhook.start import contract
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_START = 60  # seconds that it may take to load all, where a driver may have to be asked
_SELDOM, _LAST = 2.0, 5  # as for the process that serves (server), but nobody waits for this one


def main(launcher: str, argv: list[str]) -> "NoReturn":
    """Stand ready until it is time to end; ``argv`` is the option, the lock, and the seconds.

    The seconds are those without work; 0 stands for ever.
    """
    try:
        kernel.end_after(_START)  # protects: stopped-start
        kernel.set_name(NAME)
        place.be_ordinary()  # protects: ordinary
        _signal.signal(_signal.SIGTERM, _end)
        _, lock, seconds = argv
        config = load()
        folder = place.open_folder(config)
        if folder is not None and config.helper and config.standby:
            name = place.lock_name(launcher)
            _arrange(folder, launcher, int(lock))
            if float(seconds):
                place.leave_cgroups()
            try:
                seats.remove_forgotten()
                _import_all(config)
                _stand(Server(Around(config.path, launcher), launcher, float(seconds)))
            finally:
                os.unlink(name, dir_fd=MARK)  # as it was: the launcher may be another one by now
    except (GpuhookError, OSError):
        pass  # the next container goes the ordinary way, and says what is wrong
    finally:
        os._exit(0)


def _end(*_: object) -> "NoReturn":
    raise SystemExit


def _arrange(folder: int, launcher: str, lock: int) -> None:
    """Put the descriptors where children have them, and keep none but those and the lock."""
    program = os.open(launcher, os.O_PATH | os.O_CLOEXEC)
    free = [seats.moved(fd) for fd in (folder, program, lock)]
    os.dup2(free[0], MARK, inheritable=False)
    os.dup2(free[1], LAUNCHER, inheritable=False)
    kernel.keep_only((MARK, LAUNCHER, free[2]))


def _stand(server: Server) -> None:
    """Fork the process that serves, wait for its end, and remove what it leaves.

    It is our child for the rule by which the kernel resumes its own (``Server.run``), too.
    """
    pid = os.fork()
    if pid == 0:
        server.run(os.getppid())
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        while not poll(ended, _SELDOM, _LAST):
            pass
    finally:
        signals.send_to_child(pid, _signal.SIGKILL)
        os.waitpid(pid, 0)
        seats.remove_forgotten()


def _import_all(config: Config) -> None:
    """Import what any container may need, so that no child imports anything any more."""
    known = registry.known(config).values()
    vendors = [
        name for each in known for name in (*preload.vendor(each), *preload.vendor_edits(each))
    ]
    documents = (*preload.DOCUMENTS, *preload.DOCUMENT_HOOK)
    modules = (*preload.RUNTIME, *preload.INJECTION, *documents, *vendors)
    preload.load(modules)
    for name in modules:  # those that weren't compiled
        __import__(f"gpuhook.{name}")
    for each in known:
        for name in contract.load(each).optional_modules(config):
            __import__(name)
    import json.decoder  # noqa: F401, PLC0415

    from gpuhook.ground.cgroup import bpf, device_program, v2  # noqa: F401, PLC0415 - to have them
    from gpuhook.ground.loader import ldconfig_fallback  # noqa: F401, PLC0415
    from gpuhook.ground.oci import lost_bundle, process  # noqa: F401, PLC0415
    from gpuhook.start import dev_char, limiter, limits, verdict  # noqa: F401, PLC0415
    from gpuhook.start.plan import spec_edits  # noqa: F401, PLC0415
    from gpuhook.start.records import claims, engine_names  # noqa: F401, PLC0415
