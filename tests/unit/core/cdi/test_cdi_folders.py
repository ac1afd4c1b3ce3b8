"""Folders of CDI specs: their precedence, conflicts, and files that are read or skipped."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from timeouts import in_time

from gpuhook.core.cdi import document, folders, names, parse_result
from gpuhook.core.cdi.folders import FileError, FolderContent, IgnoredFile, ParseCache, read_folders

Case = dict[str, Any]

DOCUMENT = {
    "cdiVersion": "0.3.0",
    "kind": "v.com/g",
    "devices": [{"name": "a", "containerEdits": {"env": ["A=b"]}}],
}
TEXT = json.dumps(DOCUMENT)


def of(*devices: str, kind: str = "v.com/g") -> str:
    entries = [{"name": name, "containerEdits": {"env": [f"N={name}"]}} for name in devices]
    return json.dumps({"cdiVersion": "0.3.0", "kind": kind, "devices": entries})


def fill(folder: Path, files: dict[str, Any] | None) -> None:
    """Create a folder and its files; "remove" removes a file, and None creates no folder."""
    if files is None:
        return
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name
        if content == "remove":
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))


def with_errors(found: FolderContent) -> set[str]:
    """Return the files with errors for the CDI library: invalid ones, and those in conflict."""
    conflicts = {file for files in found.conflicts.values() for file in files}
    return {error.file for error in found.errors} | conflicts


def below(root: Path, paths: Iterable[str]) -> list[str]:
    return sorted(os.path.relpath(path, root) for path in paths)


def both(root: Path) -> list[str]:
    return [str(root / "etc"), str(root / "run")]


@pytest.mark.vectors("cdi_cache", "cdi.cache_load")
def test_devices_of_folders_match_the_shared_cases(case: Case, tmp_path: Path) -> None:
    expected = case["expected"]
    for name in case["input"]["dirs"]:
        fill(tmp_path / name, case["input"][name])
    found = read_folders(str(tmp_path / name) for name in case["input"]["dirs"])
    files = {name: os.path.relpath(each.file, tmp_path) for name, each in found.devices.items()}
    assert files == expected["devices"]
    assert below(tmp_path, with_errors(found)) == sorted(expected["files_with_errors"])
    missing = [each.file for each in found.ignored if each.reason == folders.MISSING]
    assert below(tmp_path, missing) == sorted(expected.get("dirs_with_errors", []))


@pytest.mark.vectors("cdi_cache", "cdi.cache_refresh")
def test_changed_folders_match_the_shared_cases(case: Case, tmp_path: Path) -> None:
    parses = ParseCache()
    for step, expected in zip(case["input"]["steps"], case["expected"]["after_each"], strict=True):
        for name in ("etc", "run"):
            fill(tmp_path / name, step[name])
        found = read_folders(both(tmp_path), parses)
        assert sorted(found.devices) == sorted(expected["devices"])
        of_device = {name: each.file for name, each in found.devices.items()}
        for name, folder in expected["folder_of"].items():
            assert Path(of_device[name]).parent.name == folder
        assert below(tmp_path, with_errors(found)) == sorted(expected["files_with_errors"])


@pytest.mark.vectors("cdi_cache", "cdi.scan_folder")
def test_devices_and_errors_of_a_single_spec_folder(case: Case, tmp_path: Path) -> None:
    expected = case["expected"]
    fill(tmp_path / "etc", case["input"]["files"])
    found = read_folders([str(tmp_path / "etc")])
    if "devices" in expected:
        assert sorted(found.devices) == expected["devices"]
        return
    assert below(tmp_path / "etc", found.documents) == expected["loaded"]
    assert below(tmp_path / "etc", with_errors(found)) == expected["failed"]
    kinds = {Path(file).name: names.split_kind(whole["kind"]) for file, whole in
             found.documents.items()}  # fmt: skip
    assert {name: vendor for name, (vendor, _) in kinds.items()} == expected["vendors"]
    assert {name: each for name, (_, each) in kinds.items()} == expected["classes"]


@pytest.mark.vectors("cdi_cache", "cdi.list")
def test_vendors_and_classes_match_the_shared_cases(case: Case, tmp_path: Path) -> None:
    fill(tmp_path / "etc", case["input"]["etc"])
    documents = read_folders([str(tmp_path / "etc")]).documents.values()
    kinds = [names.split_kind(whole["kind"]) for whole in documents]
    assert sorted({vendor for vendor, _ in kinds}) == case["expected"]["vendors"]
    assert sorted({each for _, each in kinds}) == case["expected"]["classes"]


def test_a_device_in_a_higher_folder_hides_a_conflict_below(tmp_path: Path) -> None:
    fill(tmp_path / "etc", {"a.json": of("x", "y"), "b.json": of("x")})
    fill(tmp_path / "run", {"c.json": of("x")})
    found = read_folders(both(tmp_path))
    assert sorted(found.devices) == ["v.com/g=x", "v.com/g=y"]
    assert found.devices["v.com/g=x"].file.endswith("run/c.json")
    assert found.devices["v.com/g=y"].edits == {"env": ["N=y"]}


def test_a_conflict_hides_devices_of_lower_folders(tmp_path: Path) -> None:
    fill(tmp_path / "etc", {"c.json": of("x")})
    fill(tmp_path / "run", {"a.json": of("x"), "b.yaml": of("x")})
    found = read_folders(both(tmp_path))
    assert found.devices == {}
    files = [str(tmp_path / "run" / name) for name in ("a.json", "b.yaml")]
    assert found.conflicts == {"v.com/g=x": files}


def test_equal_names_of_other_kinds_are_no_conflict(tmp_path: Path) -> None:
    fill(tmp_path / "etc", {"a.json": of("x"), "b.json": of("x", kind="v.com/h")})
    assert sorted(read_folders(both(tmp_path)).devices) == ["v.com/g=x", "v.com/h=x"]


def test_an_invalid_spec_file_does_not_affect_other_files(tmp_path: Path) -> None:
    fill(
        tmp_path / "etc", {"a.json": of("x"), "b.json": "{", "c.yaml": "kind: [\n", "d.json": of()}
    )
    found = read_folders(both(tmp_path))
    assert sorted(found.devices) == ["v.com/g=x"]
    assert sorted({Path(error.file).name for error in found.errors}) == [
        "b.json", "c.yaml", "d.json",
    ]  # fmt: skip
    assert {type(error.line) for error in found.errors} == {int}


def test_files_that_no_engine_reads_are_listed_with_reasons(tmp_path: Path) -> None:
    content = dict.fromkeys(("a.yml", "b.YAML", "c", "d.json~", "spec.1.tmp", "sub/e.json"), TEXT)
    fill(tmp_path / "etc", content)
    found = read_folders(both(tmp_path))
    assert found.devices == {}
    reasons = {os.path.relpath(each.file, tmp_path): each.reason for each in found.ignored}
    assert reasons == {
        **dict.fromkeys(
            [f"etc/{name}" for name in content if "/" not in name], folders.OTHER_ENDING
        ),
        "etc/sub": folders.SUB_FOLDER,
        "run": folders.MISSING,
    }


def test_devices_are_ordered_by_file_name(tmp_path: Path) -> None:
    fill(tmp_path / "etc", {name: of(name[0]) for name in ("c.json", "a.yaml", "b.json")})
    assert list(read_folders(both(tmp_path)).devices) == ["v.com/g=a", "v.com/g=b", "v.com/g=c"]


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_suffix(""))
    path.symlink_to(path.with_suffix(""))


def _link_to_folder(path: Path) -> None:
    path.symlink_to("/")


def _link_to_nothing(path: Path) -> None:
    path.symlink_to("/no/such")


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    "make", [_pipe, _link_to_pipe, _link_to_folder, _link_to_nothing, _endless, _large]
)
def test_unreadable_entries_are_reported_without_waiting(make: Any, tmp_path: Path) -> None:
    fill(tmp_path / "etc", {"good.json": of("x")})
    make(tmp_path / "etc" / "bad.json")
    with in_time():
        found = read_folders(both(tmp_path))
    assert list(found.devices) == ["v.com/g=x"]
    [error] = found.errors
    assert (Path(error.file).name, error.line) == ("bad.json", None)
    assert "can't be read" in error.message or "larger than 4 MiB" in error.message


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(TEXT)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "a.json").symlink_to("../elsewhere")
    (tmp_path / "run").symlink_to("etc")
    assert read_folders([str(tmp_path / "run")]).devices["v.com/g=a"].file == str(
        tmp_path / "run/a.json"
    )


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "etc").touch()
    found = read_folders([str(tmp_path / "etc"), "a\0b"])
    assert found.errors[0] == FileError(
        str(tmp_path / "etc"), None, "the folder can't be read: Not a directory"
    )
    assert found.errors[1].file == "a\0b"


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[bytes] = []
    real = document.read

    def read(data: bytes) -> parse_result.ParseResult:
        counted.append(data)
        return real(data)

    monkeypatch.setattr(document, "read", read)
    fill(tmp_path / "etc", {"a.json": of("x"), "b.json": "{"})
    parses = ParseCache()
    first = read_folders(both(tmp_path), parses)
    again = read_folders(both(tmp_path), parses)
    assert len(counted) == 2
    assert (first.devices, first.errors) == (again.devices, again.errors)
    os.utime(tmp_path / "etc/a.json", ns=(1, 1))
    read_folders(both(tmp_path), parses)
    assert len(counted) == 3


@pytest.mark.parametrize("keep", ["time", "size", "number"])
def test_a_changed_file_is_read_again(tmp_path: Path, keep: str) -> None:
    fill(tmp_path / "etc", {"a.json": of("x")})
    path, parses = tmp_path / "etc" / "a.json", ParseCache()
    before = path.stat()
    read_folders(both(tmp_path), parses)
    other = of("y") if keep != "number" else of("y") + " "
    if keep == "number":
        path.write_text(other)
    else:
        (tmp_path / "new").write_text(other)
        (tmp_path / "new").rename(path)
    if keep == "time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list(read_folders(both(tmp_path), parses).devices) == ["v.com/g=y"]


def test_removed_files_are_forgotten(tmp_path: Path) -> None:
    fill(tmp_path / "etc", {"a.json": of("x"), "b.json": of("y")})
    parses = ParseCache()
    read_folders(both(tmp_path), parses)
    (tmp_path / "etc/a.json").unlink()
    read_folders(both(tmp_path), parses)
    assert list(parses.known) == [str(tmp_path / "etc/b.json")]


def test_an_error_text_names_file_and_line() -> None:
    assert str(FileError("/a.json", 3, "x")) == "/a.json, line 3: x"
    assert str(FileError("/a.json", None, "x")) == "/a.json: x"
    assert IgnoredFile("a", "b").to_json() == {"file": "a", "reason": "b"}


def test_a_file_larger_than_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(TEXT + " " * parse_result.MOST_BYTES)
    errors, whole = folders.examine(str(path))
    assert (whole, [error.message for error in errors]) == (None, ["the file is larger than 4 MiB"])


# These cases are for the library's writer; gpuhook is only tested for which specs are valid.


@pytest.mark.vectors("cdi_cache", "cdi.write_spec")
def test_invalid_specs_are_refused_and_valid_ones_read_unchanged(
    case: Case, tmp_path: Path
) -> None:
    fill(tmp_path / "etc", case["input"]["files"])
    found = read_folders([str(tmp_path / "etc")])
    assert below(tmp_path / "etc", with_errors(found)) == case["expected"]["refused"]
    good = {Path(file).name: whole for file, whole in found.documents.items()}
    files = case["input"]["files"]
    assert good == {name: files[name] for name in case["expected"]["read_back_equal"]}


@pytest.mark.vectors("cdi_cache", "cdi.write_file")
def test_a_single_spec_file_is_refused_or_read_unchanged(case: Case, tmp_path: Path) -> None:
    path, expected = tmp_path / case["input"]["file"], case["expected"]
    path.write_text(json.dumps(case["input"]["document"]))
    errors, whole = folders.examine(str(path))
    assert bool(errors) == ("error" in expected)
    if "read_back_equal" in expected:
        assert whole == case["input"]["document"]


@pytest.mark.vectors("cdi_cache", "cdi.transient_specs")
def test_transient_cdi_specs_match_the_shared_cases(case: Case, tmp_path: Path) -> None:
    expected = case["expected"]
    written: list[Path] = []
    for number, step in enumerate(case["input"]["steps"]):
        if "write" in step:
            vendor, device_class = names.split_kind(step["write"]["kind"])
            stem = names.file_stem(vendor, device_class, step["transient_id"])
            written.append(tmp_path / f"{stem}.json")
            written[-1].write_text(json.dumps(step["write"]))
            errors, _ = folders.examine(str(written[-1]))
            assert bool(errors) == (number in expected.get("error_at", []))
        else:
            written[step["remove"]].unlink()
        if "devices_after_each" in expected:
            found = read_folders([str(tmp_path)])
            assert sorted(found.devices) == expected["devices_after_each"][number]
            assert len(found.documents) == expected["files_after_each"][number]
