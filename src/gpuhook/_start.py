"""Entry point of the launchers: an isolated interpreter without site-packages.

The launcher puts this package on the module path and calls ``main`` with the arguments
runtime|runtime-save|standby|hook|cdi-hook LAUNCHER ARG... ``main`` restores the launcher's
original environment, and calls the program. ``runtime-save`` also saves what the launcher needs.
"""

import gc
import os
import sys

from gpuhook.base import fast_import, names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# Prefix of variables that the launcher hides from the interpreter and the loader.
_HIDDEN = b"GPUHOOK_HIDDEN_"


def caller_environment() -> dict[bytes, bytes]:
    """Return the environment of the launcher's caller.

    Read from the kernel, because Python itself changes its copy (PEP 538 sets LC_CTYPE).
    Source: proc(5), /proc/PID/environ.
    """
    with open("/proc/self/environ", "rb") as file:
        entries = file.read().split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries if entry)
    found = {name: value for name, equals, value in pairs if equals}
    for name in [name for name in found if name.startswith(_HIDDEN)]:
        found[name.removeprefix(_HIDDEN)] = found.pop(name)
    return found


def main() -> "NoReturn":
    """Start the program in the first argument."""
    gc.disable()  # not worthwhile in a process that lives for milliseconds
    program, launcher, *argv = sys.argv[1:]
    umask = os.umask(names.UMASK)
    if program == "hook":
        folder = os.path.dirname(os.path.abspath(launcher))
        os.chdir("/")
        fast_import.load("gpuhook.prestart_hook")
        from gpuhook import prestart_hook  # noqa: PLC0415 - loaded by fast_import

        if argv[-1:] == ["precreate"]:
            prestart_hook.precreate(folder, argv[:-1])
        prestart_hook.main(argv)
    if program == "cdi-hook":
        os.chdir("/")
        fast_import.load("gpuhook.cdi_hook")
        from gpuhook import cdi_hook  # noqa: PLC0415 - as above

        cdi_hook.main(argv)
    if program == "standby":
        os.chdir("/")
        fast_import.load("gpuhook.prefork.supervisor")
        from gpuhook.prefork import supervisor  # noqa: PLC0415 - as above

        supervisor.main(os.path.abspath(launcher), argv)
    fast_import.load("gpuhook.runtime_shim")
    from gpuhook import runtime_shim  # noqa: PLC0415 - as above

    save = program == "runtime-save"
    runtime_shim.main(os.path.abspath(launcher), argv, caller_environment(), umask, save=save)


if __name__ == "__main__":
    main()
