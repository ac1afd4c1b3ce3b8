"""Time and order of the search for containers without a record."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhook.base.oci.spec import ContainerState
from gpuhook.core.records import records
from gpuhook.monitor.containers import device_users
from gpuhook.monitor.containers.groups import ContainerIdentity
from gpuhook.monitor.host.namespaces import NamespaceScan


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The processes that were examined, in a search where each process has a device."""
    found: list[str] = []

    def nodes(entry: str, *_: object) -> Iterator[tuple[int, int]]:
        found.append(entry)
        yield 195, 0

    monkeypatch.setattr(device_users, "HostNodes", lambda _: None)
    monkeypatch.setattr(device_users, "has_our_root", lambda _: False)
    monkeypatch.setattr(device_users, "nodes_of", nodes)
    return found


def others(*names: str) -> list[tuple[str, ContainerIdentity]]:
    first = 1_000_000_000
    return [(str(number), ContainerIdentity(name, "")) for number, name in enumerate(names, first)]


@pytest.mark.protects(
    "each-identity",
    "containers without a record are kept apart even if they have the same name",
    instead=(
        "found.setdefault(ContainerIdentity(identity.name, identity.engine), made).nodes |= nodes"
    ),
)
def test_containers_with_the_same_name_are_kept_apart(
    looked_at: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = [
        ("7", ContainerIdentity("box", "", "/a/box")),
        ("8", ContainerIdentity("box", "", "/b/box")),
    ]
    monkeypatch.setattr(device_users, "_others", lambda *_: iter([*seen, ("9", seen[0][1])]))
    found = device_users.running([], str(tmp_path)).containers
    assert [(each.name, each.pid) for each in found] == [("box", 7), ("box", 8)]


@pytest.mark.protects(
    "everybodys-first",
    "one process of each container is examined before a second one of any container",
)
def test_one_process_per_container_is_examined_before_any_second(
    looked_at: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = others("user@1", "user@1", "user@1", "web", "user@1", "db", "web")
    monkeypatch.setattr(device_users, "_others", lambda *_: iter(seen))
    found = device_users.running([], str(tmp_path))
    assert [int(entry) % 10 for entry in looked_at] == [0, 3, 5, 1, 6, 2, 4]
    assert [each.name for each in found.containers] == ["db", "user@1", "web"]
    assert found.problems == ()


@pytest.mark.protects(
    "look-ends", "the search for containers without a record stops at a time limit"
)
def test_the_search_for_device_users_stops_at_its_time_limit(
    looked_at: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = iter([0.0, *([1.0] * 4), *([3.0] * 100)])
    monkeypatch.setattr(
        device_users, "NamespaceScan", lambda: NamespaceScan(2.0, lambda: next(times))
    )
    monkeypatch.setattr(device_users, "_others", lambda *_: iter(others(*"abcdefgh")))
    found = device_users.running([], str(tmp_path))
    assert [each.name for each in found.containers] == ["a", "b"]
    [problem] = found.problems
    assert problem.startswith("Containers without a record may be missing")


@pytest.mark.protects(
    "look-limit",
    "the number of listed containers without a record is limited",
    instead="containers = sorted([*recorded, *others], key=lambda each: each.name)",
)
def test_containers_without_a_record_beyond_the_limit_are_left_out(
    looked_at: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for count in (device_users.MAX_CONTAINERS, device_users.MAX_CONTAINERS + 1):
        seen = others(*(f"box{number:04}" for number in range(count)))
        monkeypatch.setattr(device_users, "_others", lambda *_, seen=seen: iter(seen))
        found = device_users.running([], str(tmp_path))
        assert len(found.containers) == device_users.MAX_CONTAINERS
        assert len(found.problems) == count - device_users.MAX_CONTAINERS


def test_a_damaged_record_is_reported_and_hides_no_container(tmp_path: Path) -> None:
    process = os.open("/proc/self", os.O_PATH)
    try:
        record = records.describe(ContainerState("web", os.getpid(), "", None), None, [])
        with records.RecordWriter(str(tmp_path), process, record):
            folder = tmp_path / records.FOLDER
            damaged = folder / _record_of(os.getppid())
            damaged.write_text("{}")
            found = device_users.running([], str(tmp_path))
            assert [each.name for each in found.containers] == ["web"]
            assert [f"{tmp_path}: {damaged.name}" in each for each in found.problems] == [True]
    finally:
        os.close(process)


def _record_of(pid: int) -> str:
    process = os.open(f"/proc/{pid}", os.O_PATH)
    try:
        return records.name_of_process(process)
    finally:
        os.close(process)
