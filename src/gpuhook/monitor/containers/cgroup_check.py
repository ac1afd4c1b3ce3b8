"""Check whether a cgroup allows a device, without changes or test processes.

A v2 cgroup uses device programs, so a program is interpreted here as in the kernel. The programs
of runc, crun and systemd need a dozen kinds of instructions. Sources:
Documentation/bpf/standardization/instruction-set.rst, include/uapi/linux/bpf.h.
"""

import struct
import sys
from collections.abc import Callable, Iterable, Mapping

from gpuhook.base.cgroup import access, v2
from gpuhook.base.cgroup import device_program as code
from gpuhook.base.errors import CgroupError

_STEPS = 1 << 16  # instructions; the kernel's verifier allows no longer program without maps
_WIDE = (1 << 64) - 1
_HALF = (1 << 32) - 1
_ALU_32, _JUMP, _JUMP_32, _ALU_64 = 0x04, 0x05, 0x06, 0x07  # BPF_CLASS
_LOADS = {code.LOAD_32: "=I", 0x69: "=H", 0x71: "=B"}  # BPF_LDX | BPF_MEM | BPF_W, _H, _B
_BY_REGISTER = 0x08  # BPF_X
_OPERATION = 0xF0
_ASKED = (code.BPF_DEVCG_ACC_READ | code.BPF_DEVCG_ACC_WRITE) << 16 | code.BPF_DEVCG_DEV_CHAR

# Operations on destination and source; only the lowest bits of a shift count.
_COMPUTE: dict[int, Callable[[int, int], int]] = {
    0x00: lambda a, b: a + b,
    0x10: lambda a, b: a - b,
    0x40: lambda a, b: a | b,
    0x50: lambda a, b: a & b,
    0x60: lambda a, b: a << (b & 63),
    0x70: lambda a, b: a >> (b & 63),
    0xA0: lambda a, b: a ^ b,
    0xB0: lambda _, b: b,
}
_COMPARE: dict[int, Callable[[int, int], bool]] = {
    0x00: lambda _a, _b: True,
    0x10: lambda a, b: a == b,
    0x20: lambda a, b: a > b,
    0x30: lambda a, b: a >= b,
    0x40: lambda a, b: bool(a & b),
    0x50: lambda a, b: a != b,
    0xA0: lambda a, b: a < b,
    0xB0: lambda a, b: a <= b,
}
_EXIT = 0x90


def missing(
    process: int,
    devices: Iterable[tuple[int, int]],
    *,
    proc: str = "/proc",
    written: Mapping[int, str] | None = None,
) -> list[tuple[int, int]]:
    """Return the devices (major, minor) that a process' cgroup doesn't allow to read and write.

    The arguments are those of ``access.allow``; if that has nothing to do, none is missing. A
    device counts as missing if a program's decision is unknown. Raises CgroupError.
    """
    version, folder = access.cgroup_of(process, proc, written)
    try:
        if version == 1:
            lists = [access.listed(each) for each in access.way_down(process, folder, written)]
            return [pair for pair in devices if not all(list_allows(each, *pair) for each in lists)]
        places = access.with_policies(folder) if version else []
        programs = [each for place in places for each in v2.instructions(place)]
    except OSError as error:
        if error.errno in access.DENIED and not access.in_first_user_namespace(proc):
            return []
        raise CgroupError(
            f"the container's cgroup can't be examined: {error}", "Run this as root"
        ) from error
    return [pair for pair in devices if not all(program_allows(each, *pair) for each in programs)]


def program_allows(instructions: bytes, major: int, minor: int) -> bool | None:
    """Tell whether a device program allows reading and writing a character device.

    None if it has unknown instructions, or doesn't terminate.
    """
    context = struct.pack("=III", _ASKED, major, minor)
    registers = {code.R1: 0}  # a pointer, used only for loads
    at = 0
    for _ in range(_STEPS):
        try:
            opcode, both, offset, number = struct.unpack_from("=BBhi", instructions, at * 8)
            target, source = _registers(both)
            kind, operation = opcode & 0x07, opcode & _OPERATION
            at += 1
            if opcode in _LOADS and source == code.R1:
                registers[target] = struct.unpack_from(_LOADS[opcode], context, offset)[0]
                continue
            if kind in (_JUMP, _JUMP_32) and operation == _EXIT:
                return registers[code.R0] & _HALF != 0
            value = registers[source] if opcode & _BY_REGISTER else number
            mask = _HALF if kind in (_ALU_32, _JUMP_32) else _WIDE
            if kind in (_ALU_32, _ALU_64):
                before = registers[target] if operation != 0xB0 else 0
                registers[target] = _COMPUTE[operation](before & mask, value & mask) & mask
            elif kind in (_JUMP, _JUMP_32):
                before = registers[target] if operation else 0
                at += offset if _COMPARE[operation](before & mask, value & mask) else 0
            else:
                return None
        except (struct.error, KeyError):
            return None
    return None


def _registers(both: int) -> tuple[int, int]:
    """Return destination and source: two bit fields, whose order follows the byte order."""
    low, high = both & 15, both >> 4
    return (low, high) if sys.byteorder == "little" else (high, low)


def list_allows(listed: Iterable[str], major: int, minor: int) -> bool:
    """Tell whether the lines of a v1 cgroup's devices.list allow reading and writing a device.

    Source: Documentation/admin-guide/cgroup-v1/devices.rst.
    """
    wanted = {"r", "w"}
    for line in listed:
        kind, _, rest = line.partition(" ")
        numbers, _, access = rest.partition(" ")
        found_major, _, found_minor = numbers.partition(":")
        fits = found_major in ("*", str(major)) and found_minor in ("*", str(minor))
        if kind in ("a", "c") and fits:
            wanted -= set(access)
    return not wanted
