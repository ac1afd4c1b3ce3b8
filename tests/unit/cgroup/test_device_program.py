"""device_program: the exact instructions, and what they decide when run."""

import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.ground.cgroup import device_program as program

BLOCK, CHAR = 1, 2
MKNOD, READ, WRITE = 1, 2, 4
U32 = 0xFFFFFFFF

DENY = program.instruction(program.SET_32, 0, imm=0) + program.instruction(program.EXIT)


def run(code: bytes, kind: int, access: int, major: int, minor: int) -> int:
    """Run a program as the kernel's interpreter does; registers never set can't be read."""
    context = struct.pack("=III", access << 16 | kind, major, minor)
    registers: dict[int, int] = {}
    at = 0
    while True:
        opcode, both, offset, imm = struct.unpack_from("=BBhi", code, at * 8)
        low, high = both & 15, both >> 4
        dst, src = (low, high) if sys.byteorder == "little" else (high, low)
        at += 1
        if opcode == program.LOAD_32:
            assert src == program.R1
            registers[dst] = struct.unpack_from("=I", context, offset)[0]
        elif opcode == program.COPY_64:
            registers[dst] = registers[src]
        elif opcode == program.SET_32:
            registers[dst] = imm & U32
        elif opcode == program.AND_32:
            registers[dst] = registers[dst] & imm & U32
        elif opcode == program.SHIFT_RIGHT_32:
            registers[dst] = (registers[dst] & U32) >> imm
        elif opcode == program.EXIT:
            assert program.R1 not in registers, "the context was overwritten"
            return registers[program.R0]
        elif opcode == program.JUMP:
            at += offset
        else:
            wide = imm & 0xFFFFFFFFFFFFFFFF  # immediates are sign-extended
            taken = {
                program.JUMP_IF_EQUAL: registers[dst] == wide,
                program.JUMP_IF_NOT_EQUAL: registers[dst] != wide,
                program.JUMP_IF_ANY_BIT: bool(registers[dst] & wide),
            }[opcode]
            at += offset if taken else 0


@pytest.mark.skipif(sys.byteorder != "little", reason="the words are written little-endian")
def test_the_instructions_for_two_devices() -> None:
    words = struct.unpack("<13Q", program.allow_rules([(195, 0), (510, 1)])[: 13 * 8])
    assert [f"{word:016x}" for word in words] == [
        "0000000000001261",  # r2 = *(u32 *)(r1 + 0)
        "0000000000041461",  # r4 = *(u32 *)(r1 + 4)
        "0000000000081561",  # r5 = *(u32 *)(r1 + 8)
        "00000000000023bf",  # r3 = r2
        "0000ffff00000354",  # w3 &= 0xffff
        "0000000200090355",  # if r3 != 2 goto +9
        "0000001000000274",  # w2 >>= 16
        "fffffff900070245",  # if r2 & ~6 goto +7
        "000000c300010455",  # if r4 != 195 goto +1
        "0000000000030515",  # if r5 == 0 goto +3
        "000001fe00010455",  # if r4 != 510 goto +1
        "0000000100010515",  # if r5 == 1 goto +1
        "0000000000020005",  # goto +2
    ]
    assert program.allow_rules([(195, 0), (510, 1)])[13 * 8 :] == struct.pack(
        "<QQ", 0x00000001000000B4, 0x0000000000000095
    )


numbers = st.one_of(st.integers(0, 4), st.integers(0, 2**20 - 1))
pairs = st.tuples(numbers, numbers)


@given(
    st.lists(pairs, min_size=1, max_size=40),
    st.sampled_from([BLOCK, CHAR]),
    st.integers(1, 7),
    pairs,
)
def test_exactly_the_devices_are_allowed(
    devices: list[tuple[int, int]], kind: int, access: int, asked: tuple[int, int]
) -> None:
    rules = program.allow_rules(devices)
    for pair in (asked, devices[-1]):
        wanted = kind == CHAR and not access & MKNOD and pair in devices
        assert run(rules + DENY, kind, access, *pair) == int(wanted)


@given(st.lists(pairs, min_size=1, max_size=5), st.lists(pairs, min_size=1, max_size=5), pairs)
def test_what_follows_decides_the_rest(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    both = program.allow_rules(ours) + program.allow_rules(theirs) + DENY
    assert run(both, CHAR, READ | WRITE, *asked) == int(asked in ours or asked in theirs)
