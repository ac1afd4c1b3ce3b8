import pytest

from gpuhook.vendors.nvidia import requirements


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("9", (9,)),
        ("9.0", (9,)),
        ("9.0.0", (9,)),
        ("12.10", (12, 10)),
        ("580.65.06", (580, 65, 6)),
        ("0", ()),
        ("", None),
        (".", None),
        ("9.", None),
        (".9", None),
        ("9..0", None),
        ("-9", None),
        ("+9", None),
        (" 9", None),
        ("9 ", None),
        ("9_0", None),
        ("v9", None),
        ("9.0-rc1", None),
        ("²", None),
        ("٣.1", None),
        ("1." * 40 + "1", None),
        ("9" * 5000, None),
    ],
)
def test_parse(text: str, numbers: tuple[int, ...] | None) -> None:
    assert requirements.parse_version(text) == numbers


def test_numbers_and_not_characters_are_compared() -> None:
    ordered = ["9", "9.0.1", "12.2", "12.10", "99.1", "100"]
    parsed = [requirements.parse_version(text) for text in ordered]
    assert parsed == sorted(parsed, key=lambda numbers: numbers or ())
