from typing import Any

import pytest

from gpuhook.start.request import sources

Case = dict[str, Any]


@pytest.mark.vectors("oci", "oci.lookup_env")
def test_lookup(case: Case) -> None:
    variables = sources.parse_environment(case["input"]["env"])
    name = case["input"]["name"]
    assert (name in variables) is case["expected"]["exists"]
    assert variables.get(name, "") == case["expected"]["value"]


def test_last_entry_wins() -> None:
    assert sources.parse_environment(["A=1", "B=2", "A=3"]) == {"A": "3", "B": "2"}


def test_entries_of_any_shape() -> None:
    assert sources.parse_environment(["", "=", "=x", "A", "\udcff=\udcfe"]) == {
        "": "x",
        "A": "",
        "\udcff": "\udcfe",
    }


@pytest.mark.parametrize("yes", ["1", "t", "T", "TRUE", "true", "True"])
def test_true(yes: str) -> None:
    assert sources.is_true(yes)


@pytest.mark.parametrize("no", [None, "", "0", "f", "false", "yes", "on", "tRUE", " true", "11"])
def test_not_true(no: str | None) -> None:
    assert not sources.is_true(no)


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ("", []),
        (" , ,", []),
        ("a", ["a"]),
        (" a ,,b\t,a", ["a", "b", "a"]),
        ("a b", ["a b"]),
        ("0 - 3, 5 -7,a - b,1 - ", ["0-3", "5-7", "a - b", "1 -"]),
    ],
)
def test_items(value: str, items: list[str]) -> None:
    assert sources.items(value) == items
