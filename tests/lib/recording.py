"""A pytest plugin that records the results of a run in the file of ``--results FILE``.

The file lists the tested parts, the programs and their versions, and the outcomes.
docs/support.md is made from such files; scripts/lib/results.py describes their format. A run
that was stopped, or couldn't collect its tests, writes no file. With ``--claimed FILE`` a run
fails if it lacks something that an earlier run has.

A test that reaches an engine without ``harness.commands``, such as one on another machine,
records the engine itself: ``record_property("ran", [NAME, VERSION, DISTRIBUTION, CGROUPS])``.
"""

import os
import platform
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
import ran
import results

from gpuhook import __version__
from gpuhook.vendors import registry

# The beginning of a test file's name -> the topic of its tests. The first match counts.
KINDS = {
    "test_cdi": "CDI documents",
    "test_doctor_cdi": "CDI documents",
    "test_hostile": "hostile images and users",
    "test_parsers": "command lines",
    "test_kubernetes": "Kubernetes",
    "test_device_plugin": "Kubernetes",
    "test_metrics_pods": "Kubernetes",
    **dict.fromkeys(("test_dra", "test_labels", "test_nri"), "Kubernetes"),
    "test_swarm": "Swarm",
    "test_install": "install",
    "test_rootless": "rootless",
    **dict.fromkeys(
        ("test_declared", "test_second_vendor",
         *(f"test_{name.partition('_')[0]}" for name in registry.VENDORS if name != "nvidia")),
        "other vendors"),
}  # fmt: skip
OTHER = "containers"
_RANK = ("passed", "skipped", "failed")
_SECURITY = {
    "AppArmor": ("/sys/module/apparmor/parameters/enabled", "Y"),
    "SELinux": ("/sys/fs/selinux/enforce", "1"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", help="write what was tested, as JSON")
    says = "with --results: fail if nothing passed of something that an earlier FILE has"
    parser.addoption("--claimed", metavar="FILE", help=says)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path:
        ran.ACTIVE = True
        if not hasattr(config, "workerinput"):  # with pytest-xdist, only the main process writes
            config.pluginmanager.register(Recorder(config, Path(path)))


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    ran.begin()
    yield
    item.user_properties.extend(("ran", list(program)) for program in ran.noted())


class Recorder:
    """The collected outcomes of tests in all processes of a run, written when the run ends."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path.absolute()
        self._path.unlink(missing_ok=True)  # a file of an earlier run
        self._host = host()
        self._lacking = ""
        self._outcomes: dict[str, str] = {}
        self._programs: dict[str, set[ran.Program]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's set-up, call and tear-down, and its programs."""
        before = self._outcomes.get(report.nodeid, "passed")
        self._outcomes[report.nodeid] = max(before, report.outcome, key=_RANK.index)
        found = {program(value) for name, value in report.user_properties if name == "ran"}
        self._programs.setdefault(report.nodeid, set()).update(found)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the results of a completed run."""
        ended = exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
        if ended and not session.shouldfail and self._outcomes:
            results.write(self._path, self.result())
            claimed = self._config.getoption("--claimed")
            self._lacking = results.complaint(Path(claimed), self.result()) if claimed else ""
        if self._lacking and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        """Print the path of the results, and the claimed results that are missing."""
        if self._path.exists():
            path = os.path.relpath(self._path)
            terminalreporter.line(f"what was tested: {path} (scripts/record {path} publishes it)")
        if self._lacking:
            terminalreporter.line(self._lacking, red=True)

    def result(self) -> results.Result:
        """Return the results to write."""
        parts: dict[str, Counter[str]] = {}
        rows: dict[tuple[str, ...], Counter[str]] = {}
        for name, outcome in self._outcomes.items():
            parts.setdefault(part(name), Counter())[outcome] += 1
            for each in self._programs.get(name, ()):
                rows.setdefault((*each, kind(name)), Counter())[outcome] += 1
        return {
            "date": time.strftime("%Y-%m-%d"),
            "gpuhook": __version__,
            "selection": selection(self._config),
            "host": self._host,
            "parts": {name: counted(counts) for name, counts in sorted(parts.items())},
            "programs": [
                dict(zip(("program", "version", "of", "cgroups", "kind"), key, strict=True))
                | counted(counts)
                for key, counts in sorted(rows.items())
            ],
        }


def program(value: object) -> ran.Program:
    """Return the program that a test recorded, as a tuple of four words."""
    assert isinstance(value, list)
    name, version, of, cgroups = map(str, value)
    return name, ran.number(version), of, cgroups


def counted(counts: Counter[str]) -> dict[str, int]:
    return {outcome: counts[outcome] for outcome in _RANK}


def part(nodeid: str) -> str:
    """Return the top folder of a test below tests/: unit, integration or machine."""
    path = nodeid.partition("::")[0].split("/")
    return path[path.index("tests") + 1] if "tests" in path[:-2] else "other"


def kind(nodeid: str) -> str:
    name = nodeid.partition("::")[0].rpartition("/")[2]
    return next((about for start, about in KINDS.items() if name.startswith(start)), OTHER)


def selection(config: pytest.Config) -> str:
    """Return the selection of tests for the run, as on the command line."""
    words = sorted(os.path.relpath(word) for word in config.args)
    for option, flag in (("keyword", "-k"), ("markexpr", "-m")):
        value = config.getoption(option, "")
        words += [flag, value] if value else []
    if config.getoption("examples", None) is not None:
        words.append(f"--examples={config.getoption('examples')}")
    for option in ("deselect", "ignore", "ignore_glob"):
        left_out = config.getoption(option, None) or []
        words += [f"--{option.replace('_', '-')}={each}" for each in left_out]
    return " ".join(words)


def host() -> dict[str, str]:
    """Return a description of this host, such as its distribution, kernel and architecture."""
    forced = [name for name, (path, yes) in _SECURITY.items() if _read(path) == yes]
    return {
        "distribution": ran.distribution(),
        "kernel": ran.number(platform.release()),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "cgroups": ran.cgroups(),
        "init": "systemd" if os.path.isdir("/run/systemd/system") else "none",  # sd_booted(3)
        "security": ", ".join(forced) or "none",
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text("ascii").strip()
    except OSError:
        return ""
