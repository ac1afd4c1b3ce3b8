"""BPF instructions for a cgroup device program that allow a few character devices.

Sources: Documentation/bpf/standardization/instruction-set.rst, include/uapi/linux/bpf.h.
"""

import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

INSTRUCTION_SIZE = 8

# Opcodes: operation, width, and register or immediate operand.
LOAD_32 = 0x61  # BPF_LDX | BPF_MEM | BPF_W
COPY_64 = 0xBF  # BPF_ALU64 | BPF_MOV | BPF_X
SET_32 = 0xB4  # BPF_ALU | BPF_MOV | BPF_K
AND_32 = 0x54  # BPF_ALU | BPF_AND | BPF_K
SHIFT_RIGHT_32 = 0x74  # BPF_ALU | BPF_RSH | BPF_K
JUMP = 0x05  # BPF_JMP | BPF_JA
JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_IF_NOT_EQUAL = 0x55  # BPF_JMP | BPF_JNE | BPF_K
JUMP_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
EXIT = 0x95  # BPF_JMP | BPF_EXIT

# struct bpf_cgroup_dev_ctx: the access type has the device type in its lower half and the
# requested access in its upper half.
CTX_ACCESS_TYPE, CTX_MAJOR, CTX_MINOR = 0, 4, 8
BPF_DEVCG_DEV_CHAR = 2
BPF_DEVCG_ACC_READ, BPF_DEVCG_ACC_WRITE = 2, 4

# The registers: R0 is the verdict, R1 the context, which stays unchanged.
R0, R1, WANTED, KIND, MAJOR, MINOR = range(6)


def instruction(code: int, dst: int = 0, src: int = 0, offset: int = 0, imm: int = 0) -> bytes:
    """Return one instruction (struct bpf_insn); ``offset`` counts instructions."""
    # The two registers are bit fields, so their order depends on the byte order.
    registers = dst | src << 4 if sys.byteorder == "little" else dst << 4 | src
    return struct.pack("=BBhi", code, registers, offset, imm)


def allow_rules(devices: "Sequence[tuple[int, int]]", verdict: int = 1) -> bytes:
    """Return instructions that allow the devices (major, minor), and else continue.

    With ``verdict`` 0 they deny them.

    Any program may follow: the registers that a program may read at its start are unchanged.
    That decides on reading and writing; other access is left to the program that follows.
    """
    checks = b""
    for index, (major, minor) in enumerate(devices):
        to_verdict = 2 * (len(devices) - index) - 1
        checks += instruction(JUMP_IF_NOT_EQUAL, MAJOR, offset=1, imm=major)
        checks += instruction(JUMP_IF_EQUAL, MINOR, offset=to_verdict, imm=minor)
    decision = b"".join((
        instruction(JUMP, offset=2),
        instruction(SET_32, R0, imm=verdict),
        instruction(EXIT),
    ))  # fmt: skip
    past = len(checks + decision) // INSTRUCTION_SIZE
    more_than_rw = ~(BPF_DEVCG_ACC_READ | BPF_DEVCG_ACC_WRITE)
    head = (
        instruction(LOAD_32, WANTED, R1, CTX_ACCESS_TYPE),
        instruction(LOAD_32, MAJOR, R1, CTX_MAJOR),
        instruction(LOAD_32, MINOR, R1, CTX_MINOR),
        instruction(COPY_64, KIND, WANTED),
        instruction(AND_32, KIND, imm=0xFFFF),
        instruction(JUMP_IF_NOT_EQUAL, KIND, offset=past + 2, imm=BPF_DEVCG_DEV_CHAR),
        instruction(SHIFT_RIGHT_32, WANTED, imm=16),
        instruction(JUMP_IF_ANY_BIT, WANTED, offset=past, imm=more_than_rw),
    )
    return b"".join(head) + checks + decision
