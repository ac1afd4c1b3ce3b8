"""The units that refresh CDI specs: enabled, and ordered before engines without a cycle."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Result, run
from harness.installation import Installation

from gpuhook.tools.cdi import units

UNITS = Path("/lib/systemd/system")  # units of the packages on this host
ENGINES = ("docker", "containerd", "podman-restart")
STUBS = ("crio", "kubelet")  # Debian packages none of these
STUB = """[Unit]
Wants=network-online.target
After=network-online.target
[Service]
ExecStart=/bin/true
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture
def system(tmp_path: Path, installation: Installation) -> Path:
    """A folder of units that all start at boot: gpuhook's units, the engines' and the kubelet's."""
    changes, _ = units.wanted(str(installation.command), "/var/lib/gpuhook", str(tmp_path))
    for change in changes:
        if Path(change.path).name in units.ENABLED:
            (tmp_path / Path(change.path).name).write_bytes(change.new or b"")
    watch = Path(__file__).parents[2] / "packaging/systemd/gpuhook-watch.service"
    text = watch.read_text().replace("/usr/bin/gpuhook", str(installation.command))
    (tmp_path / watch.name).write_text(text)
    for name in STUBS:
        (tmp_path / f"{name}.service").write_text(STUB)
    wants = tmp_path / "multi-user.target.wants"
    wants.mkdir()
    for path in [*tmp_path.glob("*.*")]:
        if path != wants:
            (wants / path.name).symlink_to(path)
    for name in ENGINES:
        assert (UNITS / f"{name}.service").exists()
        (wants / f"{name}.service").symlink_to(UNITS / f"{name}.service")
    return tmp_path


def verify(system: Path) -> Result:
    words = ["systemd-analyze", "verify", "--man=no", "multi-user.target"]
    return run(words, {"SYSTEMD_UNIT_PATH": f"{system}:"})


def test_the_units_have_no_ordering_cycle(system: Path) -> None:
    assert verify(system).ok().stderr == ""


@pytest.mark.parametrize("other", ["multi-user.target", "docker.service", "kubelet.service"])
def test_an_ordering_cycle_is_detected(system: Path, other: str) -> None:
    path = system / "gpuhook-cdi-refresh.service"
    path.write_text(path.read_text().replace("[Service]", f"After={other}\n[Service]"))
    assert "ordering cycle" in verify(system).stderr


def test_engines_start_after_the_refresh_with_a_time_limit(system: Path) -> None:
    text = (system / "gpuhook-cdi-refresh.service").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("Before=")]
    assert {f"{name}.service" for name in (*ENGINES, *STUBS)} == set(line[7:].split())
    assert "\nTimeoutStartSec=2min\n" in text


@pytest.fixture
def running(workspace: Path, tmp_path: Path) -> Iterator[Path]:
    """A systemctl that records its arguments, on a host that looks as if systemd runs."""
    Path("/run/systemd/system").mkdir(parents=True)  # the session has a /run of its own
    program = tmp_path / "bin/systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/words\n')
    program.chmod(0o755)
    yield program
    shutil.rmtree("/run/systemd")


def test_a_running_systemd_reloads_and_enables_the_units(
    running: Path, tmp_path: Path, installation: Installation
) -> None:
    def call(verb: str, *words: str) -> Result:
        path = f"{running.parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        options = ("--engine=podman", f"--state-dir={tmp_path}/state")
        return run([installation.command, verb, *options, *words], {"PATH": path}).ok()

    words = tmp_path / "words"
    ours = "gpuhook-cdi-refresh.service gpuhook-cdi-refresh.path"
    try:
        assert "systemctl" not in call("install", "--cdi").stdout
        said = ["--quiet daemon-reload", f"--quiet enable --now {ours}"]
        assert words.read_text().splitlines() == said
    finally:
        call("uninstall")
    said += [f"--quiet disable --now {ours}", "--quiet daemon-reload"]
    assert words.read_text().splitlines() == said
    running.write_text("#!/bin/sh\nexit 1\n")
    try:
        done = call("install", "--cdi")
        assert f"systemctl daemon-reload && systemctl enable --now {ours}" in done.stdout
    finally:
        call("uninstall")
