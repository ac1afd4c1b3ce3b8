"""jsontext: reads the same as json, and edits text without changing the rest."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuhook
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.jsontext import Record

FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4)
    ),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(), JSON, max_size=5)


@given(JSON)
def test_json_written_by_the_standard_library_is_read(value: object) -> None:
    assert jsontext.loads(json.dumps(value)) == value
    assert jsontext.loads(json.dumps(value, indent=2)) == value


@given(JSON)
def test_written_json_is_read_by_the_standard_library(value: object) -> None:
    assert json.loads(jsontext.dumps(value)) == value


@given(st.text())
def test_any_text_is_read_or_refused_with_value_error(text: str) -> None:
    try:
        mine = jsontext.loads(text)
    except ValueError:
        return
    assert mine == json.loads(text, strict=False)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", '{"a":}', '{"a" 1}', "[1,]", "nul", "NaN", "[-Infinity]", '"\\q"', "1 2",
        "[" * 200_000,
    ],
)  # fmt: skip
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        jsontext.loads(text)


def test_a_number_out_of_range_is_kept() -> None:
    assert jsontext.dumps(jsontext.loads("[1e999, -1e999]")) == "[1e999,-1e999]"


def test_reads_integers_of_any_length() -> None:
    assert jsontext.loads("9" * 5000) == float("inf")
    assert jsontext.loads(f'{{"a": [1, {"9" * 5000}]}}') == {"a": [1, float("inf")]}
    with pytest.raises(ValueError, match="at character 5005"):
        jsontext.loads(f"[1, {'9' * 5000},,]")


def test_without_the_json_accelerator_results_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_json", None)
    made = importlib.util.spec_from_file_location("slow_jsontext", jsontext.__file__)
    assert made is not None
    assert made.loader is not None
    slow = importlib.util.module_from_spec(made)
    made.loader.exec_module(slow)
    text = f'{{"a":["b",{{"c":null,"d":true}},1,2.5,-1e999],"\u00e9":{"9" * 5000}}}'
    assert slow.loads(text) == jsontext.loads(text)
    assert slow.dumps(slow.loads(text)) == jsontext.dumps(jsontext.loads(text))
    with pytest.raises(TypeError, match="set is not JSON"):
        slow.dumps([set()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", '{"a":{"b":[1,2]}}'),
        ('{"x": 1}', '{"a":{"b":[1,2]},"x": 1}'),
        ('{"a": {}}', '{"a": {"b":[1,2]}}'),
        ('{"a": null}', '{"a": {"b":[1,2]}}'),
        ('{"a": {"b": null, "c": 1e999}}', '{"a": {"b": [1,2], "c": 1e999}}'),
        ('{"a": {"b": []}}', '{"a": {"b": [1,2]}}'),
        ('{"a": {"b": [ 0 ]}}', '{"a": {"b": [ 0 ,1,2]}}'),
        ('{"a": {"b": [0]}, "a": {"b": [9]}}', '{"a": {"b": [0]}, "a": {"b": [9,1,2]}}'),
    ],
)
def test_append_touches_one_place(text: str, expected: str) -> None:
    assert jsontext.append_to_list(text, ("a", "b"), ["1", "2"]) == expected


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": {"b": {}}}', "[]", '{"a": {"b": "x"}}'])
def test_append_to_another_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        jsontext.append_to_list(text, ("a", "b"), ["1"])


@given(OBJECT)
def test_append_changes_nothing_else(document: dict[str, object]) -> None:
    document.pop("list", None)
    for indent in (None, 2):
        text = json.dumps({**document, "list": [1]}, indent=indent)
        appended = json.loads(jsontext.append_to_list(text, ("list",), ['"new"']))
        assert appended == {**document, "list": [1, "new"]}


def test_put_keeps_the_rest_byte_for_byte() -> None:
    text = '{"n": 1.50, "hooks": {"prestart": [1, 2], "z": 007e0}}'.replace("007e0", "7E0")
    assert jsontext.put(text, ("hooks", "prestart"), "[2]") == text.replace("[1, 2]", "[2]")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{ "a":1 }', '{"x":{"y":2}, "a":1 }'),
        ('{"x":null,"b":1.50}', '{"x":{"y":2},"b":1.50}'),
        ('{"x": {"z":1e2}}', '{"x": {"y":2,"z":1e2}}'),
        ('{"x":{"y":[1 , 2] }}', '{"x":{"y":2 }}'),
        ('{"x":1,"x":{"y":1}}', '{"x":1,"x":{"y":2}}'),
    ],
)
def test_put_touches_one_place(text: str, expected: str) -> None:
    assert jsontext.put(text, ("x", "y"), "2") == expected


@pytest.mark.parametrize("text", ["[]", '{"x":[]}', '{"x":1}', "1"])
def test_put_into_another_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        jsontext.put(text, ("x", "y"), "2")


@given(OBJECT, st.lists(st.text(), min_size=1, max_size=3))
def test_put_sets_the_value_and_changes_nothing_else(
    document: dict[str, object], path: list[str]
) -> None:
    try:
        found = json.loads(jsontext.put(json.dumps(document, indent=1), tuple(path), "[7]"))
    except ValueError:
        return
    inner, outer = found, document
    for key in path[:-1]:
        rest = {name: value for name, value in inner.items() if name != key}
        assert rest == {name: value for name, value in outer.items() if name != key}
        inner, outer = inner[key], outer.get(key) or {}  # type: ignore[assignment]
    assert inner == {**outer, path[-1]: [7]}


def test_items_are_returned_with_their_original_text() -> None:
    assert jsontext.items('{"a": [ 1.50, {"b" :1} ,"\\u0041" ]}', ("a",)) == [
        "1.50", '{"b" :1}', '"\\u0041"',
    ]  # fmt: skip
    assert jsontext.items('{"a":[]}', ("a",)) == []
    with pytest.raises(KeyError):
        jsontext.items("{}", ("a",))
    with pytest.raises(ValueError):
        jsontext.items('{"a":1}', ("a",))


def test_dumps_refuses_values_that_are_not_json() -> None:
    with pytest.raises(TypeError):
        jsontext.dumps(object())


@pytest.mark.parametrize(
    "text",
    [
        "", " \n", "{", '{"a"', '{"a":', '{"a": [1, ', '{"a": {}', '{"a": "b', "{not}", "hello",
        '{"a": x}', '{"a": 1, b": 2}', '{"\x00": "', "\0", '{"a": 1,\0', '{"a": 1\0}', "{\udcff",
    ],
)  # fmt: skip
def test_text_refused_by_every_runtime_is_surely_broken(text: str) -> None:
    assert jsontext.surely_broken(text)


@pytest.mark.parametrize(
    "text",
    [
        "{}", "{} x", "{}}", '{"a": NaN}', '{"a": -Infinity}', '{"a": nan}', '{"a": TRUE}',
        "/**/{}",
        '{"a": 1,}', '{"a": 1 // b\n}', "{'a': 1}", '{"a": 01}', '{"a": +1}', '{"a": 1e}',
        "\ufeff{}",
        '{"a": "\\x"}', '{"a": 1}\x00', "[]", "null", '{"a":' * 100_000,
    ],
)  # fmt: skip
def test_text_accepted_by_some_runtime_is_not_surely_broken(text: str) -> None:
    assert not jsontext.surely_broken(text)


@given(OBJECT, st.integers(min_value=0))
def test_only_truncated_json_is_surely_broken(value: object, place: int) -> None:
    text = json.dumps(value)
    assert not jsontext.surely_broken(text)
    assert not jsontext.surely_broken(f"{text} {text}")
    start = text[: place % len(text)]
    if start[-1:] in ("", "{", "[", ",", ":"):
        assert jsontext.surely_broken(start)


@given(st.lists(JSON, min_size=1, max_size=5), st.data(), st.sampled_from(["", " ", "\n\t"]))
def test_replaced_items_keep_every_other_byte(
    items: list[object], data: st.DataObject, blank: str
) -> None:
    indices = data.draw(st.sets(st.integers(0, len(items) - 1)))
    before = [json.dumps(item, indent=data.draw(st.sampled_from([None, 1]))) for item in items]
    after = ['"new"' if index in indices else text for index, text in enumerate(before)]
    old, new = (
        f'{{"z":[1.50], "a"{blank}:{{"b" :[{blank}{f"{blank},".join(texts)}{blank}] ,"c":1E2}} }}'
        for texts in (before, after)
    )
    assert jsontext.replace_items(old, ("a", "b"), dict.fromkeys(indices, '"new"')) == new


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', '{"a": {"b": {}}}', '{"a": {"b": "x"}}'])
def test_replacing_items_of_a_missing_or_wrong_list_is_refused(text: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        jsontext.replace_items(text, ("a", "b"), {0: "1"})


def test_invalid_utf8_bytes_are_written_unchanged() -> None:
    text = b'"\xff\xc3 \\u00e9"'.decode("utf-8", "surrogateescape")
    read = jsontext.loads(text)
    assert jsontext.quote_bytes(read).encode("utf-8", "surrogateescape") == b'"\xff\xc3 \\u00e9"'


# In an interpreter that has loaded nothing else -----------------------------------------------


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from gpuhook.base.oci import jsontext
assert "json.decoder" not in sys.modules
for call in (jsontext.loads, lambda text: list(jsontext.members(text, 0))):
    try:
        call(sys.argv[2])
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("text", ["{", '{"a', '{"a": "b', '{"a": [1,', "{'a': 1}", '{"a": "\\x"}'])
def test_invalid_json_raises_value_error_without_the_json_module(text: str) -> None:
    folder = str(Path(gpuhook.__file__).parents[1])
    words = [sys.executable, "-I", "-S", "-c", PROGRAM, folder, text]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2


# Records --------------------------------------------------------------------------------------


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


def test_record_fields_are_arguments_in_order() -> None:
    parts = (Part("x"), Part(name="y", size=2))
    assert vars(WHOLE) == {"title": "a", "names": {"index": ("0",)}, "parts": parts}
    more = More("a", {}, (), (1,))
    assert (more.title, more.extra, Part("x").size) == ("a", (1,), 1)
    assert more != Whole("a", {})
    assert len({Part("x"), Part("x", 1), Part("x", 2)}) == 2


def test_too_many_record_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        Part("x", 1, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize("words", [{}, {"size": 1}, {"name": "x", "colour": 2}])
def test_missing_or_unknown_record_fields_are_refused(words: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Part(**words)  # type: ignore[arg-type]


def test_records_survive_conversion_to_json_and_back() -> None:
    for record in (WHOLE, More("a", {}, (), (1, 2))):
        assert type(record).from_json(record.to_json()) == record
    assert [*WHOLE.to_json()] == ["names", "parts", "title"]
    assert [*More("a", {}).to_json()] == ["names", "parts", "title", "extra"]


@pytest.mark.parametrize("data", [7, [1], None, {"title": "a"}, {**WHOLE.to_json(), "parts": [7]}])
def test_data_that_is_no_valid_record_is_refused(data: object) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        Whole.from_json(data)  # type: ignore[arg-type]


def test_a_copy_with_changed_fields_leaves_the_original_unchanged() -> None:
    other = WHOLE.but(title="b")
    assert (other.title, other.parts, WHOLE.title) == ("b", WHOLE.parts, "a")


class Bare(Record):
    """A record whose instances are created without __init__."""

    name: str = "x"


def test_a_record_made_without_init_is_compared() -> None:
    made, other = Bare.__new__(Bare), Bare.__new__(Bare)
    assert made == other
    assert hash(made) == hash(other)
    assert made.to_json() == {"name": "x"}
