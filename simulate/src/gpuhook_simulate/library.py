"""Shared libraries without code, for drivers whose libraries only need to be found."""

import os
import struct

from gpuhook.base.errors import SimulateError

# uname -m -> the ELF header's e_machine. Source: elf.h.
_MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}
_HEADER, _PROGRAM_HEADER = 64, 56  # bytes
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551  # segments
_READ_WRITE = 6  # segment flags, because the loader writes into the dynamic section
_HASH, _STRINGS, _SYMBOLS, _STRINGS_SIZE, _SYMBOL_SIZE, _SONAME = 4, 5, 6, 10, 11, 14


def shared_library(soname: str) -> bytes:
    """Return a loadable library for this host's architecture, with that DT_SONAME."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise SimulateError(
            f"Libraries for {machine} can't be simulated", f"Use one of {', '.join(_MACHINES)}"
        )
    strings = b"\0" + soname.encode() + b"\0"
    strings += bytes(-len(strings) % 8)
    at = _HEADER + 3 * _PROGRAM_HEADER
    symbols, hashes = at + len(strings), at + len(strings) + 24
    dynamic = hashes + 16
    tags = (
        (_SONAME, 1), (_HASH, hashes), (_STRINGS, at), (_SYMBOLS, symbols),
        (_STRINGS_SIZE, len(strings)), (_SYMBOL_SIZE, 24), (0, 0),
    )  # fmt: skip
    size = dynamic + 16 * len(tags)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 3, _MACHINES[machine], 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM_HEADER, 3,
        0, 0, 0,
    )  # fmt: skip
    segments = (
        (_LOAD, 0, size, 1 << 16),
        (_DYNAMIC, dynamic, 16 * len(tags), 8),
        (_STACK, 0, 0, 16),
    )
    for kind, start, length, align in segments:
        header += struct.pack(
            "<IIQQQQQQ", kind, _READ_WRITE, start, start, start, length, length, align
        )
    body = strings + bytes(24) + struct.pack("<IIII", 1, 1, 0, 0)
    return header + body + b"".join(struct.pack("<QQ", *tag) for tag in tags)
