"""The choice of tests for a change (scripts/lib/changed.py)."""

import changed
import pytest


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("src/gpuhook/inject.py", "gpuhook.inject"),
        ("src/gpuhook/vendors/__init__.py", "gpuhook.vendors"),
        ("simulate/src/gpuhook_simulate/disk.py", "gpuhook_simulate.disk"),
        ("docs/faq.md", ""),
        ("tests/unit/test_log.py", ""),
    ],
)
def test_a_source_path_is_mapped_to_its_module(path: str, name: str) -> None:
    assert changed.module(path) == name


def test_tests_are_chosen_by_the_modules_they_import() -> None:
    found = changed.tests_of(["src/gpuhook/base/loader/elf.py"])
    assert "tests/unit/base/loader/test_elf.py" in found
    assert "tests/unit/test_layers.py" in found
    assert "tests/unit/test_log.py" not in found


def test_a_name_imported_in_parentheses_counts_as_an_import() -> None:
    found = changed.tests_of(["src/gpuhook/vendors/nvidia/vendor.py"])
    assert "tests/unit/core/plan/test_copies.py" in found


def test_a_changed_test_is_chosen_and_a_removed_one_is_not() -> None:
    paths = ["tests/integration/test_full_disk.py", "tests/unit/test_removed_long_ago.py"]
    assert changed.tests_of(paths) == ["tests/integration/test_full_disk.py"]
    assert changed.tests_of(["docs/faq.md"]) == []
