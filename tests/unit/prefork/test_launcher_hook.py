"""The launcher as a hook: it leaves the work to the hook worker, or has Python do it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import Installed

from gpuhook import __version__, prestart_hook


class FakeHelper:
    """A process with a worker's pipes that does what a test says, for the bundle that it names."""

    def __init__(self, folder: Path, act: str) -> None:
        self.bundle = folder / "bundle"
        self.seen = folder / "seen"
        code = (
            "import os, sys\n"
            f"bundle = os.open({str(self.bundle)!r}, os.O_PATH)\n"
            "asked, answer = os.pipe(), os.pipe()\n"
            "print(os.getpid(), asked[1], answer[1], bundle, flush=True)\n"
            "def wait():\n"
            "    hook = int(os.read(asked[0], 32))\n"
            "    fd = os.open(f'/proc/{hook}/fd/6', os.O_RDONLY)\n"
            f"    open({str(self.seen)!r}, 'wb').write(os.read(fd, 1 << 16))\n"
            "def tell(text):\n"
            "    os.write(answer[1], text)\n"
            f"{act}\n"
        )
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.words = self.process.stdout.readline().decode().split()
        self.process.stdout.close()


def ask(installed: Installed, act: str, *, bundle: str = "") -> tuple[int, str, str]:
    """Run the hook with such a worker; return its status, its stderr and the input of Python."""
    python = f'#!/bin/sh\nshift 5\n(echo "$@"; cat) >{installed.log}\n'
    installed.program(installed.bin / "python3", python)
    helper = FakeHelper(installed.folder, act)
    installed.log.unlink(missing_ok=True)
    if "19" in act:
        os.waitid(os.P_PID, helper.process.pid, os.WSTOPPED | os.WNOWAIT)
    words = [*helper.words, bundle or str(helper.bundle)]
    hook = str(installed.bin / "gpuhook-prestart")
    argv = [hook, "--helper", *words, "--config", "/c", "prestart"]
    done = subprocess.run(argv, input=b'{"state":1}', capture_output=True, timeout=30, check=False)
    helper.process.kill()
    helper.process.wait()
    python = installed.log.read_text() if installed.log.exists() else ""
    return done.returncode, done.stderr.decode(), python


def plain_hook(installed: Installed, bundle: str = "bundle") -> str:
    """Return the input of Python: of the words for a worker, only the bundle's name is left."""
    words = f"--bundle {installed.folder}/{bundle} --config /c prestart"
    return f'hook {installed.bin}/gpuhook-prestart {words}\n{{"state":1}}'


def test_the_hook_leaves_the_work_to_the_hook_worker(installed: Installed) -> None:
    act = "wait(); tell(b'taken\\n'); tell(b'done\\n')"
    assert ask(installed, act) == (0, "", "")
    assert (installed.folder / "seen").read_text() == '{"state":1}'


def test_the_hook_prints_an_error_of_the_hook_worker_unchanged(installed: Installed) -> None:
    act = "wait(); tell(b'taken\\nNo such GPU. Buy one: $(id) * \\\\n %s.\\n')"
    status, told, python = ask(installed, act)
    assert (status, python) == (1, "")
    assert told == "gpuhook-prestart: No such GPU. Buy one: $(id) * \\n %s.\n"


def test_the_hook_has_python_report_a_killed_hook_worker(installed: Installed) -> None:
    act = "wait(); tell(b'taken\\n'); os.kill(os.getpid(), 9)"
    status, text, python = ask(installed, act)
    assert (status, text) == (0, "")
    assert "gpuhook-prestart --helper-killed --bundle " in python


@pytest.mark.parametrize("word", ["-version", "--version", "-v"])
def test_the_hook_prints_its_version_without_reading_a_state(word: str) -> None:
    """NVIDIA's hook does so, too, without a state on standard input."""
    code = f"from gpuhook import prestart_hook; prestart_hook.main([{word!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"gpuhook-prestart {__version__}\n"
        assert process.wait() == 0


def test_the_hook_refuses_the_start_after_a_killed_hook_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[gpuhook]\nstate-dir = "{tmp_path}"\n')
    with pytest.raises(SystemExit) as ended:
        prestart_hook.main(["--helper-killed", "--config", str(config), "prestart"])
    assert ended.value.code == 1
    assert "The helper was killed. Start the container again." in capfd.readouterr().err
    assert "The helper was killed." in (tmp_path / "errors.log").read_text()


@pytest.mark.protects(
    "stopped-worker",
    "the hook sends no request to a worker that is stopped",
    only="without_a_helper and stopped",
)
@pytest.mark.parametrize(
    "act",
    [
        "os.read(asked[0], 32); os.kill(os.getpid(), 9)",
        "os._exit(0)",
        "os.close(asked[0])",
        "os.kill(os.getpid(), 19)",
    ],
    ids=["killed before it takes the task", "gone", "not listening", "stopped"],
)
def test_hook_does_the_work_without_a_helper(installed: Installed, act: str) -> None:
    assert ask(installed, act) == (0, "", plain_hook(installed))


def test_the_hook_uses_no_hook_worker_of_another_bundle(installed: Installed) -> None:
    act = "import time; time.sleep(20)"
    (installed.folder / "other").mkdir()
    status = ask(installed, act, bundle=str(installed.folder / "other"))
    assert status == (0, "", plain_hook(installed, "other"))
