"""Text of metrics, equal to prometheus_client's to the byte, and readable by its parsers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.parser import text_string_to_metric_families

from gpuhook.metrics.text import encode, is_openmetrics

Families = list[Any]

_words = st.text(alphabet=st.sampled_from('a"\\\n {},=é\N{WHITE SQUARE}'), max_size=8)
_numbers = st.floats(width=64) | st.integers(min_value=-(1 << 70), max_value=1 << 70)

_openmetrics: Callable[[Any], bytes] = openmetrics_exposition.generate_latest  # without types


class _Registry:
    """A registry with the families that prometheus_client's own functions ask for."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        yield from self._families


@st.composite
def _families(draw: Callable[[Any], Any]) -> Families:
    found: Families = []
    for number, kind in enumerate(draw(st.lists(st.sampled_from("gc"), max_size=4))):
        name, about = f"family_{number}", draw(_words)
        made = {"g": GaugeMetricFamily, "c": CounterMetricFamily}[kind]
        family = made(name, about, labels=["one", "Two", "_3"])
        for values in draw(st.lists(st.tuples(_words, _words, _words), max_size=3, unique=True)):
            family.add_metric(values, draw(_numbers))
        found.append(family)
    return found


@given(_families())
def test_the_text_equals_that_of_prometheus_client(families: Families) -> None:
    registry: Any = _Registry(families)
    assert encode(families, openmetrics=False) == exposition.generate_latest(registry)
    assert encode(families, openmetrics=True) == _openmetrics(registry)


@given(st.lists(_words, min_size=1, max_size=4, unique=True))
def test_label_values_survive_a_round_trip(words: list[str]) -> None:
    family = GaugeMetricFamily("family", "About \\ and \n.", labels=["label"])
    for number, word in enumerate(words):
        family.add_metric([word], number)
    text = encode([family], openmetrics=False).decode()
    [found] = text_string_to_metric_families(text)
    assert {each.labels["label"]: each.value for each in found.samples} == {
        word: number for number, word in enumerate(words)
    }


def test_families_without_labels_or_samples_are_written() -> None:
    families = [GaugeMetricFamily("one", "1.", value=1.5), GaugeMetricFamily("none", "0.")]
    text = b"# HELP one 1.\n# TYPE one gauge\none 1.5\n# HELP none 0.\n# TYPE none gauge\n"
    assert encode(families, openmetrics=False) == text
    assert encode(families, openmetrics=True) == text + b"# EOF\n"


def test_counters_without_the_total_suffix_keep_their_names() -> None:
    """OpenMetrics has no counter whose name doesn't end in _total."""
    family = Metric("COUNTED", "About.", "counter")
    family.add_sample("COUNTED", {}, 3)
    empty = Metric("NONE", "About.", "counter")
    for openmetrics, kind in ((False, "counter"), (True, "unknown")):
        text = encode([family, empty], openmetrics=openmetrics).decode()
        assert text.removesuffix("# EOF\n") == (
            f"# HELP COUNTED About.\n# TYPE COUNTED {kind}\nCOUNTED 3.0\n"
            f"# HELP NONE About.\n# TYPE NONE {kind}\n"
        )


def test_undecodable_label_values_are_escaped_and_stay_distinct() -> None:
    family = GaugeMetricFamily("family", "About.", labels=["label"])
    words = ["\udcff", "\udcfe", "?"]
    for word in words:
        family.add_metric([word], 1)
    for openmetrics in (False, True):
        text = encode([family], openmetrics=openmetrics).decode()
        values = {line.partition('"')[2].rpartition('"')[0] for line in text.splitlines()}
        assert {r"\\udcff", r"\\udcfe", "?"} <= values  # each value stays distinct


@pytest.mark.protects(
    "label-text",
    "control characters in metric labels are escaped",
    instead='text = "\\n".join(value.split("\\n"))',
)
def test_control_characters_in_labels_are_escaped() -> None:
    family = GaugeMetricFamily("family", "About.", labels=["label"])
    family.add_metric(['a\x1b[2J\r\x85\u2028\u202e\n\t\x7f"\\'], 1)
    for openmetrics in (False, True):
        text = encode([family], openmetrics=openmetrics).decode()
        assert r'label="a\\x1b[2J\\r\\x85\\u2028\\u202e\n\\t\\x7f\"\\"}' in text


OPENMETRICS = "application/openmetrics-text"
PROMETHEUS_3 = (
    f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.6,{OPENMETRICS};version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2 = f"{OPENMETRICS}; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
CHOICES = {
    "": False,
    "*/*": False,
    PROMETHEUS_2: False,
    PROMETHEUS_3: True,
    OPENMETRICS: True,
    f" {OPENMETRICS.upper()} ; Version=1.0.0 ": True,
    f'{OPENMETRICS}; version="1.0.0"; charset=utf-8': True,
    f"text/html, {OPENMETRICS};q=0.1": True,
    f"text/plain, {OPENMETRICS}": True,
    f"text/plain; version=0.0.4; q=0.5, {OPENMETRICS}; q=0.4": False,
    f"text/plain; version=1.0.0, {OPENMETRICS}; q=0.4": True,
    f"{OPENMETRICS};q=0": False,
    f"{OPENMETRICS};q=0.000": False,
    f"{OPENMETRICS};version=2.0.0": False,
    f"{OPENMETRICS};version=q": False,
    f"{OPENMETRICS};version=1.0.0.0": False,
    f"{OPENMETRICS};version=": True,
    f"{OPENMETRICS};version": True,
    f"{OPENMETRICS};=;==;;": True,
    f"{OPENMETRICS}x": False,
    f"x;{OPENMETRICS}": False,
    **{
        f"{OPENMETRICS};q={odd}": False for odd in ("2", "1.1", "-1", "nan", "1e0", "x", "", "\xb2")
    },
    "text/plain;version=q": False,
    ";,;=,q=,,": False,
}


@pytest.mark.parametrize(("accept", "expected"), CHOICES.items())
def test_the_format_is_chosen_by_the_accept_header(accept: str, expected: bool) -> None:
    assert is_openmetrics(accept) == expected


@given(st.text(alphabet=st.sampled_from('q=;,.01 version"\t\xb2\xff') | st.characters()))
def test_any_accept_header_yields_a_format(accept: str) -> None:
    assert is_openmetrics(accept) is False
    assert is_openmetrics(f"{OPENMETRICS};version={accept}") in (True, False)
