"""What device programs and v1 lists decide, of programs such as runtimes and systemd load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.ground.cgroup import device_program as code
from gpuhook.tools.running.verdict import list_allows, program_allows

EXIT = code.instruction(code.EXIT)
DENY = code.instruction(code.SET_32, 0, imm=0) + EXIT
ALLOW = code.instruction(code.SET_32, 0, imm=1) + EXIT

# As runc writes it: the kind by half a word, the access masked and compared by registers.
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
def test_programs(program: bytes, allowed: bool | None) -> None:
    assert program_allows(program, 195, 3) is allowed


def test_a_device_that_a_program_leaves_out() -> None:
    assert program_allows(RUNC, 195, 255) is False
    assert program_allows(RUNC, 196, 3) is False


@given(st.binary(max_size=400))
def test_any_bytes(program: bytes) -> None:
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
def test_lists(lines: list[str], allowed: bool) -> None:
    assert list_allows(lines, 195, 3) is allowed
