"""Steps of a command for `gpuhook --debug`: the files, programs and sockets it uses, with times.

They come from Python's audit events, so no command has to report anything. Values of environment
variables and contents of files aren't among them.
"""

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpuhook.base.errors import printable

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Python's own files, which are opened by imports.
_PYTHON = (".py", ".pyc", ".so", ".pth", "/site-packages")


def start() -> None:
    """Print each further step of this process and its children to standard error."""
    began = time.monotonic()
    us = os.getpid()
    busy = False

    def hear(event: str, details: tuple[Any, ...]) -> None:
        nonlocal busy
        describe = _STEPS.get(event)
        if describe is None or busy:
            return
        busy = True
        try:
            words = describe(details)
            if words:
                child = "" if os.getpid() == us else f" [{os.getpid()}]"
                line = f"gpuhook: {time.monotonic() - began:8.3f} s{child}: {printable(words)}\n"
                os.write(2, line.encode("utf-8", "surrogateescape"))
        except Exception:  # noqa: BLE001, S110 - a step that can't be described stops no command
            pass
        finally:
            busy = False

    sys.addaudithook(hear)
    hear("gpuhook.begins", ())


def _text(path: object) -> str:
    return f"descriptor {path}" if isinstance(path, int) else os.fsdecode(path)  # type: ignore[arg-type]


def _opens(details: tuple[Any, ...]) -> str:
    path, mode, flags = details
    text = _text(path)
    if isinstance(path, int) or text.endswith(_PYTHON) or text.startswith(sys.prefix + "/"):
        return ""
    writes = flags & _WRITES if isinstance(flags, int) else set(mode or "") & set("wax+")
    return f"{'writes' if writes else 'reads'} {text}"


def _runs(program: object, words: Sequence[Any]) -> str:
    argv = [os.fsdecode(word) for word in words] or [_text(program)]
    return f"runs {shlex.join(argv)}"


def _connects(details: tuple[Any, ...]) -> str:
    address = details[1]
    if isinstance(address, tuple):
        return f"connects to {address[0]} port {address[1]}"
    return f"connects to {_text(address)}"


def _changes(verb: str) -> Callable[[tuple[Any, ...]], str]:
    def describe(details: tuple[Any, ...]) -> str:
        return f"{verb} {_text(details[0])}"

    return describe


_STEPS: dict[str, Callable[[tuple[Any, ...]], str]] = {
    "gpuhook.begins": lambda _: (
        f"runs {shlex.join(sys.argv)} with Python {platform.python_version()}"
    ),
    "open": _opens,
    "os.listdir": _changes("lists"),
    "os.scandir": _changes("lists"),
    "subprocess.Popen": lambda details: _runs(details[0], details[1]),
    "os.posix_spawn": lambda details: _runs(details[0], details[1]),
    "os.exec": lambda details: _runs(details[0], details[1]),
    "os.fork": lambda _: "starts a child",
    "os.kill": lambda details: f"sends signal {details[1]} to process {details[0]}",
    "socket.connect": _connects,
    "os.mkdir": _changes("creates"),
    "os.remove": _changes("removes"),
    "os.rmdir": _changes("removes"),
    "os.rename": lambda details: f"renames {_text(details[0])} to {_text(details[1])}",
    "os.symlink": lambda details: f"links {_text(details[1])} to {_text(details[0])}",
    "os.chmod": _changes("changes the mode of"),
    "os.chown": _changes("changes the owner of"),
}
