"""Edits of config.json, recorded for the launcher to repeat them without Python.

A record is a script for sed (edit_script), at a path that the launcher makes of what a
config.json asks for and of the machine's GPUs (``repeat_edit`` of launchers/gpu-py):

    /run/gpuhook/launcher/CONFIG/edits-1/"NAME=VALUE"/.../gpus/.../FOLDER/plain or helped

It is recorded only if sed, run on the very text that Python edited, makes the very same of
it. Where it doesn't, a script that edits nothing is recorded, for some time.

Not on the hot path: runs once for each kind of container.
"""

import fcntl
import os
import time

from gpuhook import capabilities, edit_script, launcher_files, requirements
from gpuhook.oci import hook_name
from gpuhook.request import DEVICE_VARIABLES, VISIBLE_DEVICES
from gpuhook.runtime_shim import HOOK_NAME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.config import Config
    from gpuhook.oci import Spec

_FOLDER = "edits-1"  # as the launcher has it; the number is that of the records' form
_PART_LIMIT = 200  # characters of a folder's name
_ASKED_LIMIT = 1000  # characters of all that is asked for
_LIMIT = 256  # records, and strings learned, before all are forgotten
_NOTHING = "b\n"  # the script that edits nothing
_PATIENCE = 60  # seconds that it lasts
_DECIDED = frozenset({VISIBLE_DEVICES, capabilities.VARIABLE})
# What the launcher takes into a path.
_VALUE = launcher_files.PATH_CHARACTERS - {".", "/"} | {"=", ","}


def learn(path: str, before: "Spec", after: "Spec", config: "Config", began: int) -> None:
    """Record the edit of a config.json; failing to costs time later and nothing else.

    ``path`` is the launcher's for it, empty where it lacks what makes the path; ``began``
    is the time in nanoseconds before which the configuration and the machine were as they
    are. Of several processes at once one does it.
    """
    try:
        _learn(path, before, after, config, began)
    except Exception:  # noqa: BLE001 - whatever it is, it must not stop a container
        return


def _learn(path: str, before: "Spec", after: "Spec", config: "Config", began: int) -> None:
    folder = launcher_files.folder_of(config)
    asked = _asked(before)
    if folder is None or asked is None or not _is_plain(before, after):
        return
    if not config.repeat_edits or not config.accept_envvar_unprivileged:
        return  # the latter: whether a container is privileged decides, which no path tells
    lock = os.open(f"{folder}/.learning", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        as_of = began - launcher_files.MARGIN
        settings = [text for text in asked if text.startswith('"')]
        if path.startswith(f"{folder}/{_FOLDER}/{_joined(asked)}/gpus/"):
            _record(path, before, after, settings, as_of)
        else:
            _learn_settings(folder, settings, config, as_of)
    finally:
        os.close(lock)


def forget(config: "Config") -> None:
    """Remove all records."""
    folder = launcher_files.folder_of(config)
    if folder is not None:
        _remove(f"{folder}/{_FOLDER}")


def _remove(folder: str) -> None:
    import shutil  # noqa: PLC0415 - slow, and hardly ever needed

    shutil.rmtree(folder, ignore_errors=True)


def _is_plain(before: "Spec", after: "Spec") -> bool:
    """Tell whether the edit is one that could be repeated: our hook, added to a single line."""
    refused = any(text in before.text for text in edit_script.REFUSED)
    names = [hook_name(hook) for hook in after.hooks("prestart")]
    added = names[-1:] == [HOOK_NAME]
    return added and not refused and "\n" not in before.text.rstrip("\n")


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
    names = {text.partition("=")[0].strip('"') for text in found}
    # An old image gets what it doesn't ask for, and the launcher doesn't tell it from others.
    if requirements.CUDA_VERSION in names and not names.issuperset(_DECIDED):
        return None
    parts = _joined(found).split("/")
    short = max(map(len, parts)) <= _PART_LIMIT and sum(map(len, parts)) <= _ASKED_LIMIT
    return found if short else None


def _joined(asked: list[str]) -> str:
    """Return the launcher's path of it, which splits at commas as at the ends of lines."""
    return "/".join(part for text in asked for part in text.split(","))


def _learn_settings(folder: str, settings: list[str], config: "Config", as_of: int) -> None:
    """Have the launcher know the values of settings, not their names alone."""
    fixed = list(launcher_files.SETTINGS)
    with open(f"{folder}/settings", encoding="ascii") as file:
        known = file.read().split("\n")[:-1]
    learned = [text for text in settings if text not in known]
    if not learned or not edit_script.grep_finds_all():
        return
    if len(known) + len(learned) > len(fixed) + _LIMIT:
        known = fixed
        forget(config)
    text = "".join(f"{word}\n" for word in known + learned)
    launcher_files.write(folder, "settings", text, as_of)


def _record(path: str, before: "Spec", after: "Spec", settings: list[str], as_of: int) -> None:
    if _is_hopeless(f"{path}/plain"):
        return
    name, other = ("helped", "plain") if edit_script.is_helped(after) else ("plain", "helped")
    folder = f"{path.partition(f'/{_FOLDER}/')[0]}/{_FOLDER}"
    edited = edit_script.template(before, after)
    script = edit_script.write(before, edited, settings)
    if script is None or not edit_script.makes(
        script, os.path.dirname(folder), before.text, edited.text
    ):
        script, name, other = _NOTHING, "plain", "helped"
    if sum(len(files) for _, _, files in os.walk(folder)) >= _LIMIT:
        _remove(folder)
    if os.path.exists(f"{path}/{other}"):  # of another configuration
        os.unlink(f"{path}/{other}")
    launcher_files.write(path, name, script, as_of)


def _is_hopeless(path: str) -> bool:
    """Tell whether it was found a short while ago that there is nothing to repeat."""
    try:
        recent = time.time() - os.stat(path).st_mtime < _PATIENCE
        with open(path, encoding="ascii") as file:
            return recent and file.read(len(_NOTHING) + 1) == _NOTHING
    except FileNotFoundError:
        return False
