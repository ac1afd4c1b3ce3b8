"""log: what is told, and that telling never fails a container."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuhook import log


def test_an_error_goes_to_stderr_and_the_engines_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "log.json"
    engine.write_text("{}\n")
    log.error("gpu-py", "It failed. Mend it.", str(engine))
    assert capfd.readouterr().err == "gpu-py: It failed. Mend it.\n"
    record = json.loads(engine.read_text().splitlines()[1])
    assert (record["level"], record["msg"]) == ("error", "gpu-py: It failed. Mend it.")
    assert record["time"].endswith("Z")


def test_a_closed_stderr_loses_no_log_line(tmp_path: Path) -> None:
    engine = tmp_path / "log.json"
    code = f"from gpuhook import log; log.error('gpu-py', 'It failed.', {str(engine)!r})"
    words = [sys.executable, "-c", f"import os; os.close(2)\n{code}"]
    assert subprocess.run(words, check=False).returncode == 0
    assert json.loads(engine.read_text())["msg"] == "gpu-py: It failed."


@pytest.mark.parametrize("path", ["/nonexistent/log.json", "/", "/dev/full"])
def test_a_log_that_cannot_be_written_fails_nothing(path: str) -> None:
    log.error("gpu-py", "It failed.", path)


def test_errors_are_remembered_for_the_owner_alone(tmp_path: Path) -> None:
    log.remember(str(tmp_path), "gpuhook-prestart", "first")
    log.remember(str(tmp_path), "gpuhook-prestart", "second")
    kept = tmp_path / log.ERRORS
    messages = [json.loads(line)["msg"] for line in kept.read_text().splitlines()]
    assert messages == ["gpuhook-prestart: first", "gpuhook-prestart: second"]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_the_memory_has_an_end(tmp_path: Path) -> None:
    kept = tmp_path / log.ERRORS
    kept.write_bytes(b"x" * (1 << 20))
    log.remember(str(tmp_path), "gpuhook-prestart", "new")
    assert kept.stat().st_size < 200


def test_a_folder_open_to_others_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    log.remember(str(tmp_path), "gpuhook-prestart", "lost")
    assert os.listdir(tmp_path) == []


def test_the_state_folder_is_made(tmp_path: Path) -> None:
    log.remember(str(tmp_path / "state"), "gpuhook-prestart", "kept")
    assert os.listdir(tmp_path / "state") == [log.ERRORS]


def test_where_it_cannot_be_made_nothing_is_remembered(tmp_path: Path) -> None:
    log.remember(str(tmp_path / "missing/state"), "gpuhook-prestart", "lost")
    assert os.listdir(tmp_path) == []
