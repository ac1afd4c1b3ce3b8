"""Log messages: errors for the user and for later, and what each container was given.

Environment values are never logged. A failure to write a log never fails a container.
"""

import os
import time

from gpuhook.base.oci import jsontext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.base.config.model import Config

ERRORS, WARNINGS = "errors.log", "warnings.log"
_FULL = 256 << 10
_ERRORS_ALONE = ("panic", "fatal", "error", "warning", "warn")  # log levels


def timestamp() -> str:
    """Return the time as RFC 3339 in UTC, as in runc's JSON log."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def error(program: str, text: str, config: "Config", log_file: str | None = None) -> None:
    """Report why a container was refused: to the user, and with ``keep`` for later.

    The user sees it on stderr or, if the engine passed ``log_file``, in the engine's message.
    """
    if log_file:
        append(log_file, _record(program, text))
    try:
        os.write(2, f"{program}: {text}\n".encode("utf-8", "surrogateescape"))
    except OSError:
        pass  # closed, or full: the logs have the message
    keep(program, text, config)


def warn(program: str, texts: "list[str]", config: "Config") -> None:
    """Write warnings to the debug logs, and for ``gpuhook doctor`` into ``warnings.log``."""
    for text in texts:
        keep(program, text, config, WARNINGS)


def keep(program: str, text: str, config: "Config", name: str = ERRORS) -> None:
    """Save an error or a warning, for when the user was shown nothing.

    crun, and podman at precreate, don't show a hook's messages. They go to the debug logs, if
    configured, and to the file ``name`` in the state folder, for ``gpuhook doctor``. That file
    is truncated when it is full. Nothing is written to a state folder that other users may write
    to: their files could lead elsewhere.
    """
    record = _record(program, text, "error" if name == ERRORS else "warning")
    for debug in {config.cli_debug, config.runtime_debug}:
        append(debug, record)
    path = f"{config.state_dir}/{name}"
    try:
        if not os.path.isdir(config.state_dir):
            os.mkdir(config.state_dir, 0o755)
        folder = os.stat(config.state_dir)
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            return
        if os.path.exists(path) and os.stat(path).st_size > _FULL:
            os.unlink(path)
    except OSError:
        return
    append(path, record, mode=0o600)


def edited(path: str, mode: str, devices: "tuple[str, ...]", config: "Config") -> None:
    """Write to the runtime's debug log that a config.json was changed for these devices."""
    if config.runtime_debug in ("", os.devnull) or config.log_level in _ERRORS_ALONE:
        return
    append(
        config.runtime_debug,
        {
            "level": "info",
            "msg": "edited",
            "time": timestamp(),
            "spec": path,
            "mode": mode,
            "devices": list(devices),
        },
    )


def without(path: str, absent: "tuple[str, ...]", config: "Config") -> None:
    """Write to the debug logs why a container gets none of the devices it requests."""
    _warn("no driver", path, list(absent), config)


def left_out(path: str, sentences: "list[str]", config: "Config") -> None:
    """Write to the debug logs what a container doesn't get."""
    _warn("left out", path, sentences, config)


def _warn(what: str, path: str, sentences: "list[str]", config: "Config") -> None:
    facts = {"level": "warning", "msg": what, "time": timestamp()}
    for debug in {config.cli_debug, config.runtime_debug}:
        append(debug, {**facts, "spec": path, "warnings": sentences})


def _record(program: str, text: str, level: str = "error") -> "dict[str, Any]":
    """Return an error in the form of runc's JSON log."""
    return {"level": level, "msg": f"{program}: {text}", "time": timestamp()}


def append(path: str, record: "dict[str, Any]", *, mode: int = 0o644) -> None:
    """Append one JSON line to a file; failures are ignored."""
    if path in ("", os.devnull):
        return
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        fd = os.open(path, flags, mode)
        try:
            os.write(fd, (jsontext.dumps(record) + "\n").encode())
        finally:
            os.close(fd)
    except OSError:
        return
