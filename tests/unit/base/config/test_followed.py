"""Services that follow changes of config.toml, as each container start does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from timeouts import in_time

import gpuhook
from gpuhook.base.config.model import Config
from gpuhook.base.errors import ConfigError, MpsError
from gpuhook.cluster.commands import labels as labels_command
from gpuhook.cluster.device_plugin import service as plugin
from gpuhook.cluster.dra import service as dra
from gpuhook.metrics import service as metrics_service
from gpuhook.monitor import followed as following
from gpuhook.monitor.followed import ConfigChanged, FollowedConfig
from gpuhook.monitor.mps import keep
from gpuhook.tools.watch import HostWatcher
from gpuhook.vendors.nvidia import mps

OFF = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "config.toml"
    found.write_text("")
    return found


def test_a_changed_config_file_is_read_again(path: Path) -> None:
    found = FollowedConfig(str(path))
    assert found.config.accept_envvar_unprivileged
    assert not found.read()
    path.write_text(OFF)
    assert found.read()
    assert not found.config.accept_envvar_unprivileged
    assert not found.read()


@pytest.mark.parametrize("by", ["writing", "renaming"])
def test_a_second_change_with_equal_time_and_size_is_noticed(path: Path, by: str) -> None:
    """With a coarse clock the second file has the same time as the first; the length is equal."""
    found = FollowedConfig(str(path))
    for word in ("true ", "false", "true "):
        text = OFF.replace("false", word)
        if by == "writing":
            path.write_text(text)
        else:
            other = path.with_name("new")
            other.write_text(text)
            other.rename(path)
        os.utime(path, ns=(1 << 60, 1 << 60))
        found.read()
        assert found.config.accept_envvar_unprivileged == (word == "true ")


def test_a_created_or_removed_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "config.toml"
    monkeypatch.setattr("gpuhook.base.config.loader.DEFAULT_PATH", str(place))
    monkeypatch.setattr(following, "DEFAULT_PATH", str(place))
    monkeypatch.delenv("GPUHOOK_CONFIG", raising=False)
    found = FollowedConfig(None)
    assert not found.read()
    place.write_text(OFF)
    assert found.read()
    place.unlink()
    assert found.read()
    assert found.config.accept_envvar_unprivileged


@pytest.mark.parametrize("text", ["[gpuhook\n", "[gpuhook]\nnvml-timeout = 'soon'\n", "\xff"])
def test_an_unreadable_file_keeps_the_previous_settings(path: Path, text: str) -> None:
    """Each read fails, but a service reports the error once and keeps the previous settings."""
    path.write_text(OFF)
    found, said = FollowedConfig(str(path)), list[str]()
    path.write_bytes(text.encode("latin-1"))
    for _ in range(3):
        with pytest.raises(ConfigError):
            found.read()
        assert not found.has_changed(said.append)
        assert not found.config.accept_envvar_unprivileged
    assert len(said) == 1
    assert said[0].endswith("the settings from before count")
    path.write_text("")
    assert found.has_changed(said.append)
    assert found.config.accept_envvar_unprivileged
    path.write_text("[gpuhook\n")
    assert not found.has_changed(said.append)
    assert len(said) == 2


def test_a_rewritten_file_with_equal_text_is_not_a_change(path: Path) -> None:
    found = FollowedConfig(str(path))
    path.write_text("")
    os.utime(path)
    found.check(lambda _: None)
    path.write_text(OFF)
    with pytest.raises(ConfigChanged):
        found.check(lambda _: None)


AGAIN = """
import os, signal, sys, time
from gpuhook.monitor.followed import start_again
if os.environ.get("AGAIN"):
    print(sys.argv, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    time.sleep(1000)
os.environ["AGAIN"] = "1"
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
start_again()
"""


def test_a_service_restarts_with_its_arguments_and_unblocked_signals() -> None:
    """The service must still react to SIGTERM at any time after the restart."""
    words = [sys.executable, "-c", AGAIN, "--interval", "a b"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with in_time(60):
                line = process.stdout.readline()
            assert line == "['-c', '--interval', 'a b'] True\n"
            process.terminate()
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()


# Each service -------------------------------------------------------------------------------------


class Stop(Exception):  # noqa: N818 - ends a loop that has no end
    pass


def stop(*_: object, **__: object) -> None:
    raise Stop


def of_watch(path: Path, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Config:
    seen: list[Config] = []
    watch = HostWatcher(Config(), "gpu-py", lambda _: None, lambda: True, FollowedConfig(str(path)))

    def refresh() -> bool:
        seen.append(watch._config)
        return True

    monkeypatch.setattr(watch, "refresh", refresh)
    monkeypatch.setattr(watch, "stand", change)
    waits = iter([None, Stop()])

    def wait(_: float) -> None:
        end = next(waits)
        if end:
            raise end

    with pytest.raises(Stop):
        watch.run(cast(Any, SimpleNamespace(wait=wait)), 1.0)
    return seen[1]


def of_metrics(path: Path, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Config:
    found, gone = FollowedConfig(str(path)), list[str]()
    observer: Any = SimpleNamespace(let_go=lambda: gone.append("first"))
    other: Any = SimpleNamespace(config=None)

    def renewed() -> Any:
        if not found.has_changed(lambda _: None):
            return None
        other.config = found.config
        return other

    service = metrics_service.Service(observer, cast(Any, None), lambda _: None, None, renewed)
    service._follow()
    assert service._observer is observer
    change()
    service._follow()
    assert service._observer is other
    assert gone == ["first"]
    return cast(Config, other.config)


def of_mps(path: Path, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the configuration with which an exited MPS daemon is started again."""
    found = FollowedConfig(str(path))
    keeper = keep.MpsController(found.config, lambda _: None, followed=found)
    state = mps.MpsState(3, ())
    monkeypatch.setattr(mps, "read", lambda _: state)
    started: list[Config] = []
    monkeypatch.setattr(keeper, "start", lambda: started.append(keeper._config))

    def check(_: mps.MpsState) -> None:
        raise MpsError("it isn't running", "start it")

    monkeypatch.setattr(keeper, "check", check)
    change()
    keeper.look_after()
    return started[0]


def of_labels(path: Path, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Config:
    seen: list[Config] = []

    def once(config: Config, *_: object, **__: object) -> None:
        seen.append(config)
        if len(seen) == 2:
            raise Stop

    monkeypatch.setattr(labels_command, "_once", once)
    monkeypatch.setattr(time, "sleep", lambda _: change())
    words = ["--output", str(path.with_name("out")), "--interval", "1", "--config", str(path)]
    with pytest.raises(Stop):
        labels_command.labels.main(words, standalone_mode=False)
    return seen[1]


OBSERVED = SimpleNamespace(is_due=lambda: True, tend=stop)


def of_plugin(path: Path, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Config:
    found = FollowedConfig(str(path))
    supervisor = plugin.PluginSupervisor.__new__(plugin.PluginSupervisor)
    vars(supervisor).update(
        _followed=found, _observed=OBSERVED, _signals=SimpleNamespace(hangup=False)
    )
    return _changed(supervisor, found, change)


def of_dra(path: Path, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Config:
    found = FollowedConfig(str(path))
    supervisor = dra.DraSupervisor.__new__(dra.DraSupervisor)
    devices = SimpleNamespace(observed=OBSERVED, tend=stop)
    vars(supervisor).update(
        _followed=found, _devices=devices, _observed=OBSERVED,
        _signals=SimpleNamespace(hangup=False),
    )  # fmt: skip
    return _changed(supervisor, found, change)


def _changed(supervisor: Any, found: FollowedConfig, change: Callable[[], None]) -> Config:
    """Check that a supervisor exits after a change; return the configuration for the next start."""
    change()
    with pytest.raises(ConfigChanged):
        supervisor._tend()
    return found.config


SERVICES = {
    "watch": of_watch, "metrics": of_metrics, "mps": of_mps, "labels": of_labels,
    "device_plugin": of_plugin, "dra": of_dra,
}  # fmt: skip


@pytest.mark.protects(
    "settings-followed",
    "a service restarts when config.toml has changed",
    only="each_service and (plugin or dra)",
)
@pytest.mark.protects(
    "watch-settings",
    "gpuhook watch applies changes of config.toml while it runs",
    instead="pass",
    only="each_service and watch",
)
@pytest.mark.protects(
    "mps-settings",
    "gpuhook mps serve starts a daemon with the current settings of config.toml",
    instead="pass",
    only="each_service and mps",
)
@pytest.mark.protects(
    "metrics-settings",
    "gpuhook metrics follows changes of config.toml while it runs",
    only="each_service and metrics",
)
@pytest.mark.parametrize("name", [*SERVICES])
def test_each_service_follows_changed_settings(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        path.write_text(OFF)

    found = SERVICES[name](path, change, monkeypatch)
    assert not found.accept_envvar_unprivileged


def test_every_long_running_command_follows_its_configuration() -> None:
    """A command is long-running if its code has SIGTERM or --interval, except stats."""
    package = Path(gpuhook.__file__).parent
    modules = [*package.glob("tools/cli/[a-z]*.py"), *package.glob("*/commands/[a-z]*.py")]
    endless = {
        each.stem: each.read_text()
        for each in modules
        if "SIGTERM" in each.read_text() or "--interval" in each.read_text()
    }
    del endless["stats"]  # a user runs stats, and starts it again each time
    assert {*endless} == {*SERVICES, "nri"}
    assert all("FollowedConfig(" in text for text in endless.values())


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUHOOK_CONFIG", raising=False)
