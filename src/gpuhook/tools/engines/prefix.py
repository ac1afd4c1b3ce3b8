"""A folder that stands for / (``--prefix``): whoever made it decides nothing outside of it.

That may be an unpacked image. Its links and ``..`` mean paths of the system that it is, while what
reads and writes here follows them from this machine's / . So links are followed that mean the same
for both, and all others are refused. "" and "/" stand for this machine, whose links are root's own.
"""

import os

from gpuhook.ground.errors import EngineError, printable

_LINKS = 40  # on the way to a file, as in the kernel (path_resolution(7))


def below(prefix: str, path: str) -> str:
    """Return a path of the system below a prefix; EngineError where it leads out of there."""
    root = prefix.rstrip("/")
    if root and not is_plain(path):  # protects: prefix-plain
        raise _not_plain(path, prefix)
    return checked(prefix, root + path)


def checked(prefix: str, path: str) -> str:
    """Return a path; EngineError where it is below a prefix and leads out of there.

    With a prefix, no path has "..", or begins elsewhere than at /. What doesn't exist is no link.
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
    """Tell whether a value is a path from / on without "..", which means one place alone."""
    return (
        isinstance(path, str)
        and path.startswith("/")
        and "\0" not in path
        and ".." not in path.split("/")
    )


def came_with(prefix: str, state: str) -> bool:
    """Tell whether a state folder is below a prefix, and may have come with what is there.

    Nothing that it says then chooses what is run or believed on this machine.
    """
    root = os.path.realpath(prefix) if prefix.rstrip("/") else ""
    return bool(root) and os.path.realpath(state).startswith(f"{root}/")


def check_kept(prefix: str, state: str, path: str) -> None:
    """Raise EngineError where a state folder below a prefix names a path that isn't.

    It may have come with what is below the prefix, and root would write or remove that path.
    """
    root = prefix.rstrip("/")
    if came_with(prefix, state) and not path.startswith(f"{root}/"):  # protects: prefix-records
        raise EngineError(
            f"{printable(path)} isn't below {prefix}, as all has to be that {state} remembers",
            f"Remember it elsewhere with --state-dir, or remove {state} if it came with {prefix}",
        )
    checked(prefix, path)


def check_state(prefix: str, state: str) -> None:
    """Raise EngineError where a link in a state folder below a prefix leads out of there."""
    checked(prefix, state)
    for folder, folders, files in os.walk(state) if prefix.rstrip("/") else ():
        for name in (*folders, *files):
            checked(prefix, f"{folder}/{name}")


def _names(path: str) -> list[str]:
    """Return a path's names, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _not_plain(path: str, prefix: str) -> EngineError:
    return EngineError(
        f"{printable(path)} leads nobody knows where below {prefix}, which stands for /",
        'Write it there as a path from / on, without ".."',
    )


def _leads_out(path: str, at: str, prefix: str) -> EngineError:
    link = f"by the link {printable(at)} " if os.path.islink(at) else ""
    return EngineError(
        f"{printable(path)} leads {link}out of {prefix}, which stands for /",
        "Make the link a relative one that stays in there, or name the file's own place",
    )
