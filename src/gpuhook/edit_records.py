"""Edits of config.json, recorded for the launcher to repeat them without Python.

A record is a script for sed, at a path that the launcher makes of what a config.json asks
for and of the machine's GPUs (``repeat_edit`` of launchers/gpu-py):

    /run/gpuhook/launcher/CONFIG/edits/"NAME=VALUE"/.../gpus/.../FOLDER/plain or helped

It inserts the device rules and the hook where Python did, into a config.json that has the
same device rules and the same shape there, and leaves any other one alone. It is recorded
only if sed, run on the very text that Python edited, makes the very same of it.

Not on the hot path: runs once for each kind of container.
"""

import os
import shutil
import subprocess
import tempfile

from gpuhook import edit_check, jsontext, launcher_files, requirements
from gpuhook.request import DEVICE_VARIABLES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.config import Config
    from gpuhook.oci import Spec

HELPER_OPTION = "--helper"
_HOOK_NAME = "gpuhook-prestart"
_PLACE = "@helper@"  # where the launcher writes how the helper is found
_EDITED = "edited"  # what sed says if it has edited
_FOLDER = "edits"
_LIMIT = 256  # records, and strings learned, before all are forgotten

_RULES = ("linux", "resources", "devices")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_VALUE = frozenset(_LETTERS + "_=,-")  # of what the launcher takes into a path
_TEXT = frozenset(_LETTERS + ' _=,-./:@{}[]"')  # of what is written into a script
_SPECIAL = frozenset(".[]")  # of _TEXT, to sed

# A list of objects as engines write hooks: strings, and lists of strings, without brackets.
_FLAT = r"[^][{}\\]*"
_OBJECT = f"{{{_FLAT}\\(\\[{_FLAT}\\]{_FLAT}\\)*}}"
_OR = "\\|"
_OBJECTS = f"{_OBJECT}\\(,{_OBJECT}\\)*"
# In a config.json with one of these nothing is repeated.
_REFUSED = (_HOOK_NAME, "nvidia-container-runtime-hook", "nvidia-container-toolkit", _PLACE)


def learn(path: str, before: "Spec", after: "Spec", config: "Config", began: int) -> None:
    """Record the edit of a config.json; failing to costs time later and nothing else.

    ``path`` is the launcher's for it, ``began`` the time in nanoseconds before which the
    configuration and the machine were as they are.
    """
    as_of = began - launcher_files.MARGIN
    folder = launcher_files.folder_of(config)
    asked = _asked(before)
    hooks = after.hooks("prestart")
    if folder is None or asked is None or not path.startswith(f"{folder}/{_FOLDER}/"):
        return
    if any(text in before.text for text in _REFUSED) or not hooks:
        return  # somebody else's hook is there, or the mode is one without
    try:
        if not path.startswith(f"{folder}/{_FOLDER}/{_joined(asked)}/gpus/"):
            _learn_words(folder, asked, config, as_of)
            return
        template, helped = _template(before, after)
        script = _script(before, template)
        if script is not None and _makes(script, before.text, template.text):
            if sum(len(files) for _, _, files in os.walk(f"{folder}/{_FOLDER}")) >= _LIMIT:
                forget(config)
            shutil.rmtree(path, ignore_errors=True)
            launcher_files.write(path, "helped" if helped else "plain", script, as_of)
    except (OSError, ValueError, subprocess.SubprocessError):
        return


def forget(config: "Config") -> None:
    """Remove all records."""
    folder = launcher_files.folder_of(config)
    if folder is not None:
        shutil.rmtree(f"{folder}/{_FOLDER}", ignore_errors=True)


def _asked(spec: "Spec") -> list[str] | None:
    """Return what the launcher finds of a request in config.json; None if that isn't plain."""
    process = spec.data.get("process")
    entries = process.get("env") if isinstance(process, dict) else None
    found = []
    for entry in entries if isinstance(entries, list) else ():
        name = str(entry).partition("=")[0]
        if name in (requirements.CUDA_VERSION, requirements.CUDA):
            found.append(name)
        elif name in DEVICE_VARIABLES:
            if not _VALUE.issuperset(entry):
                return None
            found.append(f'"{entry}"')
    return found


def _joined(asked: list[str]) -> str:
    """Return the launcher's path of it, which splits at commas as at the ends of lines."""
    return "/".join(part for text in asked for part in text.split(","))


def _learn_words(folder: str, asked: list[str], config: "Config", as_of: int) -> None:
    """Have the launcher know the values of settings, not their names alone."""
    words = launcher_files.words(config)
    if words is None:
        return
    fixed = [*words, *launcher_files.SETTINGS]
    with open(f"{folder}/words", encoding="ascii") as file:
        known = file.read().split("\n")[:-1]
    learned = [text for text in asked if text.startswith('"') and text not in known]
    if known[: len(fixed)] != fixed or not learned:
        return
    if len(known) + len(learned) > len(fixed) + _LIMIT:
        known = fixed
        forget(config)
    launcher_files.write(folder, "words", "".join(f"{word}\n" for word in known + learned), as_of)


def _template(before: "Spec", after: "Spec") -> "tuple[Spec, bool]":
    """Return the edited spec as the launcher is to write it, and whether it has a helper."""
    hook: dict[str, Any] = after.hooks("prestart")[-1]
    args = list(hook["args"])
    helped = args[1:2] == [HELPER_OPTION]
    if helped:
        args[2:7] = [_PLACE]
    rules = after.device_rules[len(before.device_rules) :]
    if rules:
        start = 3 if helped else 1
        args[start:start] = edit_check.option([(rule["major"], rule["minor"]) for rule in rules])
    old, new = (jsontext.dumps(each) for each in (hook, {**hook, "args": args}))
    if after.text.count(old) != 1:
        raise ValueError("the hook isn't found again")
    return type(after)(after.path, after.text.replace(old, new)), helped


def _script(before: "Spec", template: "Spec") -> str | None:
    """Return the script that makes one text of the other; None if there is no plain one."""
    edits = []
    old = new = ""
    if len(template.device_rules) > len(before.device_rules):
        old, new = (jsontext.text_at(spec.text, _RULES) for spec in (before, template))
        if not old:
            return None
        edits.append((_pattern(old), new))
    hook = jsontext.dumps(template.hooks("prestart")[-1])
    hooks = before.data.get("hooks")
    refused = list(_REFUSED)
    if hooks is None:
        refused.append('"hooks"')
        edits.append(("^{", f'{{"hooks":{{"prestart":[{hook}]}},'))
    elif hooks == {}:
        edits.append(('"hooks":{}', f'"hooks":{{"prestart":[{hook}]}}'))
    elif isinstance(hooks, dict) and "prestart" not in hooks:
        refused.append('"prestart"')
        edits.append(('"hooks":{"', f'"hooks":{{"prestart":[{hook}],"'))
    else:
        edits.append((f'\\("hooks":{{"prestart":\\[{_OBJECTS}\\)\\]', f"\\1,{hook}]"))
    if not _TEXT.issuperset(old + new + hook):  # anything else sed might take otherwise
        return None
    lines = ["$!b", f"/{_OR.join(refused)}/b", "h"]
    for pattern, text in edits:  # all of them, or the text as it was
        lines += [f"s|{pattern}|{text}|", "T back"]
    lines += ["x", f"s/.*/{_EDITED}/w /dev/stdout", "x", "b done", ":back", "g", "b", ":done"]
    return "\n".join(lines) + "\n"


def _pattern(text: str) -> str:
    return "".join("\\" + char if char in _SPECIAL else char for char in text)


def _makes(script: str, text: str, expected: str) -> bool:
    """Tell whether sed, called as the launcher calls it, makes of a text what is expected."""
    with tempfile.NamedTemporaryFile(dir=launcher_files.FOLDER) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
        file.flush()
        done = subprocess.run(
            ["sed", "-i", "-e", script, "--", file.name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            check=False,
            timeout=5,
        )
        with open(file.name, "rb") as edited:
            made = edited.read()
    wanted = expected.encode("utf-8", "surrogateescape")
    return done.stdout.strip() == _EDITED.encode() and made == wanted
