"""Files for systemd and udev that refresh CDI specs at boot and when devices change.

The Debian package ships them unchanged. Elsewhere ``install --cdi`` writes them into /etc, with
the paths of the installation.
"""

import re
from importlib import resources

from gpuhook.tools.cdi.managed_specs import below
from gpuhook.tools.engines.files import DEFAULT_STATE, DROP_IN_HEADER, Change, read

# File -> folder of the administrator's files of that kind, folder of the package's files.
FILES = {
    "gpuhook-cdi-refresh.service": ("/etc/systemd/system", "/usr/lib/systemd/system"),
    "gpuhook-cdi-refresh.path": ("/etc/systemd/system", "/usr/lib/systemd/system"),
    "70-gpuhook-cdi-refresh.rules": ("/etc/udev/rules.d", "/usr/lib/udev/rules.d"),
}
ENABLED = tuple(name for name in FILES if not name.endswith(".rules"))
_COMMAND = "/usr/bin/gpuhook"
_PLAIN = re.compile(r"[\w/.+@:,=-]+", re.ASCII)
_HEADER = f"# {DROP_IN_HEADER}\n"


def wanted(command: str, state: str, prefix: str) -> tuple[list[Change], list[str]]:
    """Return the files to write for a gpuhook at ``command``, and warnings of foreign files.

    No files if those of the package do the same. ``state`` and ``command`` are paths of the system
    whose / is the folder ``prefix``.
    """
    changes, warnings = [], []
    for name, (folder, packaged) in FILES.items():
        text = _text(name, command, state)
        if read(below(prefix, f"{packaged}/{name}")) == text.encode():
            continue
        path = below(prefix, f"{folder}/{name}")
        change = Change(path, read(path), (_HEADER + text).encode())
        if change.old is not None and not _is_ours(change.old):
            warnings.append(f"{path} exists and isn't a file of gpuhook: it is not changed")
        else:
            changes.append(change)
    return changes, warnings


def removals(paths: tuple[str, ...], prefix: str) -> list[Change]:
    """Return the removal of the files that exist and are ours."""
    found = []
    for path in paths:
        place = below(prefix, path)
        old = read(place)
        if old is not None and _is_ours(old):
            found.append(Change(place, old, None))
    return found


def shipped(name: str) -> str:
    """Return the text of one of FILES in the Debian package."""
    text: str = (resources.files("gpuhook") / "tools/cdi/units" / name).read_text("utf-8")
    return text


def for_command(text: str, command: str) -> str:
    """Return a unit that runs the gpuhook at ``command`` instead of the Debian package's."""
    return text.replace(f"{_COMMAND} ", f"{_word(command)} ")


def _text(name: str, command: str, state: str) -> str:
    text = shipped(name)
    if state != DEFAULT_STATE:
        text = text.replace(f"{DEFAULT_STATE}/", _escaped(f"{state}/"))
        text = text.replace(
            f"{_COMMAND} cdi refresh", f"{_COMMAND} cdi refresh --state-dir @STATE@"
        )
    return for_command(text, command).replace("@STATE@", _word(state))


def _is_ours(data: bytes) -> bool:
    return data.startswith(_HEADER.encode())


def _escaped(path: str) -> str:
    """Return a path escaped for a unit's setting, where % starts a specifier."""
    return path.replace("%", "%%")


def _word(path: str) -> str:
    """Return a path escaped for a command line in a unit; systemd.service(5)."""
    if _PLAIN.fullmatch(path):
        return path
    quoted = path.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{_escaped(quoted)}"'
