"""Device programs: the exact instructions of gpuhook's own, and the verdict of any program."""

import errno
import os
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.cgroup import bpf
from gpuhook.base.cgroup import device_program as code
from gpuhook.monitor.containers.cgroup_check import list_allows, program_allows

BLOCK, CHAR = 1, 2
MKNOD, READ, WRITE = 1, 2, 4
U32 = 0xFFFFFFFF

EXIT = code.instruction(code.EXIT)
DENY = code.instruction(code.SET_32, 0, imm=0) + EXIT


def run(program: bytes, kind: int, access: int, major: int, minor: int) -> int:
    """Run a program as the kernel's interpreter does; reading an unset register fails."""
    context = struct.pack("=III", access << 16 | kind, major, minor)
    registers: dict[int, int] = {}
    at = 0
    while True:
        opcode, both, offset, imm = struct.unpack_from("=BBhi", program, at * 8)
        low, high = both & 15, both >> 4
        dst, src = (low, high) if sys.byteorder == "little" else (high, low)
        at += 1
        if opcode == code.LOAD_32:
            assert src == code.R1
            registers[dst] = struct.unpack_from("=I", context, offset)[0]
        elif opcode == code.COPY_64:
            registers[dst] = registers[src]
        elif opcode == code.SET_32:
            registers[dst] = imm & U32
        elif opcode == code.AND_32:
            registers[dst] = registers[dst] & imm & U32
        elif opcode == code.SHIFT_RIGHT_32:
            registers[dst] = (registers[dst] & U32) >> imm
        elif opcode == code.EXIT:
            assert code.R1 not in registers, "the context was overwritten"
            return registers[code.R0]
        elif opcode == code.JUMP:
            at += offset
        else:
            wide = imm & 0xFFFFFFFFFFFFFFFF  # immediates are sign-extended
            taken = {
                code.JUMP_IF_EQUAL: registers[dst] == wide,
                code.JUMP_IF_NOT_EQUAL: registers[dst] != wide,
                code.JUMP_IF_ANY_BIT: bool(registers[dst] & wide),
            }[opcode]
            at += offset if taken else 0


@pytest.mark.skipif(sys.byteorder != "little", reason="the words are written little-endian")
def test_two_devices_give_the_expected_bpf_instructions() -> None:
    words = struct.unpack("<13Q", code.allow_rules([(195, 0), (510, 1)])[: 13 * 8])
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
    assert code.allow_rules([(195, 0), (510, 1)])[13 * 8 :] == struct.pack(
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
def test_bpf_rules_allow_exactly_the_given_devices(
    devices: list[tuple[int, int]], kind: int, access: int, asked: tuple[int, int]
) -> None:
    rules = code.allow_rules(devices)
    for pair in (asked, devices[-1]):
        wanted = kind == CHAR and not access & MKNOD and pair in devices
        assert run(rules + DENY, kind, access, *pair) == int(wanted)


@given(st.lists(pairs, min_size=1, max_size=5), st.lists(pairs, min_size=1, max_size=5), pairs)
def test_combined_device_programs_allow_the_devices_of_both(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    both = code.allow_rules(ours) + code.allow_rules(theirs) + DENY
    assert run(both, CHAR, READ | WRITE, *asked) == int(asked in ours or asked in theirs)


# What programs and lists of others decide -----------------------------------------------------


ALLOW = code.instruction(code.SET_32, 0, imm=1) + EXIT

# runc's form: it loads the kind as half a word, and masks and compares the access in registers.
RUNC = b"".join((
    code.instruction(0x69, 2, 1, 0),  # r2 = *(u16 *)(r1 + 0)
    code.instruction(0x61, 3, 1, 0),
    code.instruction(0x74, 3, imm=16),  # w3 >>= 16
    code.instruction(0x61, 4, 1, 4),
    code.instruction(0x61, 5, 1, 8),
    code.instruction(0x55, 2, offset=7, imm=2),  # not a character device
    code.instruction(0xBC, 1, 3),  # w1 = w3
    code.instruction(0x54, 1, imm=6),  # w1 &= 6
    code.instruction(0x5D, 1, 3, offset=4),  # more is wanted than reading and writing
    code.instruction(0x56, 4, offset=3, imm=195),  # if w4 != 195
    code.instruction(0x15, 5, offset=2, imm=255),
    code.instruction(0xB7, 0, imm=1),
    EXIT,
    code.instruction(0xB7, 0, imm=0),
    EXIT,
))  # fmt: skip


@pytest.mark.parametrize(
    ("program", "allowed"),
    [
        (ALLOW, True),
        (DENY, False),
        (code.allow_rules([(195, 3)]) + DENY, True),
        (code.allow_rules([(195, 4), (196, 3)]) + DENY, False),
        (code.allow_rules([(195, 4), (196, 3)]) + ALLOW, True),
        (RUNC, True),
        (b"", None),
        (ALLOW[:12], None),
        (EXIT, None),
        (code.instruction(code.JUMP, offset=-1), None),
        (code.instruction(code.JUMP, offset=-9) + ALLOW, None),
        (code.instruction(0x85, imm=1) + ALLOW, None),  # a call
        (code.instruction(code.LOAD_32, 0, 1, 64) + EXIT, None),
    ],
)
def test_the_verdict_of_a_device_program_is_computed(program: bytes, allowed: bool | None) -> None:
    assert program_allows(program, 195, 3) is allowed


def test_an_unlisted_device_is_denied_by_runcs_program() -> None:
    assert program_allows(RUNC, 195, 255) is False
    assert program_allows(RUNC, 196, 3) is False


@given(st.binary(max_size=400))
def test_arbitrary_program_bytes_cause_no_crash(program: bytes) -> None:
    assert program_allows(program, 195, 3) in (True, False, None)


@pytest.mark.parametrize(
    ("lines", "allowed"),
    [
        ([], False),
        (["a *:* rwm"], True),
        (["c 195:3 rw"], True),
        (["c 195:* rwm"], True),
        (["c *:* m", "c 195:3 r", "c 195:* w"], True),
        (["c 195:3 r"], False),
        (["b 195:3 rwm", "c 195:33 rwm", "c 1:3 rwm", "b *:* m"], False),
        (["", "c", "195:3 rw"], False),
    ],
)
def test_a_v1_devices_list_allows_only_full_read_and_write(lines: list[str], allowed: bool) -> None:
    assert list_allows(lines, 195, 3) is allowed


# How a program is loaded ----------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", [0, 1, 4])
def test_loading_a_program_is_retried_after_a_signal(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    answers = [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))] * interrupted

    def call(*_: object) -> int:
        if answers:
            raise answers.pop()
        return 7

    monkeypatch.setattr(bpf, "_bpf", call)
    assert bpf.load_program(bytes(16), gpl=False, what="test") == 7


def test_loading_a_program_fails_after_five_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call(*words: object) -> int:
        calls.append(words)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(bpf, "_bpf", call)
    with pytest.raises(OSError, match="temporarily unavailable"):
        bpf.load_program(bytes(16), gpl=False, what="test")
    assert len(calls) == 5
