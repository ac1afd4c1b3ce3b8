"""Confinement of paths to a folder used as / (``--prefix``), whose content isn't trusted.

The folder may be an unpacked image. Its links and ``..`` are meant from its own / , while reads
and writes here resolve them from the host's / . So only links that mean the same in both cases
are followed, and all others are refused. "" and "/" mean the host, whose links root controls.
"""

import os

from gpuhook.base.errors import EngineError, printable
from gpuhook.tools.engines.files import DEFAULT_STATE, users_folder

_LINKS = 40  # most links in a path, as in the kernel (path_resolution(7))


def below(prefix: str, path: str) -> str:
    """Return a system path below a prefix; EngineError if it leads out of the prefix."""
    root = prefix.rstrip("/")
    if root and not is_plain(path):  # protects: prefix-plain
        raise _not_plain(path, prefix)
    return checked(prefix, root + path)


def checked(prefix: str, path: str) -> str:
    """Return a path; EngineError if it is below a prefix and leads out of it.

    With a prefix, a path must start at / and have no "..". A missing file isn't a link.
    """
    root = prefix.rstrip("/")
    if not root:
        return path
    if not is_plain(path):  # protects: prefix-plain
        raise _not_plain(path, prefix)
    if not path.startswith(f"{root}/"):
        return path
    way: list[str] = []
    pending, links, at = _names(path[len(root) :]), 0, path
    while pending:
        name = pending.pop()
        found = "/".join((root, *way, name))
        if name == "..":
            if not way:
                raise _leads_out(path, at, prefix)
            way.pop()
        elif os.path.islink(found):
            target, links, at = os.readlink(found), links + 1, found
            if target.startswith("/") or links > _LINKS:  # protects: prefix-links
                raise _leads_out(path, at, prefix)
            pending += _names(target)
        else:
            way.append(name)
    return path


def is_plain(path: object) -> bool:
    """Tell whether a value is an absolute path without "..", which is unambiguous."""
    return (
        isinstance(path, str)
        and path.startswith("/")
        and "\0" not in path
        and ".." not in path.split("/")
    )


def came_with(prefix: str, state: str) -> bool:
    """Tell whether a state folder is below a prefix, so its content isn't trusted.

    Its content must not select programs to run or files to trust on this host.
    """
    root = os.path.realpath(prefix) if prefix.rstrip("/") else ""
    return bool(root) and os.path.realpath(state).startswith(f"{root}/")


def check_kept(prefix: str, state: str, path: str) -> None:
    """Raise EngineError if a state folder below a prefix names a path outside of it.

    The state folder may be part of an untrusted image, and root would write or remove that path.
    """
    root = prefix.rstrip("/")
    if came_with(prefix, state) and not path.startswith(f"{root}/"):  # protects: prefix-records
        raise EngineError(
            f"{printable(path)}, recorded in {state}, isn't below {prefix}",
            f"Name another folder with --state-dir, or remove {state} if it came with {prefix}",
        )
    checked(prefix, path)


def check_state(prefix: str, state: str) -> None:
    """Raise EngineError if a link in a state folder below a prefix leads out of the prefix."""
    checked(prefix, state)
    for folder, folders, files in os.walk(state) if prefix.rstrip("/") else ():
        for name in (*folders, *files):
            checked(prefix, f"{folder}/{name}")


def _names(path: str) -> list[str]:
    """Return a path's components, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _not_plain(path: str, prefix: str) -> EngineError:
    return EngineError(
        f"{printable(path)} is ambiguous below {prefix}, which is used as /",
        'Write it as an absolute path without ".."',
    )


def _leads_out(path: str, at: str, prefix: str) -> EngineError:
    link = f"through the link {printable(at)} " if os.path.islink(at) else ""
    return EngineError(
        f"{printable(path)} leads {link}out of {prefix}, which is used as /",
        "Make the link relative and keep it inside the folder, or name the file itself",
    )


def is_rootless(prefix: str) -> bool:
    """Tell whether to change the user's own files instead of the system's."""
    return os.geteuid() != 0 and not prefix


def state_folder(given: str | None, prefix: str) -> str:
    """Return the folder for the records of changes; EngineError if it is outside the prefix."""
    state = prefix.rstrip("/") + DEFAULT_STATE
    if given:
        state = os.path.abspath(given)
    elif is_rootless(prefix):
        state = os.path.join(users_folder(".local/state", "XDG_STATE_HOME"), "gpuhook")
    check_state(prefix, state)
    return state
