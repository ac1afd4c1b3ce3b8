"""log: the errors that are reported, where they go, and that reporting fails no container."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuhook.base import log
from gpuhook.base.config.model import Config
from gpuhook.base.errors import HeldError, RequestError

SENTENCES = "It failed. Mend it."
MESSAGE = f"gpu-py: {SENTENCES}"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A configuration with its own state folder and a debug log."""
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    made = Config()
    made.state_dir = str(state)
    made.cli_debug = str(tmp_path / "debug.log")
    made.runtime_debug = str(tmp_path / "runtime.log")
    return made


def messages(path: str | Path) -> list[str]:
    """Return the messages of the errors in a log, and check that each has a level and a time."""
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert all(record["level"] == "error" for record in records)
    assert all(record["time"].endswith("Z") for record in records)
    return [record["msg"] for record in records]


def kept(config: Config) -> tuple[str, ...]:
    return config.cli_debug, config.runtime_debug, f"{config.state_dir}/{log.ERRORS}"


def test_an_error_goes_to_stderr_and_every_log(
    tmp_path: Path, config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "log.json"
    log.error("gpu-py", SENTENCES, config, str(engine))
    assert capfd.readouterr().err == f"{MESSAGE}\n"
    for path in (str(engine), *kept(config)):
        assert messages(path) == [MESSAGE]


def test_a_kept_error_goes_to_the_logs_but_not_to_stderr(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    log.keep("gpu-py", SENTENCES, config)
    assert capfd.readouterr().err == ""
    for path in kept(config):
        assert messages(path) == [MESSAGE]


def test_a_shared_log_file_gets_an_error_once(config: Config) -> None:
    config.runtime_debug = config.cli_debug
    log.keep("gpu-py", SENTENCES, config)
    assert messages(config.cli_debug) == [MESSAGE]


@pytest.mark.parametrize(
    ("level", "logged"),
    [("error", False), ("warn", False), ("info", True), ("trace", True)],
)
def test_the_runtimes_log_records_the_edit_at_level_info(
    config: Config, level: str, logged: bool
) -> None:
    config.log_level = level
    log.edited("/b/config.json", "spec", ("GPU-1",), config)
    assert Path(config.runtime_debug).exists() == logged
    assert not Path(config.cli_debug).exists()
    if logged:
        record = json.loads(Path(config.runtime_debug).read_text())
        assert record.pop("time").endswith("Z")
        assert record == {
            "level": "info", "msg": "edited", "spec": "/b/config.json", "mode": "spec",
            "devices": ["GPU-1"],
        }  # fmt: skip


def test_an_engines_log_is_appended_to(tmp_path: Path, config: Config) -> None:
    engine = tmp_path / "log.json"
    engine.write_text("{}\n")
    log.error("gpu-py", SENTENCES, config, str(engine))
    assert json.loads(engine.read_text().splitlines()[1])["msg"] == MESSAGE


def test_a_closed_stderr_loses_no_log_line(tmp_path: Path) -> None:
    engine, state = tmp_path / "log.json", tmp_path / "state"
    code = f"""
import os
from gpuhook.base import log
from gpuhook.base.config.model import Config
os.close(2)
config = Config()
config.state_dir = {str(state)!r}
log.error("gpu-py", {SENTENCES!r}, config, {str(engine)!r})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert messages(engine) == messages(state / log.ERRORS) == [MESSAGE]


@pytest.mark.parametrize("path", ["/proc/none/log.json", "/", "/dev/full"])
def test_a_log_that_cannot_be_written_is_ignored(config: Config, path: str) -> None:
    config.cli_debug = path
    log.error("gpu-py", SENTENCES, config, path)
    assert messages(f"{config.state_dir}/{log.ERRORS}") == [MESSAGE]


def test_kept_errors_are_readable_only_by_the_owner(config: Config) -> None:
    log.keep("gpuhook-prestart", "first", config)
    log.keep("gpuhook-prestart", "second", config)
    kept = Path(config.state_dir, log.ERRORS)
    assert messages(kept) == ["gpuhook-prestart: first", "gpuhook-prestart: second"]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_the_file_of_kept_errors_is_bounded(config: Config) -> None:
    kept = Path(config.state_dir, log.ERRORS)
    kept.write_bytes(b"x" * (1 << 20))
    log.keep("gpuhook-prestart", "new", config)
    assert messages(kept) == ["gpuhook-prestart: new"]


def test_a_folder_open_to_others_is_not_written_to(config: Config) -> None:
    Path(config.state_dir).chmod(0o777)
    log.keep("gpuhook-prestart", "lost", config)
    assert os.listdir(config.state_dir) == []


def test_a_missing_state_folder_is_created(config: Config) -> None:
    config.state_dir += "/new"
    log.keep("gpuhook-prestart", "kept", config)
    assert os.listdir(config.state_dir) == [log.ERRORS]


def test_no_error_is_kept_if_the_state_folder_cannot_be_made(config: Config) -> None:
    config.state_dir += "/missing/state"
    log.keep("gpuhook-prestart", "lost", config)
    assert os.listdir(os.path.dirname(os.path.dirname(config.state_dir))) == []


@pytest.mark.protects(
    "error-text",
    "control characters in error messages are escaped",
    instead='return f"{self.cause}. {self.remedy}."',
)
@pytest.mark.parametrize(
    "said", ["\x1b[2J", "\r", "\n", "\x9b2J", "\u2028", "\u202e", "\udc9b", "\0"]
)
def test_control_characters_in_an_error_are_escaped(
    config: Config, capfd: pytest.CaptureFixture[str], said: str
) -> None:
    """An error goes to the user, the engine and the logs, and may contain a name of any origin."""
    for error in (HeldError(f"It is {said}'s", "Wait"), RequestError("It is so", f"Ask {said}")):
        log.error("gpu-py", str(error), config, str(Path(config.state_dir).parent / "engine.log"))
    texts = [capfd.readouterr().err[:-1].replace("\n", "", 1)]
    texts += [text for path in (*kept(config), f"{config.state_dir}/../engine.log")
              for text in messages(path)]  # fmt: skip
    assert all(text.isprintable() for text in texts)
    assert len(texts) == 9
