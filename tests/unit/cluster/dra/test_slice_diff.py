"""Writes to a pool and their order, according to the rules of generations."""

import copy
from typing import Any

import pytest
from dra_node import DRIVER, counted, counters, device, slices
from hypothesis import given
from hypothesis import strategies as some

from gpuhook.cluster.dra import slice_diff
from gpuhook.cluster.dra.slice_diff import CREATE, DELETE, UPDATE, Object, plan, quantity

OWNER = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1", "controller": True}


def pool(*contents: list[Object]) -> slice_diff.Pool:
    [made] = slice_diff.pools(slices(*contents))
    return made


class Cluster:
    """Slices in a cluster that carries out writes at once."""

    def __init__(self) -> None:
        self.there: list[Object] = []
        self.known = 0
        self.made = 0

    def write(self, wanted: slice_diff.Pool, most: int = 99, owner: Object = OWNER) -> list[str]:
        """Carry out the first writes of a plan; return all its writes."""
        found, self.known = plan(wanted, self.there, "n1", owner, self.known, slice_diff.is_same)
        for write in found[:most]:
            if write.what != CREATE:
                self.there.remove(write.there)
            if write.what != DELETE:
                self.made += 1
                sent = copy.deepcopy(slice_diff.updated(write) if write.there else write.want)
                base = sent["metadata"].pop("generateName", None)
                if base:
                    sent["metadata"].update(name=f"{base}{self.made}", uid=f"u{self.made}")
                self.there.append(sent)
        return [write.what for write in found]

    def generations(self) -> list[int]:
        return sorted(each["spec"]["pool"]["generation"] for each in self.there)

    def check(self, wanted: slice_diff.Pool) -> None:
        """Check that the cluster has the wanted devices in one complete generation."""
        assert len({*self.generations()}) == 1
        assert {each["spec"]["pool"]["resourceSliceCount"] for each in self.there} == {
            len(self.there)
        }
        found = sorted(self.there, key=lambda each: str(each["metadata"]["name"]))
        assert [each["spec"]["devices"] for each in found] == [
            each["devices"] for each in wanted.contents
        ]


def test_one_changed_slice_keeps_the_generation() -> None:
    cluster = Cluster()
    assert cluster.write(pool([device("a")], [device("b")])) == [CREATE, CREATE]
    assert cluster.generations() == [1, 1]
    assert cluster.write(pool([device("a")], [device("b")])) == []
    wanted = pool([device("a")], [device("b", "xid=79")])
    assert cluster.write(wanted) == [UPDATE]
    assert cluster.generations() == [1, 1]
    cluster.check(wanted)


@pytest.mark.protects(
    "slice-generation", "DRA: several changed resource slices of a pool get a new generation"
)
def test_several_changed_slices_get_a_new_generation() -> None:
    cluster = Cluster()
    cluster.write(pool([device("a")], [device("b")], [device("c")]))
    wanted = pool([device("a")], [device("b", "x")], [device("c", "x")])
    assert cluster.write(wanted) == [UPDATE] * 3
    assert cluster.generations() == [2, 2, 2]
    assert cluster.write(pool([device("a")])) == [DELETE, DELETE, UPDATE]
    assert cluster.generations() == [3]
    assert cluster.write(pool([device("a")], [device("b")])) == [UPDATE, CREATE]
    assert cluster.generations() == [4, 4]


def test_slices_deleted_by_the_kubelet_are_created_again() -> None:
    cluster = Cluster()
    wanted = pool([device("a")], [device("b")])
    cluster.write(wanted)
    cluster.there = []
    assert cluster.write(wanted) == [CREATE, CREATE]
    assert cluster.generations() == [2, 2]  # higher than any that other programs may remember
    del cluster.there[0]
    assert cluster.write(wanted) == [CREATE]
    assert cluster.generations() == [2, 2]


def test_a_slice_of_an_older_generation_is_deleted() -> None:
    cluster = Cluster()
    wanted = pool([device("a")])
    cluster.write(wanted)
    old = copy.deepcopy(cluster.there[0])
    old["metadata"]["name"] = f"00001-{DRIVER}-n1-x"
    cluster.there[0]["spec"]["pool"]["generation"] = 7
    cluster.there.append(old)
    assert cluster.write(wanted) == [DELETE]
    assert cluster.generations() == [7]


def test_foreign_and_duplicate_slices_are_deleted() -> None:
    """A request that was carried out although its response was lost creates a second slice."""
    cluster = Cluster()
    wanted = pool([device("a")])
    cluster.write(wanted)
    for name in (f"00000-{DRIVER}-n1-zzz", "what-somebody-made"):
        cluster.there.append(copy.deepcopy(cluster.there[0]))
        cluster.there[-1]["metadata"]["name"] = name
    assert cluster.write(wanted) == [DELETE, DELETE, UPDATE]
    cluster.check(wanted)


def test_slices_are_owned_by_the_current_node_object() -> None:
    cluster = Cluster()
    wanted = pool([device("a")])
    cluster.write(wanted)
    assert cluster.write(wanted, owner={**OWNER, "uid": "u2"}) == [UPDATE]
    cluster.there[0]["metadata"]["ownerReferences"].append({"kind": "Other"})
    assert cluster.write(wanted, owner={**OWNER, "uid": "u2"}) == []


def test_unchanged_taints_keep_their_time() -> None:
    cluster = Cluster()
    cluster.write(pool([device("a", "x"), device("b")]))
    [there] = cluster.there
    there["spec"]["devices"][0]["taints"][0]["timeAdded"] = "then"
    cluster.write(pool([device("a", "x"), device("b", "y")]))
    first, second = cluster.there[0]["spec"]["devices"]
    assert first["taints"][0]["timeAdded"] == "then"
    assert "timeAdded" not in second["taints"][0]
    cluster.write(pool([device("a", "x=1"), device("b", "y")]))
    assert "timeAdded" not in cluster.there[0]["spec"]["devices"][0]["taints"][0]


NAMES = some.lists(some.sampled_from("abcdefgh"), unique=True, max_size=4)
STEPS = some.tuples(some.lists(NAMES, min_size=1, max_size=4), some.integers(0, 5), some.booleans())


@given(some.lists(STEPS, max_size=6), some.data())
def test_any_interrupted_writes_are_repaired_by_the_next(steps: list[Any], data: Any) -> None:
    """Plans are cut off anywhere, and slices are deleted; the next plan repairs all of it."""
    cluster = Cluster()
    for contents, most, forgets in steps:
        cluster.write(pool(*[[device(name) for name in names] for names in contents]), most)
        if cluster.there and data.draw(some.booleans()):
            cluster.there.remove(data.draw(some.sampled_from(cluster.there)))
        if forgets:
            cluster.known = 0  # as in a new process
    wanted = pool([device("a")], [device("b", "x")])
    before = max(cluster.generations(), default=0)
    cluster.write(wanted)
    cluster.check(wanted)
    assert cluster.generations()[0] >= before
    assert cluster.write(wanted) == []


# Comparing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [("1000", "1k"), ("1024", "1Ki"), ("0.5", "500m"), ("1e3", "1000"), ("80Gi", "85899345920")],
)
def test_equal_quantities_are_recognized(one: str, other: str) -> None:
    assert quantity(one) == quantity(other)
    assert quantity(one) != quantity("7")
    assert quantity("1..2") == "1..2"
    assert quantity("1Q") == "1Q"


def test_only_a_changed_device_causes_a_slice_update() -> None:
    cluster = Cluster()
    wanted = pool([device("a")])
    cluster.write(wanted)
    [there] = cluster.there
    there["spec"]["devices"][0]["capacity"]["cores"]["value"] = "132k"
    there["spec"]["devices"][0]["bindsToNode"] = False  # a field that the server has added
    there["metadata"]["labels"] = {"somebody": "else"}
    assert cluster.write(wanted) == []
    there["spec"]["devices"][0]["attributes"]["more"] = {"int": 1}
    assert cluster.write(wanted) == [UPDATE]
    assert cluster.there[0]["metadata"]["labels"] == {"somebody": "else"}


# Gates that are off -------------------------------------------------------------------------------


def names(found: list[slice_diff.Pool]) -> list[str]:
    return [
        each["name"]
        for one in found
        for content in one.contents
        for each in content.get("devices", [])
    ]


def test_without_taints_unhealthy_devices_are_left_out() -> None:
    given = slice_diff.pools(slices([device("a", "x"), device("b"), device("c", "x=1:None")]))
    found = slice_diff.without(given, {"taints"})
    assert names(found) == ["b", "c"]
    assert "taints" not in str(found)


def test_without_counters_no_device_overlaps_another() -> None:
    """Of a whole GPU and a part only the GPU is published; parts that fit stay together."""
    devices = [counted("whole", "g0", 7), counted("part", "g0", 3), *(
        counted(f"m{number}", "g1", 3) for number in range(3))]  # fmt: skip
    given = slice_diff.pools([counters("g0", "g1"), *slices([*devices, device("plain")])])
    for lacking in ({"sharedCounters"}, {"consumesCounters"}, {"consumesCounters", "taints"}):
        found = slice_diff.without(given, lacking)
        assert names(found) == ["whole", "m0", "m1", "plain"]
        assert "ounters" not in str(found)
    assert slice_diff.without(given, set()) == given


def test_nothing_left_is_one_empty_slice() -> None:
    [found] = slice_diff.without(slice_diff.pools([counters("g0")]), {"sharedCounters"})
    assert found.contents == ({"devices": []},)
