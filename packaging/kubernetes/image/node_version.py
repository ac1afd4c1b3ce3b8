"""A version of gpuhook on the node: its folder, and the links to its programs."""

import glob
import os
import shutil
import time
from collections.abc import Iterator

from node import Node, say

from gpuhook.base import names
from gpuhook.base.errors import EngineError
from gpuhook.base.host import files as host_files

SOURCE = "/usr/lib/gpuhook-node"
# Bytes in bin/python3 for each of its two paths: scripts/lib/interpreter.
PATH_LENGTH = 200
# A container start or a prefork server may still be using a version that was replaced.
KEPT_SECONDS = 3600.0


def put_version(node: Node) -> str:
    """Return the folder of this image's version on the node, made unless it is there whole."""
    host_files.check_way(node.versions)
    os.makedirs(node.versions, exist_ok=True)
    for unfinished in glob.glob(f"{glob.escape(node.versions)}/.*"):
        shutil.rmtree(unfinished)
    for target in _names(node):
        if not os.path.lexists(target):
            break
        if is_whole(target):
            return target
        say(f"{target} was damaged; another copy takes its place")
    unfinished = f"{node.versions}/.{os.path.basename(target)}"
    shutil.copytree(SOURCE, unfinished, symlinks=True)
    for path in _programs(unfinished):
        _replace(path, moved(_read(path), target))
    os.sync()  # so that no file is without its content, even after a crash of the node
    os.rename(unfinished, target)
    say(f"copied gpuhook to {target}")
    return target


def _names(node: Node) -> Iterator[str]:
    """Yield the folders that this version may have: its own, and others if that one is damaged."""
    name = _read(f"{SOURCE}/version").decode().strip()
    yield f"{node.versions}/{name}"
    number = 1
    while True:
        number += 1
        yield f"{node.versions}/{name}.{number}"


def _programs(tree: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(f"{tree}/bin"))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _replace(path: str, data: bytes) -> None:
    """Write a file that no process uses yet; keep its mode and time."""
    status = os.stat(path)
    with open(path, "wb") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def moved(data: bytes, target: str) -> bytes:
    """Return a program of the image's as it has to be below ``target``."""
    if not data.startswith(b"\x7fELF"):
        return data.replace(os.fsencode(SOURCE), os.fsencode(target))
    for name in ("", *_loaders()):
        old, new = (os.fsencode(f"{folder}/lib{name}") for folder in (SOURCE, target))
        if len(new) >= PATH_LENGTH:
            raise EngineError(
                f"{target} is too long a path for the interpreter", "Choose a shorter --folder"
            )
        data = data.replace(old.ljust(PATH_LENGTH, b"\0"), new.ljust(PATH_LENGTH, b"\0"))
    return data


def _loaders() -> list[str]:
    return [f"/{name}" for name in os.listdir(f"{SOURCE}/lib") if name.startswith("ld-")]


def is_whole(target: str) -> bool:
    """Tell whether a version on the node has everything that the image has, unchanged."""
    for folder, _, files in os.walk(SOURCE):
        for name in files:
            path = os.path.join(folder, name)
            copy = target + path.removeprefix(SOURCE)
            try:
                data = _read(copy)
                same_mode = os.stat(copy).st_mode == os.stat(path).st_mode
            except OSError:
                return False
            expected = moved(_read(path), target) if folder == f"{SOURCE}/bin" else _read(path)
            if data != expected or not same_mode:
                return False
    return True


def check_programs(node: Node) -> None:
    """Raise EngineError where the folder of the links holds anything but links of ours.

    What isn't ours is neither replaced nor removed: --folder may name a folder such as /usr/local.
    """
    host_files.check_way(node.programs)
    if not os.path.isdir(node.programs):
        return
    for entry in os.scandir(node.programs):
        if not entry.is_symlink() or not os.readlink(entry.path).startswith(f"{node.versions}/"):
            raise EngineError(
                f"{entry.path} is there, and install-node didn't put it there",
                "Give --folder a folder of gpuhook's own, or move that file away",
            )


def link_programs(node: Node, version: str) -> None:
    """Make this version the one that counts, the runtime's link last."""
    os.makedirs(node.programs, exist_ok=True)
    programs = [os.path.basename(path) for path in _programs(version)]
    programs.remove("python3")
    for name in os.listdir(node.programs):
        if name not in programs:
            os.unlink(f"{node.programs}/{name}")
    for name in sorted(programs, key=lambda name: name == names.RUNTIME):
        link, program = f"{node.programs}/{name}", f"{version}/bin/{name}"
        if os.path.islink(link):
            before = os.readlink(link)
            if before == program:
                continue
            _note_end(before)
        os.utime(program)  # data that the launcher has saved must be newer than the launcher
        os.symlink(program, f"{link}.new")
        os.rename(f"{link}.new", link)
        say(f"{link} is {program}")


def _note_end(program: str) -> None:
    """Have a version's folder say when it was replaced."""
    folder = os.path.dirname(os.path.dirname(program))
    if os.path.isdir(folder):
        os.utime(folder)


def remove_old(node: Node, version: str) -> None:
    """Remove the versions that were replaced long ago."""
    for entry in os.scandir(node.versions):
        if entry.path != version and entry.stat().st_mtime < time.time() - KEPT_SECONDS:
            shutil.rmtree(entry.path)
            say(f"removed {entry.path}")
