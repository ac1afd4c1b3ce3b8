"""Command lines are read as GNU argp reads them."""

import pytest

from gpuhook.tools.nvidia_cli.argp import FLAG, OPTIONAL, VALUE, Option, UsageError, parse

OPTIONS = (
    Option("device", "d", VALUE),
    Option("debug", "D", VALUE),
    Option("user", "u", OPTIONAL),
    Option("load-kmods", "k", FLAG),
    Option("load", "", FLAG),
    Option("csv", "c", FLAG),
)


@pytest.mark.parametrize(
    ("words", "found", "rest"),
    [
        ([], [], []),
        (["--device", "0"], [("device", "0")], []),
        (["--device=0", "x"], [("device", "0")], ["x"]),
        (["--device=", "x"], [("device", "")], ["x"]),
        (["--dev", "0", "--c"], [("device", "0"), ("csv", None)], []),
        (["--load"], [("load", None)], []),
        (["--load-"], [("load-kmods", None)], []),
        (["-kcd0"], [("load-kmods", None), ("csv", None), ("device", "0")], []),
        (["-kd", "0"], [("load-kmods", None), ("device", "0")], []),
        (["-d", "-k"], [("device", "-k")], []),
        (["-u", "x"], [("user", None)], ["x"]),
        (["-ux:y"], [("user", "x:y")], []),
        (["--user=x", "--user"], [("user", "x"), ("user", None)], []),
        (["x", "-k", "--", "-c"], [("load-kmods", None)], ["x", "-c"]),
        (["-"], [], ["-"]),
    ],
)
def test_options_anywhere(
    words: list[str], found: list[tuple[str, str | None]], rest: list[str]
) -> None:
    assert parse(words, OPTIONS, in_order=False) == (found, rest)


def test_in_order_the_first_word_ends_the_options() -> None:
    assert parse(["-k", "list", "-c", "--", "x"], OPTIONS, in_order=True) == (
        [("load-kmods", None)],
        ["list", "-c", "--", "x"],
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nope"], "unrecognized option '--nope'"),
        (["--de", "0"], "option '--de' is ambiguous; possibilities: '--device' '--debug'"),
        (["--device"], "option '--device' requires an argument"),
        (["--csv=1"], "option '--csv' doesn't allow an argument"),
        (["-kx"], "invalid option -- 'x'"),
        (["-kd"], "option requires an argument -- 'd'"),
    ],
)
def test_errors(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words, OPTIONS, in_order=False)
    assert str(caught.value) == message
