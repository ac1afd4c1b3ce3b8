"""Records: the fields of a class are its arguments, and go to JSON and back."""

import pytest

from gpuhook.ground.oci.jsontext import Record


class Part(Record):
    name: str
    size: int = 1


class Whole(Record, parts=Part):
    title: str
    names: dict[str, tuple[str, ...]]
    parts: tuple[Part, ...] = ()


class More(Whole):
    extra: tuple[int, ...] = ()


WHOLE = Whole("a", {"index": ("0",)}, (Part("x"), Part("y", 2)))


def test_fields_are_arguments_in_their_order() -> None:
    parts = (Part("x"), Part(name="y", size=2))
    assert vars(WHOLE) == {"title": "a", "names": {"index": ("0",)}, "parts": parts}
    more = More("a", {}, (), (1,))
    assert (more.title, more.extra, Part("x").size) == ("a", (1,), 1)
    assert more != Whole("a", {})
    assert len({Part("x"), Part("x", 1), Part("x", 2)}) == 2


def test_too_many_arguments() -> None:
    with pytest.raises(TypeError):
        Part("x", 1, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize("words", [{}, {"size": 1}, {"name": "x", "colour": 2}])
def test_other_fields_are_refused(words: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Part(**words)  # type: ignore[arg-type]


def test_to_json_and_back() -> None:
    for record in (WHOLE, More("a", {}, (), (1, 2))):
        assert type(record).from_json(record.to_json()) == record
    assert [*WHOLE.to_json()] == ["names", "parts", "title"]
    assert [*More("a", {}).to_json()] == ["names", "parts", "title", "extra"]


@pytest.mark.parametrize("data", [7, [1], None, {"title": "a"}, {**WHOLE.to_json(), "parts": [7]}])
def test_what_is_no_record(data: object) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        Whole.from_json(data)  # type: ignore[arg-type]


def test_with_other_values() -> None:
    other = WHOLE.but(title="b")
    assert (other.title, other.parts, WHOLE.title) == ("b", WHOLE.parts, "a")
