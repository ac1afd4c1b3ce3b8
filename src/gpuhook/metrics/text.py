"""Prometheus' two text formats for prometheus_client's families.

The output equals prometheus_client's own to the byte, except for unprintable characters in label
values, and for counters whose name doesn't end in _total. prometheus_client validates each label
name of each sample again, and with hundreds of containers that takes longer than all other steps.
Its choice of a format also fails for some Accept headers.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.utils import floatToGoString

from gpuhook.base.errors import printable

Family = Any  # prometheus_client's, which is untyped
_number: Callable[[float], str] = floatToGoString  # untyped, too
# The content types, by whether they are OpenMetrics.
TYPES = {
    False: "text/plain; version=0.0.4; charset=utf-8",
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
_WEIGHT = re.compile(r"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")  # RFC 9110, 12.4.2


def is_openmetrics(accept: str) -> bool:
    """Tell whether an Accept header prefers OpenMetrics 1.0.0 to text format 0.0.4.

    Parts that violate RFC 9110, 12.5.1, are ignored: all clients read 0.0.4.
    """
    weights = {True: 0.0, False: 0.0}
    for each in accept.split(","):
        kind, *parameters = [word.strip(" \t").lower() for word in each.split(";")]
        given = dict(word.split("=", 1) for word in parameters if "=" in word)
        weight, version = given.get("q", "1"), given.get("version", "").strip('"')
        if not _WEIGHT.fullmatch(weight):
            continue
        for openmetrics, content_type in TYPES.items():
            ours, _, rest = content_type.partition("; version=")
            if kind == ours and version in ("", rest.partition(";")[0]):
                weights[openmetrics] = max(weights[openmetrics], float(weight))
    return weights[True] > 0 and weights[True] >= weights[False]


def encode(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """Return gauges and counters as OpenMetrics 1.0.0, or as text format 0.0.4.

    A counter that isn't a CounterMetricFamily has samples of its own name, without _total. Names
    aren't checked: they must consist of letters, digits, _ and :. Of samples with the same labels
    only the first is written, because clients reject duplicate series.
    """
    known: dict[str, str] = {}  # label values, escaped
    lines: list[str] = []
    for family in families:
        lines += _head(family, openmetrics=openmetrics)
        series: dict[str, float] = {}
        for sample in family.samples:
            labels = _labels(sample.labels, known) if sample.labels else ""
            series.setdefault(f"{sample.name}{labels}", sample.value)  # protects: series-once
        lines += [f"{name} {_number(value)}\n" for name, value in series.items()]
    return "".join([*lines, "# EOF\n"] if openmetrics else lines).encode()


def _head(family: Family, *, openmetrics: bool) -> Iterator[str]:
    name, kind = family.name, family.type
    is_total = isinstance(family, CounterMetricFamily)
    about = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        about = about.replace('"', r"\"")
        kind = "unknown" if kind == "counter" and not is_total else kind  # it must end in _total
    elif is_total:
        name = f"{name}_total"
    yield f"# HELP {name} {about}\n"
    yield f"# TYPE {name} {kind}\n"


def _labels(labels: dict[str, str], known: dict[str, str]) -> str:
    pairs = [
        f'{name}="{known.get(value) or _escaped(value, known)}"'
        for name, value in sorted(labels.items())
    ]
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str, known: dict[str, str]) -> str:
    # A tenant may have chosen it, and it may not be text: unprintable characters are escaped.
    text = "\n".join(map(printable, value.split("\n")))  # protects: label-text
    found = text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    known[value] = found
    return found
