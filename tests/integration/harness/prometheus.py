"""A Prometheus for the tests, which scrapes gpuhook metrics."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.commands import daemon, run
from harness.images import REPOSITORY

PACKAGING = REPOSITORY / "packaging"
RULES = PACKAGING / "prometheus/gpuhook.rules.yml"
_CONFIG = """
global: {{scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 2s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: gpuhook
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
_LISTENS = re.compile(r'msg="Listening on".* address=127\.0\.0\.1:(\d+)')
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch() -> Path:
    """Return the folder of Prometheus' programs, downloaded the first time."""
    command = REPOSITORY / "scripts/lib/prometheus"
    return Path(run([command], timeout=600.0).ok().stdout.splitlines()[-1])


@dataclass(frozen=True)
class Prometheus:
    """A server that listens on a port of this host."""

    port: int

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query; raise AssertionError if the query fails."""
        words = urllib.parse.urlencode({"query": expression})
        found: list[dict[str, Any]] = self._get(f"query?{words}")["result"]
        return found

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Return the labels of the alerts that fire, by the names of their rules."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in self._get("alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    def _get(self, path: str) -> dict[str, Any]:
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}"
        try:
            with _NO_PROXY.open(address, timeout=300) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        said = json.loads(body)
        assert said["status"] == "success", (path, said)
        data: dict[str, Any] = said["data"]
        return data


@contextmanager
def prometheus(programs: Path, folder: Path, port: int) -> Iterator[Prometheus]:
    """Run a server that scrapes a port of this host every two seconds, with our rules."""
    folder.mkdir()
    config, log = folder / "prometheus.yml", folder / "log"
    config.write_text(_CONFIG.format(rules=RULES, port=port))
    argv: list[str | Path] = [
        programs / "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with daemon(argv, log, lambda: _is_ready(log)):
        yield Prometheus(_port(log))


def _port(log: Path) -> int:
    found = _LISTENS.search(log.read_text())
    return int(found[1]) if found else 0


def _is_ready(log: Path) -> bool:
    port = _port(log)
    if not port:
        return False
    try:
        with _NO_PROXY.open(f"http://127.0.0.1:{port}/-/ready", timeout=300) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
