"""Series named by the dashboard, the alerts and the metrics page: all are the exporter's."""

import re
from pathlib import Path

import dashboard
import pytest

from gpuhook.cluster.device_plugin import service as plugin
from gpuhook.cluster.dra import service as dra
from gpuhook.metrics import exporter
from gpuhook.metrics.model import SeriesOptions, Snapshot
from gpuhook.monitor.service_metrics import Calls
from gpuhook.monitor.vendor_parts import FATAL
from gpuhook.monitor.vendors.nvidia.xids import XIDS

PAGE = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
NAMES = re.compile(r"\b(?:gpuhook|container_accelerator|DCGM_FI_(?:DEV|PROF))_\w+")
# A page may leave these prefixes out of a name if it shows them next to the name.
PREFIXES = ("container_accelerator", "DCGM_FI_DEV_")


def series() -> set[str]:
    """Return the names of all series of the exporter."""
    every = SeriesOptions(cadvisor=True, dcgm=True)
    body = exporter.text(Snapshot(), every, 0.0, openmetrics=False)
    return set(re.findall(r"^# TYPE (\S+)", body.decode(), re.MULTILINE))


@pytest.mark.parametrize("path", [dashboard.DASHBOARD, dashboard.RULES], ids=lambda path: path.name)
def test_dashboard_and_alerts_name_only_exported_series(path: Path) -> None:
    named = set(NAMES.findall(path.read_text()))
    assert len(named) >= 7
    assert named <= series()


def test_the_metrics_page_lists_each_series() -> None:
    words = set(re.findall(r"\w+", PAGE))
    missing = [
        name
        for name in series()
        if not {name, *(name.removeprefix(prefix) for prefix in PREFIXES)} & words
    ]
    assert missing == []


def test_the_metrics_page_names_no_missing_series() -> None:
    named = {name for name in NAMES.findall(PAGE) if not name.endswith("_")}
    text = "".join(Calls(each.METRICS, "", ()).text() for each in (plugin, dra))
    of_services = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert of_services <= named
    assert named <= series() | of_services


def test_the_metrics_page_names_each_alert() -> None:
    assert [rule["alert"] for rule in dashboard.rules() if f"`{rule['alert']}`" not in PAGE] == []


def test_dashboard_panels_fit_the_grid_without_overlap() -> None:
    every = dashboard.load()["panels"]
    assert len({each["id"] for each in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"])
                 for y in range(place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells


def test_each_query_uses_the_chosen_source_and_variables() -> None:
    known = {each["name"] for each in dashboard.load()["templating"]["list"]}
    assert known == {"datasource", "job", "instance", "gpu", "container"}
    for title, expression in dashboard.queries():
        used = set(re.findall(r"\$(\w+)", expression)) - {"1", "__rate_interval", "__range"}
        assert used <= known, title
    for panel in dashboard.panels():
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {each["uid"] for each in sources} == {"${datasource}"}


def test_xids_excluded_from_alerts_are_all_nonfatal_ones() -> None:
    harmless = [str(xid) for xid, (action, _) in sorted(XIDS.items()) if action != FATAL]
    found = re.findall(r'xid!~"([^"]*)"', dashboard.RULES.read_text())
    assert found == ["|".join(harmless)] * 2
