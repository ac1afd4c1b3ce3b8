"""Names of CDI devices, kinds and files, and annotations."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import CdiError
from gpuhook.base.names import cdi_parts
from gpuhook.core.cdi import names

Case = dict[str, Any]


@pytest.mark.vectors("cdi_names", "cdi.qualified_name")
def test_qualified_names_match_the_shared_cases(case: Case) -> None:
    name, expected = case["input"]["name"], case["expected"]
    found = cdi_parts(name)
    assert (found is not None) == expected["qualified"]
    for part, key in zip(found or (), ("vendor", "class", "device"), strict=False):
        assert part == expected.get(key, part)
    if "split" in expected:
        assert names.split(name) == tuple(expected["split"].values())


@pytest.mark.vectors("cdi_names", "cdi.kind")
def test_kinds_match_the_shared_cases(case: Case) -> None:
    expected = case["expected"]
    assert names.split_kind(case["input"]["kind"]) == (expected["vendor"], expected["class"])


@pytest.mark.vectors("cdi_names", "cdi.file_name")
def test_file_names_match_the_shared_cases(case: Case) -> None:
    kind = case["input"]
    stem = names.file_stem(kind["vendor"], kind["class"], kind["transient_id"] or "")
    assert stem == case["expected"]["file_stem"]


def test_a_file_name_contains_no_path_separator() -> None:
    assert names.file_stem("v.com", "gpu", "a/../b") == "v.com-gpu_a_.._b"


@pytest.mark.parametrize(
    ("name", "parts"),
    [("nvidia.com/gpu.coherent=0", ("nvidia.com", "gpu.coherent", "0")),
     ("v/c.=0", None), ("v/.c=0", None), ("v/c=0.", None), ("v/c=0.1", ("v", "c", "0.1"))],
)  # fmt: skip
def test_dots_are_accepted_only_inside_a_name(
    name: str, parts: tuple[str, str, str] | None
) -> None:
    assert cdi_parts(name) == parts


@pytest.mark.parametrize(
    ("name", "parts"),
    [("", ("", "", "")), ("=0", ("", "", "=0")), ("v/c=", ("", "", "v/c=")),
     ("v/c=a=b", ("v", "c", "a=b")), ("/c=0", ("", "", "/c=0")), ("v/=0", ("", "", "v/=0")),
     ("v/c", ("", "", "v/c"))],
)  # fmt: skip
def test_a_name_without_three_parts_is_not_split(name: str, parts: tuple[str, str, str]) -> None:
    assert names.split(name) == parts


@given(st.text(alphabet="aZ0.-_:/= é\n", max_size=12))
def test_a_qualified_name_equals_its_joined_parts(name: str) -> None:
    parts = cdi_parts(name)
    kind, _, device = name.partition("=")
    assert (parts is not None) == (names.is_kind(kind) and names.is_device(device))
    if parts is not None:
        assert names.split(name) == parts
        assert "{}/{}={}".format(*parts) == name


@pytest.mark.vectors("cdi_annotations", "cdi.annotation_key")
def test_annotation_keys_match_the_shared_cases(case: Case) -> None:
    if "error" in case["expected"]:
        with pytest.raises(CdiError):
            names.annotation_key(**case["input"])
    else:
        assert names.annotation_key(**case["input"]) == case["expected"]["key"]


def test_an_overlong_annotation_key_is_refused() -> None:
    key = names.annotation_key("p" * 31, "d/" * 15 + "d")
    assert key == f"cdi.k8s.io/{'p' * 31}_{'d_' * 15}d"
    with pytest.raises(CdiError, match="63"):
        names.annotation_key("p" * 31, "d" * 32)


@pytest.mark.vectors("cdi_annotations", "cdi.annotations_write")
def test_written_annotations_match_the_shared_cases(case: Case) -> None:
    found: dict[str, str] = case["input"]["existing"]

    def write() -> dict[str, str]:
        written = found
        for each in case["input"]["requests"]:
            written = names.annotate(written, each["plugin"], each["device_id"], each["devices"])
        return written

    before = dict(found)
    if "error" in case["expected"]:
        with pytest.raises(CdiError):
            write()
    else:
        written = write()
        assert written == case["expected"]["annotations"]
        assert sorted(names.annotated(written)) == sorted(case["expected"]["parsed_any_order"])
    assert found == before


def test_an_existing_annotation_key_is_refused() -> None:
    found = names.annotate({}, "p", "d", ["v/c=0"])
    with pytest.raises(CdiError, match="exists already"):
        names.annotate(found, "p", "d", ["v/c=1"])


def test_an_annotation_without_a_device_is_refused() -> None:
    with pytest.raises(CdiError):
        names.annotate({}, "p", "d", [])


@pytest.mark.vectors("cdi_annotations", "cdi.annotations_parse")
def test_parsed_annotations_match_the_shared_cases(case: Case) -> None:
    annotations = case["input"]["annotations"]
    if "error" in case["expected"]:
        with pytest.raises(CdiError):
            names.annotated(annotations)
    else:
        assert sorted(names.annotated(annotations)) == sorted(case["expected"]["devices_any_order"])


def test_annotated_devices_are_ordered_by_key() -> None:
    found = names.annotated({"cdi.k8s.io/b": "v/c=1", "cdi.k8s.io/a": "v/c=2,v/c=0"})
    assert found == ["v/c=2", "v/c=0", "v/c=1"]


def test_another_annotation_prefix_is_read() -> None:
    assert names.annotated({"x.y/a": "v/c=1", "cdi.k8s.io/a": "v/c=2"}, "x.y/") == ["v/c=1"]
