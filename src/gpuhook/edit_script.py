"""The script for sed that makes an edit of config.json again.

It inserts device rules and a hook where Python has inserted them, into a text of one line
that has the same device rules and the same shape there, says ``edited``, and leaves any
other text as it is.

Not on the hot path: runs once for each kind of container.
"""

import os

from gpuhook import dev_char, edit_check, jsontext, launcher_files
from gpuhook.runtime_shim import HELPER_OPTION, HOOK_NAME, NVIDIA_HOOKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.oci import Spec

HELPER = "@helper@"  # in whose place the launcher writes how the helper is found
EDITED = "edited"
# In a config.json with one of these nothing is repeated.
REFUSED = (HOOK_NAME, *NVIDIA_HOOKS, HELPER)

_RULES = ("linux", "resources", "devices")
# What is written into a script; anything else sed might take otherwise.
_TEXT = launcher_files.PATH_CHARACTERS | frozenset(' =,:@{}[]"')
_SPECIAL = frozenset(".[]")  # of these, to sed
_OR = "\\|"
# A mount namespace of the container's own: without one it is refused before it is made.
_NAMESPACE = '{"type": *"mount"}'
# What comes before an entry of the environment.
_ENVIRONMENT = r'"env": *\[\("\(\\.\|[^"\]\)*", *\)*'
_SYSTEMD = '"cgroupsPath": *"[^"]*:[^"]*:'
# A list of objects as engines write hooks: strings, and lists of strings, without brackets.
_FLAT = r"[^][{}\\]*"
_OBJECT = f"{{{_FLAT}\\(\\[{_FLAT}\\]{_FLAT}\\)*}}"
_OBJECTS = f"{_OBJECT}\\(,{_OBJECT}\\)*"


def template(before: "Spec", after: "Spec") -> "Spec":
    """Return an edited spec as the launcher is to write it.

    In the words of our hook, the last one, a place is held for the helper, and the devices
    are named that the edit has allowed.
    """
    hook: dict[str, Any] = after.hooks("prestart")[-1]
    args = list(hook["args"])
    start = 1
    if is_helped(after):
        args[2:7] = [HELPER]
        start = 3
    rules = after.device_rules[len(before.device_rules) :]
    if rules:
        args[start:start] = edit_check.option([(rule["major"], rule["minor"]) for rule in rules])
    old, new = (jsontext.dumps(each) for each in (hook, {**hook, "args": args}))
    return type(after)(after.path, after.text.replace(old, new))


def is_helped(after: "Spec") -> bool:
    """Tell whether our hook, the last one, has a helper."""
    return bool(after.hooks("prestart")[-1]["args"][1:2] == [HELPER_OPTION])


def write(before: "Spec", edited: "Spec", settings: list[str]) -> str | None:
    """Return the script that makes one text of the other; None if there is no plain one.

    ``settings`` are what a container must have in its environment, as JSON strings.
    """
    old, new = (jsontext.text_at(spec.text, _RULES) for spec in (before, edited))
    hook = jsontext.dumps(edited.hooks("prestart")[-1])
    if not before.device_rules or not _TEXT.issuperset(old + new + hook + "".join(settings)):
        return None
    edits = [(f'\\("devices": *\\){_literal(old)}', f"\\1{new}")]
    refused, *place = _hook_place(before.data.get("hooks"), hook)
    edits.append((place[0], place[1]))
    linux = before.data.get("linux")
    if not isinstance(linux, dict) or not dev_char.wanted(linux.get("cgroupsPath")):
        refused = (*refused, _SYSTEMD)  # Python makes the links that systemd needs
    lines = ["$!b", f"/{_OR.join((*REFUSED, *refused))}/b", f"/{_NAMESPACE}/!b"]
    lines += [f"/{_ENVIRONMENT}{_literal(setting)}[],]/!b" for setting in settings]
    lines.append("h")
    for pattern, text in edits:  # all of them, or the text as it was
        lines += [f"s|{pattern}|{text}|", "T back"]
    lines += ["x", f"s/.*/{EDITED}/w /dev/stdout", "x", "b done", ":back", "g", "b", ":done"]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    """Return the pattern of a text that consists of _TEXT."""
    return "".join("\\" + char if char in _SPECIAL else char for char in text)


def _hook_place(hooks: "Any", hook: str) -> tuple[tuple[str, ...], str, str]:
    """Return what must not be in config.json, the place of the hook and what comes there."""
    if hooks is None:
        return ('"hooks"',), "^{", f'{{"hooks":{{"prestart":[{hook}]}},'
    if hooks == {}:
        return (), '"hooks":{}', f'"hooks":{{"prestart":[{hook}]}}'
    if isinstance(hooks, dict) and "prestart" not in hooks:
        return ('"prestart"',), '"hooks":{"', f'"hooks":{{"prestart":[{hook}],"'
    return (), f'\\("hooks":{{"prestart":\\[{_OBJECTS}\\)\\]', f"\\1,{hook}]"


def makes(script: str, folder: str, text: str, expected: str) -> bool:
    """Tell whether sed, called as the launcher calls it, makes of a text what is expected.

    ``folder`` is where to try, one process at a time; OSError if nothing can be written there.
    """
    path = f"{folder}/.try"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    if os.path.lexists(path):  # one killed meanwhile may have left it
        os.unlink(path)
    with open(os.open(path, flags, 0o600), "wb") as file:  # root's alone: it holds secrets
        file.write(text.encode("utf-8", "surrogateescape"))
    try:
        said = _run('exec sed -i -e "$1" -- "$2"', script, path)
        with open(path, "rb") as file:
            made = file.read()
    finally:
        os.unlink(path)
    return said.strip() == EDITED.encode() and made == expected.encode("utf-8", "surrogateescape")


def grep_finds_all() -> bool:
    """Tell whether the launcher's grep tells all words that it finds in a line; not all do."""
    return _run("echo 'b a b' | grep -o -F -e a -e b") == b"b\na\nb\n"


def _run(command: str, *words: str) -> bytes:
    """Run a command in the launcher's shell; return what it says."""
    ours, its = os.pipe()
    try:
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", command, "sh", *words],
            {"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, its, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
        os.waitpid(pid, 0)
        os.set_blocking(ours, False)
        return os.read(ours, 1 << 10)
    except BlockingIOError:
        return b""
    finally:
        os.close(ours)
        os.close(its)
