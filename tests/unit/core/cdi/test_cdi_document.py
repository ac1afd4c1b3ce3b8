"""CDI specs read as by the engines' library: accepted and refused ones, and error lines."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from timeouts import in_time

from gpuhook.core.cdi import checks, document, yaml_reader
from gpuhook.core.cdi import parse_result as reading
from gpuhook.core.cdi.document import read
from gpuhook.core.cdi.parse_result import Problem

Case = dict[str, Any]

HEAD = "cdiVersion: 0.5.0\nkind: vendor.com/gpu\n"
DEVICE = "devices: [{name: a, containerEdits: {env: [A=b]}}]\n"

# The CDI library's phrase -> gpuhook's message.
PHRASES = {
    "the spec version must be at least v0.3.0": "cdiVersion must be at least 0.3.0, not '0.1.0'",
    'invalid version "1.2.0"': "cdiVersion '1.2.0' is none of 0.3.0 to 1.1.0",
    'invalid version "not-a-version"': "cdiVersion 'not-a-version' is none of 0.3.0 to 1.1.0",
    "empty device edits": "the device 'dev1' edits nothing",
}


def of(document_: dict[str, Any]) -> reading.ParseResult:
    """Read a CDI spec from JSON text."""
    return read(json.dumps(document_).encode())


def text(value: str, head: str = HEAD + DEVICE) -> reading.ParseResult:
    return read((head + value).encode())


def sentences(reading: reading.ParseResult) -> list[str]:
    return [problem.sentence for problem in reading.problems]


def judge(reading: reading.ParseResult, expected: dict[str, Any]) -> None:
    """Compare a result with a case: ok or valid, an error, or an error with a phrase."""
    fine = expected.get("ok", expected.get("valid", False))
    assert (reading.document is not None, not reading.problems) == (fine, fine)
    if "error_contains" in expected:
        assert PHRASES[expected["error_contains"]] in sentences(reading)


@pytest.mark.vectors("cdi_versions", "cdi.version_check")
def test_version_checks_match_the_shared_cases(case: Case) -> None:
    given = case["input"]
    device = {"name": "a", "containerEdits": {"env": ["A=b"]}}
    whole = {"cdiVersion": given["cdiVersion"], "kind": "v.com/c", "devices": [device]}
    judge(of({**whole, **given["spec"]}), case["expected"])


@pytest.mark.vectors("cdi_validate", "cdi.validate_edits")
@pytest.mark.parametrize("where", ["document", "device"])
def test_validated_edits_match_the_shared_cases(case: Case, where: str) -> None:
    edits = case["input"]["containerEdits"]
    device = {"name": "a", "containerEdits": {"env": ["A=b"]}}
    whole: dict[str, Any] = {"cdiVersion": "1.1.0", "kind": "v.com/c", "devices": [device]}
    if where == "document":
        whole["containerEdits"] = edits
    else:
        device["containerEdits"] = edits
    judge(of(whole), case["expected"])


@pytest.mark.vectors("cdi_validate", "cdi.validate_device")
def test_validated_devices_match_the_shared_cases(case: Case) -> None:
    whole = {"cdiVersion": "1.1.0", "kind": "v.com/c", "devices": [case["input"]["device"]]}
    judge(of(whole), case["expected"])


@pytest.mark.vectors("cdi_validate", "cdi.read_spec", "cdi.validate_spec", "cdi.schema")
def test_validated_cdi_specs_match_the_shared_cases(case: Case) -> None:
    judge(of(case["input"]["document"]), case["expected"])


def test_a_cdi_spec_is_read_as_plain_data() -> None:
    found = text("containerEdits:\n  mounts:\n  - {hostPath: /a, containerPath: /b}\n")
    assert found.document == {
        "cdiVersion": "0.5.0",
        "kind": "vendor.com/gpu",
        "devices": [{"name": "a", "containerEdits": {"env": ["A=b"]}}],
        "containerEdits": {"mounts": [{"hostPath": "/a", "containerPath": "/b"}]},
    }


def test_all_errors_are_reported_with_their_lines() -> None:
    found = read(
        b"""\
cdiVersion: 0.3.0
kind: vendor.com
devices:
- name: 0
  containerEdits:
    env:
    - A=b
    - B
- name: a b
  containerEdits:
    deviceNodes:
    - type: f
      permissions: x
"""
    )
    assert found.problems == (
        Problem(2, "kind must be a vendor/class such as vendor.com/gpu, not 'vendor.com'"),
        Problem(4, "name needs cdiVersion 0.5.0, not '0.3.0'"),
        Problem(8, "'B' isn't NAME=VALUE"),
        Problem(9, "'a b' can't be the name of a device"),
        Problem(12, "the path of a device node is missing"),
        Problem(12, "the type of a device node is one of b, c, u and p, not 'f'"),
        Problem(13, "permissions are letters of rwm, or none, not 'x'"),
    )


def test_consequences_of_an_error_are_not_reported_as_errors() -> None:
    found = read(
        b"""\
cdiVersion: 0.5.0
devices:
- name: a
  containerEdits: {Env: 7}
- name: [b]
  containerEdit: {env: [A=b]}
- name: c
  containerEdits: {mounts: [7], deviceNodes: [{path: [], typ: c, type: x}]}
"""
    )
    assert found.problems == (
        Problem(1, "kind is missing"),
        Problem(4, "devices[0].containerEdits.env must be a list, not '7'"),
        Problem(5, "devices[1].name must be a string, not a list"),
        Problem(6, "devices[1].containerEdit isn't a field that CDI knows"),
        Problem(8, "devices[2].containerEdits.mounts[0] must be a table, not '7'"),
        Problem(8, "devices[2].containerEdits.deviceNodes[0].path must be a string, not a list"),
        Problem(8, "devices[2].containerEdits.deviceNodes[0].typ isn't a field that CDI knows"),
        Problem(8, "the type of a device node is one of b, c, u and p, not 'x'"),
    )


@pytest.mark.parametrize(
    ("value", "line", "sentence"),
    [("xyz: 1\n", 4, "xyz isn't a field that CDI knows"),
     ("containerEdits: {mounts: [{readonly: true}]}\n", 4,
      "containerEdits.mounts[0].readonly isn't a field that CDI knows"),
     ("kind: a/b\n", 4, "kind comes twice"), ("KIND: a/b\n", 4, "kind comes twice"),
     ("containerEdits:\n  env: A=b\n", 5, "containerEdits.env must be a list, not 'A=b'"),
     ("containerEdits: []\n", 4, "containerEdits must be a table, not a list"),
     ("containerEdits:\n  env: [[a]]\n", 5, "containerEdits.env[0] must be a string, not a list"),
     ("containerEdits: {additionalGids: [-1]}\n", 4,
      "containerEdits.additionalGids[0] must be a number of 32 bits, not '-1'"),
     ("containerEdits: {additionalGids: ['1']}\n", 4,
      "containerEdits.additionalGids[0] must be a number of 32 bits, not '1'"),
     ("? [a]\n: b\n", 4, "the name of a field is missing"),
     ("containerEdits: {deviceNodes: [{path: /a, major: -1}]}\n", 4,
      "the major of a device node can't be -1"),
     ("containerEdits: {hooks: [{path: /a, hookName: x}]}\n", 4,
      f"'x' is none of the hooks {', '.join(checks.HOOK_STAGES)}"),
     ("containerEdits:\n  hooks:\n  - {path: /a, hookName: poststop, env: [X]}\n", 6,
      "'X' isn't NAME=VALUE"),
     ("kind: *a\n", 4, "*a refers to nothing above it"),
     ("annotations: &a {a: *a}\n", 4, "*a is inside itself"),
     ("annotations: {a: !!int x}\n", 4, "!!int doesn't fit its value"),
     ("annotations: {a: !!binary x}\n", 4, "!!binary isn't followed by text in base 64"),
     ("annotations: {<<: x}\n", 4, "<< must be followed by a table, or a list of tables"),
     ("annotations: {<<: {a: b}, a: c}\n", 4, "annotations.a comes twice"),
     ('annotations: {"1": b, 1: c}\n', 4, "annotations['1'] comes twice")],
)  # fmt: skip
def test_an_invalid_spec_is_refused_with_line_and_reason(
    value: str, line: int, sentence: str
) -> None:
    head = HEAD.replace("0.5.0", "1.1.0") + DEVICE
    assert Problem(line, sentence) in text(value, head).problems


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"---\n", b"# x\n", b"null", b"~", b'""', b"{}", b"[]"]
)
def test_an_empty_file_is_refused(data: bytes) -> None:
    assert read(data).document is None
    assert read(data).problems


@pytest.mark.parametrize(
    "data", [b"\x00", b"kind: \xff", b"\xff\xfe\x00", b"kind: \x07", b"\xfe\xff"]
)
def test_binary_data_is_refused(data: bytes) -> None:
    assert read(data).document is None


# Results of the engines' YAML reader, obtained with sigs.k8s.io/yaml 1.3 and go-yaml 2.4.
TEXTS = {
    "0": "0", "00": "0", "007": "7", "08": "8", "0x1F": "31", "0b11": "3", "0o17": "15",
    "1_000": "1000", "_1": "_1", "+1": "1", "-0": "0", "1:0": "1:0", "1e3": "1000",
    "1e6": "1e+06", "123456.5": "123456.5", "1234567.5": "1.2345675e+06", "0.0001": "0.0001",
    "0.00001": "1e-05", "16777217.0": "1.6777216e+07", ".5": "0.5", "5.": "5", "1e400": "1e400",
    "1e39": "+Inf", "-0.0": "-0", ".inf": "+Inf", "-.INF": "-Inf", ".nan": "NaN",
    "18446744073709551615": "18446744073709551615", "18446744073709551616": "1.8446744e+19",
    "y": "true", "ON": "true", "n": "false", "Off": "false", "yEs": "yEs", "~": "", "null": "",
    "NULL": "", "nULL": "nULL", "2001-12-14": "2001-12-14", "12:30:45": "12:30:45",
    "!!str 1": "1", "!x 1": "1", "! 1": "1", '!!int "5"': "5", "!!float 5": "5",
    "!!binary aGVsbG8=": "hello", "'0x1'": "0x1", '"yes"': "yes", "|-\n    1": "1",
}  # fmt: skip


@pytest.mark.parametrize(("written", "meant"), TEXTS.items())
def test_yaml_scalars_in_string_fields_become_strings(written: str, meant: str) -> None:
    reading = text(f"annotations:\n  a: {written}\n", HEAD.replace("0.5", "0.6") + DEVICE)
    assert reading.document is not None
    assert reading.document["annotations"] == {"a": meant}


@pytest.mark.parametrize(
    ("written", "meant"),
    [("195", 195), ("0o303", 195), ("0303", 195), ("1e2", 100), ("5.0", 5), ("1_0", 10),
     ("~", None), ("5.5", ...), ("yes", ...), ("'5'", ...), ("1:0", ...), ("1e30", ...),
     ("9223372036854775808", ...), (".nan", ...)],
)  # fmt: skip
def test_yaml_values_of_number_fields_are_read_or_refused(written: str, meant: object) -> None:
    reading = text(f"containerEdits: {{deviceNodes: [{{path: /a, major: {written}}}]}}\n")
    if meant is ...:
        assert "major must be a whole number" in sentences(reading)[0]
    else:
        assert reading.document is not None
        assert reading.document["containerEdits"]["deviceNodes"][0].get("major") == meant


@pytest.mark.parametrize(("written", "meant"), [("on", True), ("No", False), ("1", None)])
def test_yaml_boolean_words_are_read_and_others_refused(written: str, meant: bool | None) -> None:
    head = HEAD.replace("0.5.0", "1.1.0") + DEVICE
    reading = text(f"containerEdits: {{intelRdt: {{enableMonitoring: {written}}}}}\n", head)
    found = reading.document and reading.document["containerEdits"]["intelRdt"]
    assert found == (None if meant is None else {"enableMonitoring": meant})


@pytest.mark.parametrize(
    "written",
    ["containerEdits:", "annotations: ~", "containerEdits: {env: ~, intelRdt: null}",
     "containerEdits: {deviceNodes: [{path: /a, uid: ~}]}"],
)  # fmt: skip
def test_a_null_field_counts_as_missing(written: str) -> None:
    assert text(written + "\n").problems == ()


def test_a_null_in_a_list_counts_as_empty() -> None:
    assert sentences(text("containerEdits: {env: [~]}\n")) == ["'' isn't NAME=VALUE"]
    assert sentences(text("containerEdits: {mounts: [~]}\n"))[0] == (
        "the hostPath of a mount is missing"
    )


def test_field_names_are_case_insensitive() -> None:
    reading = read(
        b"CDIVERSION: 0.5.0\nkInd: a/b\nDevice\xc5\xbf: [{NAME: a, containeredits: {env: [A=b]}}]\n"
    )
    assert reading.document == {
        "cdiVersion": "0.5.0",
        "kind": "a/b",
        "devices": [{"name": "a", "containerEdits": {"env": ["A=b"]}}],
    }


def test_yaml_aliases_and_merged_tables_are_resolved() -> None:
    reading = read(
        (
            HEAD + "devices:\n"
            "- &a {name: a, containerEdits: &e {env: [A=b]}}\n"
            "- {name: b, containerEdits: *e}\n"
            "- {name: c, <<: [{containerEdits: *e}]}\n"
        ).encode()
    )
    assert reading.document is not None
    edits = [device["containerEdits"] for device in reading.document["devices"]]
    assert edits == [{"env": ["A=b"]}] * 3
    edits[0]["env"].append("B=c")
    assert edits[1] == {"env": ["A=b"]}


def test_only_the_first_yaml_document_of_a_file_counts() -> None:
    assert text("---\nkind: x\n").problems == ()
    assert text("...\n{\n").problems == ()


def test_json_with_tabs_or_without_blanks_is_read() -> None:
    whole = json.loads(json.dumps(text("").document))
    for written in (json.dumps(whole, indent="\t"), json.dumps(whole, separators=(",", ":"))):
        if yaml_reader.LOADER.__name__ == "CSafeLoader" or "\t" not in written:
            assert read(written.encode()).document == whole


def test_surrogate_pairs_in_json_escapes_are_refused() -> None:
    assert read(b'{"kind": "\\ud83d\\ude00"}').document is None


def texts(kind: Any) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of a spec's text fields; only the first element of each list."""
    if isinstance(kind, list):
        yield from ((0, *rest) for rest in texts(kind[0]))
    elif isinstance(kind, dict):
        for name, inner in kind.items():
            yield from ((name.replace("*", "x"), *rest) for rest in texts(inner))
    elif kind == document.TEXT:
        yield ()


FIELDS_OF_TEXT = list(texts(document.FIELDS))
REPEATED = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 20))
MERGED = "".join(f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 10)}]}}\n" for n in range(1, 20))
CHAIN = "".join(f"x{n}: &x{n} {{<<: *x{n - 1}}}\n" for n in range(1, 5000))

# A parser compares each directive with all before it; each of these characters ends a line.
BREAKS = ("\n", "\r", "\r\n", "\x85", "\u2028", "\u2029")
DIRECTIVES = [("".join(f"%TAG !a{n}! b{end}" for n in range(100_000)), end) for end in BREAKS]

USED = "".join(f"- {{name: d{n}, containerEdits: *e}}\n" for n in range(2000))
USED = f"- {{name: d, containerEdits: &e {{env: [{'A=b, ' * 500}]}}}}\n{USED}"


@pytest.mark.parametrize(
    "data",
    [f"{HEAD}devices:\n{USED}", f"x0: &x0 [A=b]\n{REPEATED}containerEdits: {{env: *x19}}\n",
     f"x0: &x0 {{}}\n{MERGED}annotations: {{<<: *x19}}\n",
     f"x0: &x0 {{}}\n{CHAIN}annotations: {{<<: *x4999}}\n",
     "[" * 1_000_000, "{a: " * 500_000, "- " * 500_000, "? " * 500_000, "\n" * 2_000_000,
     "annotations: {" + "".join(f"a{n}: b, " for n in range(130_000)) + "}",
     "kind: " + "1" * 1_000_000, "x" * (reading.MOST_BYTES + 1), "&a " * 1_000_000,
     *(f"{tags}---{end}{HEAD}" for tags, end in DIRECTIVES)],
    ids=["used often", "aliases", "merges", "chain", "lists", "tables", "items", "keys", "lines",
         "values",
         "digits", "bytes", "anchors", *(f"directives after {each[1]!a}" for each in DIRECTIVES)],
)  # fmt: skip
def test_yaml_made_to_be_slow_is_refused_in_time(data: str) -> None:
    with in_time():
        assert read(data.encode()).document is None


@pytest.mark.protects("few-directives", "a CDI spec with too many YAML directives is refused")
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("end", BREAKS)
def test_too_many_yaml_directives_are_refused(encoding: str, end: str) -> None:
    """No tool writes directives except %YAML, but lines of a text may begin with %."""
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""
    many = "".join(f"%TAG !a{n}! b{end}" for n in range(20_000))
    with in_time():
        refused = read(f"{mark}{many}---{end}".encode(encoding))
    assert sentences(refused) == ["the file has more than 16 lines that begin with %"]
    head = "".join(f"{line}{end}" for line in HEAD.splitlines())
    for start in (f"%YAML 1.1{end}---{end}{head}", f"# {'%' * 9}{end}{head}"):
        found = read(f"{mark}{start}".encode(encoding))
        assert sentences(found) == ["the file has no device"]


@pytest.mark.protects("document-nul", "no string in a CDI spec contains a NUL character")
@pytest.mark.parametrize("written", ['"a\\0b"', '"a\\x00b"', '"a\\u0000b"', "!!binary YQBi"])
@pytest.mark.parametrize("field", FIELDS_OF_TEXT, ids=map(document.spelled, FIELDS_OF_TEXT))
def test_a_nul_character_in_any_field_is_refused(
    field: tuple[str | int, ...], written: str
) -> None:
    """C strings end at a NUL, so two readers would see different paths."""
    value = written
    for part in reversed(field):
        value = f"[{value}]" if part == 0 else f"{{{part}: {value}}}"
    said = f"{document.spelled(field)} has a NUL character, where C's texts end"
    assert said in sentences(read(value.encode()))


def test_a_cdi_spec_of_a_large_machine_is_read() -> None:
    nodes = [{"path": f"/dev/x{n}", "type": "c", "major": 1, "minor": n} for n in range(50)]
    devices = [{"name": f"d{n}", "containerEdits": {"deviceNodes": nodes}} for n in range(300)]
    assert of({"cdiVersion": "0.3.0", "kind": "a/b", "devices": devices}).problems == ()


def test_checks_accept_null_and_specs_without_line_numbers() -> None:
    """A generated spec has no line numbers, and may contain null."""
    found = checks.problems({"cdiVersion": "0.3.0", "kind": "a/b", "containerEdits": None})
    assert found == [(("devices",), "the file has no device")]


def test_a_pyyaml_without_libyaml_reads_cdi_specs() -> None:
    code = """
import sys
sys.modules["yaml._yaml"] = sys.modules["_yaml"] = None
import yaml
assert not yaml.__with_libyaml__
from gpuhook.core.cdi.document import read
assert read(sys.stdin.buffer.read()).problems == ()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=HEAD + DEVICE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
