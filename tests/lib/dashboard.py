"""Queries of our Grafana dashboard, and the effects of the alerts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PACKAGING = Path(__file__).parents[2] / "packaging"
DASHBOARD = PACKAGING / "grafana/gpuhook.json"
RULES = PACKAGING / "prometheus/gpuhook.rules.yml"
_LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")
_QUERY_RESULT = re.compile(r"query_result\((.*)\)")


def load() -> dict[str, Any]:
    """Return the dashboard."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Return the panels that have queries."""
    return [each for each in load()["panels"] if each["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Yield (purpose, PromQL) of each panel and variable."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in load()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", _of_variable(variable["query"]["query"])


def _of_variable(query: str) -> str:
    """Return PromQL for a variable's query that only Grafana understands."""
    if match := _LABEL_VALUES.fullmatch(query):
        return f"count by ({match[2]}) ({match[1]})"
    match = _QUERY_RESULT.fullmatch(query)
    assert match, query
    return match[1]


def filled(expression: str, window: str) -> str:
    """Return a query as Grafana sends it when all values are chosen."""
    for name in ("__rate_interval", "__range"):
        expression = expression.replace(f"${name}", window)
    names = "|".join(each["name"] for each in load()["templating"]["list"])
    return re.sub(rf'=~"\$(?:{names})"', '=~".*"', expression)


def rules() -> list[dict[str, Any]]:
    """Return the alerts."""
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
