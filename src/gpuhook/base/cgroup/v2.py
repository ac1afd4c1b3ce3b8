"""Changes of a v2 cgroup's device programs, such as rules that allow a few more devices.

The kernel asks every program attached to a cgroup, and each can refuse: adding one allows
nothing. So each program is replaced by a copy with our rules in front.
"""

import errno
import os

from gpuhook.base.cgroup import bpf
from gpuhook.base.cgroup.device_program import allow_rules
from gpuhook.base.errors import CgroupError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ATTEMPTS = 10


def extend(folder: str, devices: "Sequence[tuple[int, int]]") -> int:
    """Let all device programs of the cgroup ``folder`` allow the devices (major, minor).

    Returns as ``rewrite`` does. A program that already begins with these rules isn't changed.
    """
    rules = allow_rules(devices)
    return rewrite(folder, lambda old: old if old.startswith(rules) else rules + old)


def rewrite(folder: str, change: "Callable[[bytes], bytes]") -> int:
    """Replace the instructions of all device programs of the cgroup ``folder`` by changed ones.

    Returns the number of programs; with none the cgroup restricts nothing and isn't changed.
    Each replacement is atomic; if one fails, the earlier ones are rolled back. Raises CgroupError
    for a program that can't be rebuilt and for a cgroup that keeps changing, else OSError.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(ATTEMPTS):
            try:
                return _Cgroup(fd, folder).rewrite(change)
            except OSError as error:
                # Another process, such as systemd, has replaced a program meanwhile.
                if error.errno != errno.ENOENT:
                    raise
    finally:
        os.close(fd)
    raise CgroupError(
        f"the device programs of {folder} keep being replaced by another program",
        "Start the container again, and see which service manages that cgroup",
    )


def instructions(folder: str) -> list[bytes]:
    """Return the instructions of a cgroup's device programs, as the kernel executes them.

    Empty for a program that the kernel hides. Raises OSError; ENOENT means that the programs keep
    being replaced.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for attempt in range(ATTEMPTS):
            try:
                return [
                    _instructions(each, folder) for each in bpf.attached_programs(fd, folder)[1]
                ]
            except OSError as error:
                if error.errno != errno.ENOENT or attempt == ATTEMPTS - 1:
                    raise
        return []
    finally:
        os.close(fd)


def _instructions(number: int, folder: str) -> bytes:
    program = bpf.open_program(number, folder)
    try:
        return bpf.describe_program(program, folder).instructions
    finally:
        os.close(program)


class _Replacement:
    """An attached program and its replacement."""

    __slots__ = ("link", "new", "number", "old")

    def __init__(self, number: int, old: int, new: int) -> None:
        self.number = number
        self.old = old
        self.new = new
        self.link: int | None = None

    def close(self) -> None:
        for fd in (self.old, self.new, self.link):
            if fd is not None:
                os.close(fd)


class _Cgroup:
    """A cgroup, and the replacements made in it."""

    __slots__ = ("_fd", "_flags", "_folder", "_programs")

    def __init__(self, fd: int, folder: str) -> None:
        self._fd = fd
        self._folder = folder
        self._flags, self._programs = bpf.attached_programs(fd, folder)

    def rewrite(self, change: "Callable[[bytes], bytes]") -> int:
        prepared: list[_Replacement] = []
        done: list[_Replacement] = []
        try:
            # All are loaded before the first is attached, so that failures happen here.
            for number in self._programs:
                self._prepare(number, change, prepared)
            for replacement in prepared:
                self._replace(replacement)
                done.append(replacement)
        except OSError:
            for replacement in reversed(done):
                self._attach(replacement, replacement.old, replacement.new)
            raise
        finally:
            for replacement in prepared:
                replacement.close()
        return len(self._programs)

    def _prepare(
        self, number: int, change: "Callable[[bytes], bytes]", prepared: list[_Replacement]
    ) -> None:
        old = bpf.open_program(number, self._folder)
        new = None
        try:
            program = bpf.describe_program(old, self._folder)
            changed = change(program.instructions)
            if changed == program.instructions:
                return
            if program.maps or not program.instructions:
                raise CgroupError(
                    f"a device program of {self._folder} uses maps or is hidden by the kernel "
                    "(net.core.bpf_jit_harden = 2), so it can't be extended",
                    "Name the devices in the engine's own configuration, "
                    "or make gpu-py the container's runtime",
                )
            new = bpf.load_program(changed, program.gpl, self._folder)
            prepared.append(_Replacement(number, old, new))
        finally:
            if new is None:
                os.close(old)

    def _replace(self, replacement: _Replacement) -> None:
        try:
            self._attach(replacement, replacement.new, replacement.old)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            replacement.link = bpf.find_link(self._fd, replacement.number, self._folder)
            if replacement.link is None:
                raise
            self._attach(replacement, replacement.new, replacement.old)

    def _attach(self, replacement: _Replacement, fd: int, replaces: int) -> None:
        if replacement.link is None:
            bpf.attach_program(self._fd, fd, self._flags, replaces, self._folder)
        else:
            bpf.update_link(replacement.link, fd, replaces, self._folder)
