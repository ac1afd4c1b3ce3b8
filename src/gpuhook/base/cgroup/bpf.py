"""The bpf(2) calls for cgroup device programs, each raising OSError.

Constants and layouts: include/uapi/linux/bpf.h (union bpf_attr, struct bpf_prog_info,
struct bpf_link_info); syscall number: asm/unistd.h.
"""

import ctypes
import errno
import os
import struct

from gpuhook.base.container.kernel import syscall
from gpuhook.base.names import machine_name
from gpuhook.base.oci.jsontext import Record

SYSCALL_NUMBERS = {
    "x86_64": 321,
    "aarch64": 280,
    "riscv64": 280,
    "loongarch64": 280,
    "ppc64le": 361,
    "s390x": 351,
}

# enum bpf_cmd
BPF_PROG_LOAD = 5
BPF_PROG_ATTACH = 8
BPF_PROG_GET_FD_BY_ID = 13
BPF_OBJ_GET_INFO_BY_FD = 15
BPF_PROG_QUERY = 16
BPF_LINK_UPDATE = 29
BPF_LINK_GET_FD_BY_ID = 30
BPF_LINK_GET_NEXT_ID = 31

BPF_PROG_TYPE_CGROUP_DEVICE = 15
BPF_CGROUP_DEVICE = 6  # enum bpf_attach_type
BPF_LINK_TYPE_CGROUP = 3
BPF_F_ALLOW_MULTI = 2
BPF_F_REPLACE = 4

MAX_PROGRAMS = 64  # BPF_CGROUP_MAX_PROGS, kernel/bpf/cgroup.c
PROGRAM_SIZE = 32 << 10
LOG_SIZE = 64 << 10
NAME = b"gpuhook"

# Up to expected_attach_type; the name follows prog_flags.
LOAD_ATTR = "=IIQQIIQII16sII"
QUERY_ATTR = "=IIIIQI4x"
# struct bpf_prog_info up to the bit gpl_compatible (Linux 4.18 and newer).
PROG_INFO = "=II8sIIQQQIIQ16sII"
# struct bpf_link_info with its member for cgroups.
LINK_INFO = "=III4xQI4x"


class Program(Record):
    """A loaded program, as the kernel describes it.

    ``instructions`` are the executed ones, empty if the kernel hides them; ``maps`` is the
    number of maps they use, ``gpl`` whether the licence was compatible with the GPL.
    """

    instructions: bytes
    maps: int
    gpl: bool


def _bpf(command: int, attr: "ctypes.Array[ctypes.c_char]", what: str) -> int:
    number = SYSCALL_NUMBERS.get(machine_name())
    if number is None:
        raise OSError(errno.ENOSYS, "the number of bpf(2) is unknown for this architecture", what)
    return syscall(number, command, attr, ctypes.sizeof(attr), path=what)


def _attr(layout: str, *fields: int | bytes) -> "ctypes.Array[ctypes.c_char]":
    data = struct.pack(layout, *fields)
    return ctypes.create_string_buffer(data, len(data))


def attached_programs(cgroup_fd: int, what: str) -> tuple[int, tuple[int, ...]]:
    """Return the attach flags of a cgroup's device programs, and their ids.

    ``what`` names the cgroup in errors, here and below. A kernel without cgroup programs has
    none.
    """
    ids = (ctypes.c_uint32 * MAX_PROGRAMS)()
    attr = _attr(
        QUERY_ATTR, cgroup_fd, BPF_CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), MAX_PROGRAMS
    )
    try:
        _bpf(BPF_PROG_QUERY, attr, what)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0, ()
        raise
    fields = struct.unpack(QUERY_ATTR, attr.raw)
    return fields[3], tuple(ids[: fields[5]])


def open_program(number: int, what: str) -> int:
    """Return a descriptor of the program with that id; ENOENT if it is gone."""
    return _bpf(BPF_PROG_GET_FD_BY_ID, _attr("=I8x", number), what)


def describe_program(fd: int, what: str) -> Program:
    """Return the kernel's description of a program."""
    size = PROGRAM_SIZE
    while True:
        buffer = ctypes.create_string_buffer(size)
        empty = (0, 0, bytes(8), 0, size, 0, ctypes.addressof(buffer), 0, 0, 0, 0, bytes(16), 0, 0)
        info = _object_info(fd, _attr(PROG_INFO, *empty), what)
        fields = struct.unpack(PROG_INFO, info)
        needed, shown, maps, bits = fields[4], fields[6], fields[9], fields[13]
        if needed <= size:
            return Program(buffer.raw[:needed] if shown else b"", maps, bool(bits & 1))
        size = needed


def _object_info(fd: int, info: "ctypes.Array[ctypes.c_char]", what: str) -> bytes:
    attr = _attr("=IIQ", fd, ctypes.sizeof(info), ctypes.addressof(info))
    _bpf(BPF_OBJ_GET_INFO_BY_FD, attr, what)
    return info.raw


_ATTEMPTS = 5  # to load a program, as in libbpf


def load_program(instructions: bytes, gpl: bool, what: str) -> int:
    """Load a cgroup device program; return its descriptor.

    If the kernel refuses it, the error's text ends with the end of the verifier's log.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL" if gpl else b"Apache-2.0")
    count = len(instructions) // 8

    def load(level: int, size: int, log: int) -> int:
        attr = _attr(
            LOAD_ATTR,
            *(BPF_PROG_TYPE_CGROUP_DEVICE, count),
            *(ctypes.addressof(code), ctypes.addressof(licence)),
            *(level, size, log, 0, 0, NAME, 0, BPF_CGROUP_DEVICE),
        )
        for _ in range(_ATTEMPTS - 1):
            try:
                return _bpf(BPF_PROG_LOAD, attr, what)
            except OSError as error:
                if error.errno != errno.EAGAIN:  # a signal interrupts the verifier
                    raise
        return _bpf(BPF_PROG_LOAD, attr, what)

    try:
        return load(0, 0, 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES):
            raise
    log = ctypes.create_string_buffer(LOG_SIZE)
    try:
        return load(1, LOG_SIZE, ctypes.addressof(log))
    except OSError as error:
        lines = log.value.decode(errors="replace").strip().split("\n")
        words = " / ".join(lines[-3:]) or "the verifier reported nothing"
        raise OSError(error.errno, f"{error.strerror} ({words})", what) from error


def attach_program(cgroup_fd: int, fd: int, flags: int, replaces: int, what: str) -> None:
    """Attach a device program to a cgroup in place of another, atomically.

    ``flags`` are those of the attached programs. With BPF_F_ALLOW_MULTI, the program ``replaces``
    is replaced; ENOENT if it isn't attached, or is attached by a link. Otherwise the only program
    is replaced.
    """
    if flags & BPF_F_ALLOW_MULTI:
        flags |= BPF_F_REPLACE
    else:
        replaces = 0
    attr = _attr("=IIIII", cgroup_fd, fd, BPF_CGROUP_DEVICE, flags, replaces)
    _bpf(BPF_PROG_ATTACH, attr, what)


def find_link(cgroup_fd: int, number: int, what: str) -> int | None:
    """Return a descriptor of the link that attaches program ``number`` to the cgroup, if any."""
    wanted = (BPF_LINK_TYPE_CGROUP, number, os.fstat(cgroup_fd).st_ino, BPF_CGROUP_DEVICE)
    link = _next_link(0, what)
    while link is not None:
        try:
            fd = _bpf(BPF_LINK_GET_FD_BY_ID, _attr("=I8x", link), what)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
        else:
            info = _object_info(fd, _attr(LINK_INFO, 0, 0, 0, 0, 0), what)
            kind, _link, program, cgroup, attach_type = struct.unpack(LINK_INFO, info)
            if (kind, program, cgroup, attach_type) == wanted:
                return fd
            os.close(fd)
        link = _next_link(link, what)
    return None


def _next_link(link: int, what: str) -> int | None:
    attr = _attr("=III", link, 0, 0)
    try:
        _bpf(BPF_LINK_GET_NEXT_ID, attr, what)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    following: int = struct.unpack("=III", attr.raw)[1]
    return following


def update_link(link_fd: int, fd: int, replaces: int, what: str) -> None:
    """Replace the program of a link, atomically."""
    _bpf(BPF_LINK_UPDATE, _attr("=IIII", link_fd, fd, BPF_F_REPLACE, replaces), what)
