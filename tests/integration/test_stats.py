"""gpuhook stats on a terminal and in a pipe, over the simulated driver and a real container."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness.bundles import Bundle
from harness.bundles import bundle as make_bundle
from harness.commands import run, stop, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.strangers import AS_STRANGER

from gpuhook_simulate.vendors.nvidia import SimulatedProcess, end_process, run_process

GIB = 1 << 30
PATIENCE = 300.0
COMMAND = (sys.executable, "-c", "from gpuhook.tools.cli import main; main()", "stats")
# As started by hand: signals that the test's parent process ignores have their default action.
STARTED = ("env", "--default-signal", *COMMAND)
RESTORED = "\x1b[?25h\x1b[?1049l"  # the cursor is shown, and the previous screen is restored


@pytest.fixture
def container(
    workspace: Path,
    roots: dict[str, Path],
    host: Namespace,
    installation: Installation,
    configs: dict[str, Path],
) -> Iterator[Bundle]:
    """A running container that has the GPUs 0 and 7."""
    with make_bundle(workspace / "bundles", roots["debian"], host, "runc") as made:
        made.environ("NVIDIA_VISIBLE_DEVICES=0,7")
        made.command("sleep", "1000")
        made.detach(installation.runtime, configs["runc"])
        yield made


@contextlib.contextmanager
def using(driver: Driver, device: str, pid: int, memory: int, sm: int) -> Iterator[None]:
    run_process(str(driver.root), SimulatedProcess(device, pid, memory, sm))
    try:
        yield
    finally:
        end_process(str(driver.root), pid)


def environment(**more: str) -> dict[str, str]:
    """Return our environment without variables about terminals, and with ``more`` added."""
    about = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    kept = {name: value for name, value in os.environ.items() if name not in about}
    return {**kept, "PYTHONIOENCODING": "utf-8", **more}


@dataclass
class Terminal:
    """A program on a terminal of its own; ``text`` is all that it has written."""

    process: subprocess.Popen[bytes]
    fd: int
    text: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def read(self) -> str:
        """Return everything that the program has written until now."""
        while select.select([self.fd], [], [], 0)[0]:
            try:
                piece = os.read(self.fd, 1 << 16)
            except OSError:  # the other end of the terminal is closed
                break
            if not piece:
                break
            self.text += piece.decode(errors="replace")
        return self.text

    def wait(self, shows: Callable[[str], bool], what: str) -> str:
        """Wait until the text written from now on is as expected, and return it."""
        start = len(self.text)
        wait_until(lambda: shows(self.read()[start:]), what, PATIENCE)
        return self.text[start:]


@contextlib.contextmanager
def terminal(config: Path, *options: str, term: str = "xterm", **more: str) -> Iterator[Terminal]:
    """Run the command on a terminal of 40 lines."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 130, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        ["setsid", "--ctty", *STARTED, "--config", str(config), *options],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment(TERM=term, **more),
    )  # fmt: skip
    try:
        yield Terminal(process, ours)
        assert termios.tcgetattr(theirs) == before
    finally:
        if process.poll() is None:
            stop(process)
        os.close(theirs)
        os.close(ours)


def test_the_live_view_shows_gpus_processes_and_history(
    driver: Driver, configs: dict[str, Path], container: Bundle
) -> None:
    gpu = driver.gpus[0].uuid
    with terminal(configs["runc"], "--interval=0.2") as seen:
        drawn = seen.wait(lambda text: text.count(container.name) >= 2, "both its GPUs are shown")
        assert "─" in drawn
        assert "%" in drawn
        with using(driver, gpu, _first_process(container), 2 * GIB, 95):
            seen.wait(lambda text: "2.00 GiB" in text and "\x1b[31m━" in text, "it is busy")
            pid = str(_first_process(container))
            seen.wait(lambda text: _has_process(text, pid), "its process is named")
            seen.wait(lambda text: "█" in text, "it has a history")
        seen.resize(10, 70)
        seen.wait(lambda text: "more: Up and Down" in text, "what doesn't fit is counted")
        seen.wait(lambda text: "\n0 " in plain(text), "the first GPU is shown")
        os.write(seen.fd, b"\x1b[F")
        seen.wait(lambda text: "\n7 " in plain(text), "End shows the last GPU")
        os.write(seen.fd, b"t")
        seen.wait(lambda text: "by time" in text and "\n0 " in plain(text), "t sorts, from the top")
        seen.resize(2, 3)
        seen.resize(40, 130)
        seen.wait(lambda text: "PROCESSES" in text, "there is space again")
        os.write(seen.fd, b"\x1a")
        wait_until(lambda: _state(seen.process.pid) == "T", "Ctrl-Z stops it", PATIENCE)
        assert seen.read().endswith(RESTORED)
        seen.process.send_signal(signal.SIGCONT)
        seen.wait(lambda text: "PROCESSES" in text, "it goes on")
        os.write(seen.fd, b"\x03")
        assert seen.process.wait(PATIENCE) == 0
        assert seen.read().endswith(RESTORED)
        assert "Traceback" not in seen.text


def plain(text: str) -> str:
    """Return the text without colours and other control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def _has_process(text: str, pid: str) -> bool:
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split() for line in text.splitlines()]
    return any(line[:2] == [pid, "root"] and "sleep" in line for line in lines)


@pytest.mark.parametrize("key", ["q", "Q"])
def test_the_q_key_ends_the_live_view(driver: Driver, configs: dict[str, Path], key: str) -> None:
    """The view ends immediately, and keys without a meaning are ignored."""
    with terminal(configs["runc"], "--interval=3600") as seen:
        seen.wait(lambda text: "q ends this" in text, "it is shown")
        os.write(seen.fd, b"x\n" + key.encode())
        assert seen.process.wait(PATIENCE) == 0
        assert seen.read().endswith(RESTORED)


def _first_process(container: Bundle) -> int:
    return int(json.loads(container.call("runc", "state", container.name).ok().stdout)["pid"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal_at_once(
    driver: Driver, configs: dict[str, Path], number: int
) -> None:
    with terminal(configs["runc"], "--interval=3600") as seen:
        seen.wait(lambda text: "every 3600 s" in text, "it is shown")
        seen.resize(20, 80)
        seen.wait(lambda text: "every 3600 s" in text, "it is shown in the other size")
        seen.process.send_signal(number)
        assert seen.process.wait(PATIENCE) == 0
        assert seen.read().endswith(RESTORED)


def test_the_live_view_continues_while_a_driver_hangs(
    driver: Driver, configs: dict[str, Path]
) -> None:
    with terminal(configs["runc"], "--interval=0.2") as seen:
        seen.wait(lambda text: "140 GiB" in text, "the driver answers")
        [child] = _asking(seen.process.pid)
        os.kill(child, signal.SIGSTOP)
        seen.wait(lambda text: "the driver hangs" in text, "it is said that it hangs")
        seen.wait(lambda text: "140 GiB" in text, "another child answers")
        os.write(seen.fd, b"\x03")
        assert seen.process.wait(PATIENCE) == 0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _asking(pid: int) -> list[int]:
    """Return the ids of a process's children that query NVML."""
    found = []
    for each in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has exited
            if Path(f"/proc/{each}/comm").read_text() == "gpuhook-nvml\n":
                found.append(each)
    return found


def test_dumb_and_colorless_terminals_get_plain_output(
    driver: Driver, configs: dict[str, Path]
) -> None:
    with terminal(configs["runc"], "--interval=0.2", term="dumb") as seen:
        seen.wait(lambda text: text.count("MODEL") >= 2, "looks come one below the other")
        os.write(seen.fd, b"\x03")
        assert seen.process.wait(PATIENCE) == 0
        assert "\x1b" not in seen.read()
        assert "━" not in seen.text
    with terminal(configs["runc"], "--interval=0.2", NO_COLOR="1") as seen:
        drawn = seen.wait(lambda text: "NVIDIA H200" in text, "it is shown")
        assert "\x1b[32m" not in drawn
        os.write(seen.fd, b"\x03")
        assert seen.process.wait(PATIENCE) == 0


def test_a_single_report_matches_the_simulated_usage(
    driver: Driver, configs: dict[str, Path], container: Bundle
) -> None:
    used, idle = driver.gpus[0].uuid, driver.gpus[7].uuid
    pid = _first_process(container)
    with using(driver, used, pid, 2 * GIB, 40), using(driver, idle, os.getpid(), GIB, 0):
        argv = [*COMMAND, "--no-stream", "--config", str(configs["runc"])]
        look: dict[str, Any] = json.loads(run([*argv, "--format=json"]).ok().stdout)
        text = run(argv, environment(COLUMNS="20")).ok().stdout
    assert [each["id"] for each in look["devices"]] == [gpu.uuid for gpu in driver.gpus]
    by_id = {each["id"]: each for each in look["containers"]}
    assert {each["id"]: (each["assigned"], each["memory_used_bytes"], each["processes"])
            for each in by_id[container.name]["devices"]} == {
        used: (True, 2 * GIB, 1), idle: (True, 0, 0),
    }  # fmt: skip
    [process] = [each for each in look["processes"] if each["pid"] == pid]
    assert process["host_memory_bytes"] > 0
    assert process["cpu_seconds"] >= 0.0
    [other] = by_id[""]["devices"]
    assert (other["id"], other["assigned"], other["memory_used_bytes"]) == (idle, False, GIB)
    lines = [line.split() for line in text.splitlines()]
    assert [line for line in lines if line[:1] == [container.name] and "2.00" in line]
    assert "\x1b" not in text


def test_reports_can_be_limited_to_gpus_and_containers(
    driver: Driver, configs: dict[str, Path], container: Bundle
) -> None:
    def found(name: str, *options: str) -> Any:
        argv = [*COMMAND[:-1], name, "--format=json", "--config", str(configs["runc"]), *options]
        look = json.loads(run(argv).ok().stdout)
        names = {each["id"] for each in look["containers"]}
        return [each["index"] for each in look["devices"]], container.name in names

    assert found("ps", "--gpu=7", f"--gpu={driver.gpus[1].uuid}") == ([1, 7], True)
    assert found("ps", "--gpu=1") == ([1], False)
    assert found("stats", "--no-stream", f"--container={container.name}") == ([0, 7], True)
    for options, words in (
        (["--gpu=99"], "This host has no device 99."),
        (["--container=none"], "No running container that uses a device is named none."),
    ):
        done = run([*COMMAND[:-1], "ps", "--config", str(configs["runc"]), *options])
        assert done.status == 1
        assert words in done.stderr


def test_a_pipe_gets_repeated_reports(driver: Driver, configs: dict[str, Path]) -> None:
    argv = [*STARTED, "--interval=0.2", "--config", str(configs["runc"])]
    for options, is_one in (([], b"GPU "), (["--format=json"], b'{"time": ')):
        with subprocess.Popen([*argv, *options], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                found = 0
                while found < 2:
                    line = process.stdout.readline()
                    assert line
                    found += line.startswith(is_one)
            finally:
                stop(process)
        assert process.returncode == 0


def test_a_lost_gpu_is_reported_as_a_problem(installation: Installation, tmp_path: Path) -> None:
    made = simulate(installation, tmp_path / "driver", "--gpus=3", "--lost=1")
    config = write_config(tmp_path / "etc", made.root, ["runc"])
    done = run([*COMMAND, "--no-stream", "--format=json", "--config", config]).ok()
    look = json.loads(done.stdout)
    assert [each["index"] for each in look["devices"]] == [0, 2]
    assert "GPU 1 has fallen off the bus (lost)" in look["problems"]


def test_a_missing_driver_is_an_error(configs: dict[str, Path], tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[nvidia-container-cli]\nroot = "{tmp_path}"\n')
    for options in ([], ["--no-stream"]):
        done = run([*COMMAND, *options, "--config", config])
        assert done.status == 1
        assert done.stderr.startswith("gpuhook: There is no NVIDIA driver")


def test_an_ordinary_user_is_warned_that_containers_are_not_listed(
    reachable: Path, driver: Driver, configs: dict[str, Path]
) -> None:
    command: list[str | Path] = [*AS_STRANGER, reachable / "gpuhook"]
    done = run([*command, "stats", "--no-stream", "--config", configs["runc"]]).ok()
    assert "Without root, only your own containers are listed, and those of a Docker" in done.stderr
    assert done.stdout.count("NVIDIA H200") == len(driver.gpus)
