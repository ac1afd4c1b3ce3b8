"""The best devices for a container: the shared cases, links, and invariants."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yardstick import costs_less

from gpuhook.base.errors import RequestError
from gpuhook.cluster.device_plugin.prefer import prefer
from gpuhook.cluster.device_plugin.settings import POLICIES, Settings
from gpuhook.cluster.device_plugin.state import Resource, Unit

Links = dict[str, dict[str, int]]


def gpus(
    count: int, links: Links | None = None, numa: tuple[int | None, ...] = (), **facts: Any
) -> Resource:
    numa += (None,) * (count - len(numa))
    units = tuple(Unit(f"g{n}", f"g{n}", "", f"g{n}", (), numa[n]) for n in range(count))
    return Resource("a.b/gpu", "nvidia", "V", "", units, links=links or {}, **facts)


def mig(*parts: int) -> Resource:
    units = tuple(
        Unit(f"g{gpu}m{n}", "", "", f"g{gpu}")
        for gpu, each in enumerate(parts)
        for n in range(each)
    )
    return Resource("a.b/mig", "nvidia", "V", "", units)


def policy(name: str) -> Settings:
    return Settings(shared_devices_allocation_policy=name)


def asked(resource: Resource, size: int, *must: str, without: tuple[str, ...] = ()) -> list[str]:
    free = [each for each in resource.offers() if each not in without]
    return prefer(resource, free, must, size, Settings())


# The shared cases -----------------------------------------------------------------------------


@pytest.mark.vectors("plugin_allocate", "plugin.preferred_shared")
def test_preferred_replicas_match_the_shared_cases(case: dict[str, Any]) -> None:
    facts, expected = case["input"], case["expected"]
    units = tuple(Unit(name, name, "", name) for name in facts["gpus"])
    resource = Resource("a.b/gpu", "nvidia", "V", "", units, replicas=facts["replicas_each"])
    free = facts["available"]
    free = list(resource.offers()) if free == "all" else free
    question = (resource, free, facts["must_include"], facts["size"], policy(facts["policy"]))
    if expected.get("error"):
        with pytest.raises(RequestError):
            prefer(*question)
        return
    found = prefer(*question)
    counts = Counter(each.partition("::")[0] for each in found)
    assert sorted(counts.values(), reverse=True) == expected["replicas_per_gpu_descending"]


# Whole devices ----------------------------------------------------------------------------------


def test_the_best_linked_devices_are_preferred() -> None:
    pairs = {"g0": {"g3": 4}, "g1": {"g2": 4, "g0": 1}}
    assert asked(gpus(4, pairs), 2) == ["g0", "g3"]
    assert asked(gpus(4, pairs), 2, "g1") == ["g1", "g2"]
    assert asked(gpus(4, pairs), 2, without=("g3",)) == ["g1", "g2"]
    assert asked(gpus(4, pairs), 2, without=("g3", "g2")) == ["g0", "g1"]


def test_devices_without_links_are_preferred_from_one_numa_node() -> None:
    resource = gpus(4, numa=(0, 1, 0, 1))
    assert asked(resource, 2) == ["g0", "g2"]
    assert asked(resource, 2, "g1") == ["g1", "g3"]
    assert asked(gpus(4), 2) == ["g0", "g1"]
    assert asked(gpus(4, numa=(None, None, 0, 0)), 2) == ["g2", "g3"], "unknown is not the same"


def test_links_count_more_than_numa_nodes() -> None:
    assert asked(gpus(3, {"g0": {"g2": 1}}, numa=(0, 0, 1)), 2) == ["g0", "g2"]


def test_choosing_among_sixteen_gpus_is_fast() -> None:
    """The GPUs of each of two boards are strongly linked, and weakly to the other board."""
    links: Links = {
        f"g{one}": {
            f"g{other}": 12 if one % 2 == other % 2 else 1 for other in range(16) if other != one
        }
        for one in range(16)
    }
    found: list[list[str]] = []
    assert costs_less(lambda: found.append(asked(gpus(16, links), 8)), 20), "the kubelet waits"
    assert found[0] == [f"g{n}" for n in range(0, 16, 2)]


def test_linked_devices_are_chosen_where_not_all_sets_are_compared() -> None:
    links: Links = {
        f"g{one}": {
            f"g{other}": 3 for other in range(64) if other != one and other // 16 == one // 16
        }
        for one in range(64)
    }
    resource = gpus(64, links)
    assert asked(resource, 16, "g20") == ["g20", *(f"g{n}" for n in range(16, 32) if n != 20)]


def test_an_unhealthy_device_is_preferred_only_without_another() -> None:
    units = tuple(Unit(f"g{n}", "", "", f"g{n}", reason="bad" if n == 0 else "") for n in range(3))
    resource = Resource("a.b/gpu", "nvidia", "V", "", units)
    assert asked(resource, 2) == ["g1", "g2"]
    assert asked(resource, 3) == ["g0", "g1", "g2"]


# Replicas and parts ---------------------------------------------------------------------------


def test_replicas_in_use_count_in_the_distribution() -> None:
    resource = gpus(2, replicas=3)
    free = ["g0::1", "g1::0", "g1::1", "g1::2"]
    assert prefer(resource, free, [], 2, policy("distributed")) == ["g1::0", "g1::1"]
    assert prefer(resource, free, [], 2, policy("packed")) == ["g0::1", "g1::0"]


def test_equally_used_devices_take_turns() -> None:
    resource = gpus(2, replicas=4)
    free = [each for each in resource.offers() if each != "g0::0"]
    found = prefer(resource, free, [], 3, policy("distributed"))
    assert [each.partition("::")[0] for each in found] == ["g1", "g0", "g1"]
    free = [each for each in resource.offers() if each != "g1::0"]
    found = prefer(resource, free, [], 3, policy("distributed"))
    assert [each.partition("::")[0] for each in found] == ["g0", "g1", "g0"]


def test_choosing_among_many_replicas_is_fast() -> None:
    resource = replace(mig(*(7,) * 16), replicas=100)
    free = list(resource.offers())
    found: list[list[str]] = []

    def choose() -> None:
        found.append(prefer(resource, free, [], 8, policy("distributed")))

    assert costs_less(choose, 20), "the kubelet waits"
    assert len(found[0]) == 8


def test_equally_used_mig_devices_take_turns() -> None:
    resource = replace(mig(2), replicas=3)
    free = [each for each in resource.offers() if each != "g0m1::0"]
    found = prefer(resource, free, [], 3, policy("distributed"))
    assert [each.partition("::")[0] for each in found] == ["g0m0", "g0m1", "g0m0"]


def test_devices_that_must_be_included_count_as_in_use() -> None:
    resource = gpus(2, replicas=2)
    free = list(resource.offers())
    assert prefer(resource, free, ["g1::1"], 2, policy("distributed")) == ["g1::1", "g0::0"]
    assert prefer(resource, free, ["g1::1"], 2, policy("packed")) == ["g1::1", "g1::0"]


def test_mig_devices_are_distributed_over_gpus_or_packed() -> None:
    resource = mig(2, 2, 2)
    free = [each for each in resource.offers() if each != "g1m0"]
    assert prefer(resource, free, [], 2, policy("distributed")) == ["g0m0", "g2m0"]
    assert prefer(resource, free, [], 2, policy("packed")) == ["g1m1", "g0m0"]


# What always holds ------------------------------------------------------------------------------


@st.composite
def questions(draw: st.DrawFn) -> tuple[Resource, list[str], list[str], int]:
    count = draw(st.integers(1, 7))
    names = [f"g{n}" for n in range(count)]
    scores = st.dictionaries(st.sampled_from(names), st.integers(0, 20))
    links = draw(st.dictionaries(st.sampled_from(names), scores))
    numa = tuple(draw(st.lists(st.none() | st.integers(0, 2), max_size=count)))
    resource = draw(
        st.sampled_from([gpus(count, links, numa), gpus(count, replicas=3), mig(count, 2)])
    )
    free = draw(st.permutations(list(resource.offers())))
    free = free[: draw(st.integers(1, len(free)))]
    must = draw(st.lists(st.sampled_from(free), unique=True))
    return resource, free, must, draw(st.integers(max(len(must), 1), len(free)))


@given(questions(), st.sampled_from(POLICIES))
def test_every_policy_picks_the_requested_number_of_free_devices(
    question: tuple[Resource, list[str], list[str], int], name: str
) -> None:
    resource, free, must, size = question
    found = prefer(resource, free, must, size, policy(name))
    assert len(found) == len({*found}) == size
    assert {*found} <= {*free}
    assert found[: len(must)] == must
    assert found == prefer(resource, free[::-1], must, size, policy(name)), "whatever the order"
    more = [*free, "unknown"]
    assert found == prefer(resource, more, [*must, "unknown"], size, policy(name))
    with pytest.raises(RequestError):
        prefer(resource, free, must, len(free) + 1, policy(name))


@given(questions())
def test_the_preferred_set_has_the_most_links(
    question: tuple[Resource, list[str], list[str], int],
) -> None:
    resource, free, must, size = question
    if resource.replicas > 1 or resource.name != "a.b/gpu":
        return

    def links(devices: list[str]) -> int:
        near = resource.links
        pairs = combinations(devices, 2)
        return sum(max(near.get(a, {}).get(b, 0), near.get(b, {}).get(a, 0)) for a, b in pairs)

    found = prefer(resource, free, must, size, Settings())
    others = [each for each in combinations(free, size) if {*must} <= {*each}]
    assert links(found) == max(links([*each]) for each in others)
