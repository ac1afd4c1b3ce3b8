"""What gpuhook tells: errors on stderr and in the engine's log, one line a container in ours.

Environment values are never logged. A log that can't be written never fails a container.

Hot path: imports os and time.
"""

import os
import time

from gpuhook import jsontext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ERRORS = "errors.log"
_FULL = 256 << 10


def timestamp() -> str:
    """Return the time as RFC 3339 in UTC, as runc's JSON log has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def error(program: str, text: str, log_file: str | None) -> None:
    """Tell an error to the user: on stderr, and in the log that the engine reads."""
    if log_file:
        append(log_file, {"level": "error", "msg": f"{program}: {text}", "time": timestamp()})
    try:
        os.write(2, f"{program}: {text}\n".encode("utf-8", "surrogateescape"))
    except OSError:
        return  # closed, or full: the log has it


def remember(state_dir: str, program: str, text: str) -> None:
    """Keep an error where ``gpuhook doctor`` finds it: crun shows nobody what a hook says.

    ``errors.log`` in the state folder is begun anew when it is full. Nothing is written to
    a folder that others may write to: what they put there could lead elsewhere.
    """
    path = f"{state_dir}/{ERRORS}"
    try:
        if not os.path.isdir(state_dir):
            os.mkdir(state_dir, 0o755)
        folder = os.stat(state_dir)
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            return
        if os.path.exists(path) and os.stat(path).st_size > _FULL:
            os.unlink(path)
    except OSError:
        return
    append(path, {"level": "error", "msg": f"{program}: {text}", "time": timestamp()}, mode=0o600)


def append(path: str, record: "dict[str, Any]", *, mode: int = 0o644) -> None:
    """Append one JSON line to a file; failing to is no error."""
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
