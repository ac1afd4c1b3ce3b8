"""The helper, which does the hook's work as safely as the hook and leaves nothing behind."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import bundles
from harness.bundles import Bundle
from harness.commands import Result, wait_until
from harness.driver import Driver
from harness.inside import Inside, look, seen
from harness.installation import Installation, write_config
from harness.prefork import RUNTIMES, open_files
from harness.snapshot import nothing_left

WRAPPER = """\
#!/bin/sh
words=$(sed -n 's/.*"--helper",\\([^]]*\\)\\].*/\\1/p' {bundle}/config.json)
helper=$(echo "$words" | sed 's/^"\\([0-9]*\\)".*/\\1/')
[ -z "$helper" ] || {{ echo "$helper" >{folder}/new && mv {folder}/new {folder}/helper; }}
{script}
exec {runtime} "$@"
"""


class Case:
    """A container whose low-level runtime is called by a script of the test."""

    def __init__(
        self,
        bundle: Bundle,
        installation: Installation,
        driver: Driver,
        runtime: str,
        folder: Path,
    ) -> None:
        self.bundle = bundle
        self.installation = installation
        self.driver = driver
        self.runtime = runtime
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.config = write_config(folder / "etc", driver.root, [folder / "runtime"])
        text = self.config.read_text().replace("[gpuhook]", "[gpuhook]\nhelper = true")
        self.config.write_text(text)
        past = time.time() - 10
        for place in (self.config, self.config.parent):
            os.utime(place, (past, past))
        self.env = {"GPUHOOK_CONFIG": str(self.config)}
        bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
        bundle.command(*look(driver.minors))

    def wrap(self, script: str = "") -> None:
        path = self.folder / "runtime"
        names = {"bundle": self.bundle.path, "folder": self.folder, "runtime": self.runtime}
        path.write_text(WRAPPER.format(script=script, **names))
        path.chmod(0o755)

    def run(self, script: str = "") -> Result:
        self.wrap(script)
        return self.bundle.run(self.installation.runtime, self.env)

    @property
    def wait_for_us(self) -> str:
        """Return a shell stand-in for a runtime that waits until the test continues."""
        return f"until [ -e {self.folder}/go-on ]; do sleep 0.05; done"

    def go_on(self) -> None:
        (self.folder / "go-on").touch()

    @property
    def kept_errors(self) -> Path:
        return self.config.parent / "state/errors.log"

    @property
    def helper(self) -> int:
        return int((self.folder / "helper").read_text())

    def helper_is_gone(self) -> bool:
        return not is_running(self.helper)

    def assert_sees_its_gpus(self, inside: Inside) -> None:
        assert inside.gpu_minors == {gpu.minor for gpu in self.driver.chosen(0, 2)}


def is_running(pid: int) -> bool:
    """Tell whether a process exists and hasn't exited."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def is_in_poll(pid: int) -> bool:
    """Tell whether a process waits in poll(2), ppoll(2) on arm64. Source: proc(5), syscall."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("7", "73")


@pytest.fixture
def case(bundle: Bundle, installation: Installation, driver: Driver, tmp_path: Path) -> Case:
    return Case(bundle, installation, driver, bundle.runtime, tmp_path / "case")


@RUNTIMES
def test_the_helper_does_the_hooks_work(case: Case) -> None:
    """The configuration is broken by then, so a hook that did the work itself would fail."""
    with nothing_left(case.driver.root, pid=case.bundle.namespace.pid):
        ready = '[ "$(ls /proc/$helper/fd | wc -l)" -gt 20 ]'  # it has opened all mount sources
        inside = seen(case.run(f"until {ready}; do :; done; echo broken >{case.config}"))
    case.assert_sees_its_gpus(inside)
    assert case.helper_is_gone()


@RUNTIMES
def test_hook_does_the_work_where_the_helper_was_killed(case: Case) -> None:
    inside = seen(case.run('kill -9 "$helper"'))
    case.assert_sees_its_gpus(inside)


@RUNTIMES
def test_the_hook_does_the_work_where_the_helper_dies_during_a_request(case: Case) -> None:
    """The helper is stopped before the hook asks it, and killed while the hook waits."""
    killer = '(sleep 1; kill -9 "$helper") >/dev/null 2>&1 &'
    inside = seen(case.run(f'kill -STOP "$helper"; {killer}'))
    case.assert_sees_its_gpus(inside)


@RUNTIMES
def test_helper_ends_with_the_runtime(case: Case) -> None:
    case.wrap("exit 9")
    assert case.bundle.run(case.installation.runtime, case.env).status == 9
    wait_until(case.helper_is_gone, "the helper is gone")


@pytest.mark.parametrize("signal", ["KILL", "TERM"])
@RUNTIMES
def test_helper_ends_with_a_killed_runtime(case: Case, signal: str) -> None:
    case.wrap(f"kill -{signal} $$; sleep 30")
    assert case.bundle.run(case.installation.runtime, case.env).status != 0
    wait_until(case.helper_is_gone, "the helper is gone")


@RUNTIMES
def test_helper_keeps_no_descriptor_of_the_caller(case: Case) -> None:
    """An engine waits until the pipe that is gpu-py's standard error is closed."""
    case.wrap(f"exec </dev/null >/dev/null 2>&1 3>&- 4>&-; {case.wait_for_us}; exit 0")
    reader, writer = os.pipe()
    started = subprocess.Popen(
        case.bundle.namespace.enter(
            case.installation.runtime, "run", "--bundle", case.bundle.path, case.bundle.name
        ),
        env={**os.environ, **case.env},
        stdout=writer,
        stderr=writer,
        pass_fds=[writer],
        cwd=case.bundle.path,
    )
    os.close(writer)
    try:
        wait_until((case.folder / "helper").exists, "the helper runs")
        pipe = os.readlink(f"/proc/self/fd/{reader}")
        wait_until(lambda: pipe not in open_files(case.helper), "the helper has let go of the pipe")
    finally:
        os.close(reader)
        case.go_on()
        status = started.wait(60)
    assert status == 0
    wait_until(case.helper_is_gone, "the helper is gone")


@RUNTIMES
def test_a_bundle_started_twice_has_one_hook_and_its_gpus(case: Case) -> None:
    """The hook of the first start, whose helper is gone, is replaced."""
    for _ in range(2):
        case.assert_sees_its_gpus(seen(case.run()))
    hooks = case.bundle.spec()["hooks"]["prestart"]
    assert [hook["path"] for hook in hooks] == [str(case.installation.hook)]
    assert str(case.helper) in hooks[0]["args"]


@RUNTIMES
def test_a_process_with_the_helpers_reused_pid_is_not_asked(case: Case) -> None:
    """The hook's arguments contain the pid of the test itself, which goes on running."""
    case.run()

    def point_to_us(spec: dict[str, object]) -> None:
        text = json.dumps(spec).replace(f'"{case.helper}"', f'"{os.getpid()}"')
        spec.update(json.loads(text))

    case.bundle.change(point_to_us)
    again = case.bundle.call(
        case.runtime, "run", "--bundle", case.bundle.path, case.bundle.name, env=case.env
    )
    case.assert_sees_its_gpus(seen(again))


# Put the hooks of this bundle into another bundle, and continue with that bundle.
OTHER_BUNDLE = """\
python3 - {ours}/config.json {other.path}/config.json <<'END'
import json, sys
ours, other = (json.load(open(path)) for path in sys.argv[1:])
json.dump({{**other, "hooks": ours["hooks"]}}, open(sys.argv[2], "w"))
END
set -- run --bundle {other.path} {other.name}
"""


@pytest.mark.protects("another-bundle", "the startup helper serves no bundle except its own")
@RUNTIMES
def test_helper_refuses_the_state_of_another_bundle(
    case: Case, workspace: Path, roots: dict[str, Path]
) -> None:
    """A hook leads to this helper, and sends it the state of another container."""
    ours = case.bundle
    with bundles.bundle(
        workspace / "bundles", roots["debian"], ours.namespace, case.runtime
    ) as other:
        other.environ("NVIDIA_VISIBLE_DEVICES=1")
        other.command("sh", "-c", "echo it runs")
        untouched = [case.driver.root, ours.path / "upper", other.path / "upper"]
        with nothing_left(*untouched, pid=ours.namespace.pid):
            refused = case.run(OTHER_BUNDLE.format(ours=ours.path, other=other)).failed()
        assert "it runs" not in refused.stdout
        [record] = case.kept_errors.read_text().splitlines()
        sentence = f"The state of the container names another bundle, {other.path}"
        assert json.loads(record)["msg"].startswith(f"gpuhook-prestart: {sentence}")


@RUNTIMES
def test_a_failure_has_the_same_message_with_helper_and_hook(case: Case) -> None:
    """The start fails because the container has a folder in the place of a program."""
    case.bundle.call("mkdir", "-p", case.bundle.root / "usr/bin/nvidia-smi").ok()
    debug = case.folder / "debug"
    text = case.config.read_text()
    text = text.replace("[nvidia-container-cli]", f'[nvidia-container-cli]\ndebug = "{debug}"')
    case.config.write_text(text)
    helped = case.run().failed()
    case.config.write_text(text.replace("helper = true", "helper = false"))
    plain = case.run().failed()
    for path in (debug, case.kept_errors):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        messages = [record["msg"] for record in records]
        assert messages == [messages[0]] * 2
        assert messages[0].startswith("gpuhook-prestart: ")
        # crun shows no output of hooks, neither the helper's nor the hook's own.
        assert case.runtime == "crun" or messages[0] in helped.stderr
        assert case.runtime == "crun" or messages[0] in plain.stderr


@RUNTIMES
def test_a_helper_without_a_request_ends_after_its_timeout(
    case: Case, installation: Installation
) -> None:
    """The helper is stopped by a signal, and its timer still makes it exit."""
    case.wrap(f"{case.wait_for_us}; exit 0")
    started = subprocess.Popen(
        case.bundle.namespace.enter(
            installation.runtime, "run", "--bundle", case.bundle.path, case.bundle.name
        ),
        env={**os.environ, **case.env},
        cwd=case.bundle.path,
    )
    try:
        wait_until((case.folder / "helper").exists, "the helper runs")
        wait_until(lambda: is_in_poll(case.helper), "the helper waits, and so has a timer")
        os.kill(case.helper, signal.SIGSTOP)
        wait_until(case.helper_is_gone, "the helper is gone")
        assert started.poll() is None, "the runtime still waits"
    finally:
        case.go_on()
        started.wait(60)
