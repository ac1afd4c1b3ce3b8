"""What gpuhook tells: errors on stderr and in the engine's log, one line a container in ours.

Environment values are never logged. A log that can't be written never fails a container.

Hot path: imports os and time.
"""

import os
import sys
import time

from gpuhook import jsontext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def timestamp() -> str:
    """Return the time as RFC 3339 in UTC, as runc's JSON log has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def error(program: str, text: str, log_file: str | None) -> None:
    """Tell an error to the user: on stderr, and in the log that the engine reads."""
    sys.stderr.write(f"{program}: {text}\n")
    sys.stderr.flush()
    if log_file:
        append(log_file, {"level": "error", "msg": f"{program}: {text}", "time": timestamp()})


def append(path: str, record: "dict[str, Any]") -> None:
    """Append one JSON line to a file; failing to is no error."""
    if path in ("", os.devnull):
        return
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        fd = os.open(path, flags, 0o644)
        try:
            os.write(fd, (jsontext.dumps(record) + "\n").encode())
        finally:
            os.close(fd)
    except OSError:
        return
