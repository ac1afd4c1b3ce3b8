"""gpuhook cdi list and validate, as users call them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuhook.core.cdi import folders
from gpuhook.tools.cdi import managed_specs
from gpuhook.tools.cli import cli

GOOD = {
    "cdiVersion": "0.5.0",
    "kind": "vendor.com/gpu",
    "devices": [
        {"name": "1", "containerEdits": {"env": ["A=b"]}},
        {"name": "0", "containerEdits": {"env": ["A=b"]}},
    ],
}


def of(name: str) -> dict[str, Any]:
    return {**GOOD, "devices": [{"name": name, "containerEdits": {"env": ["A=b"]}}]}


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["cdi", *map(str, words)])


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A configuration with two folders: etc has good and bad files, run is missing."""
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "good.json").write_text(json.dumps(GOOD))
    (etc / "twin.json").write_text(json.dumps(of("0")))
    (etc / "bad.yaml").write_text("cdiVersion: 0.3.0\nkind: v/c\nxyz: 1\ndevices: 7\n")
    (etc / "other.yml").write_text("")
    config = tmp_path / "config.toml"
    dirs = json.dumps([str(etc), str(tmp_path / "run")])
    config.write_text(f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = {dirs}\n")
    return tmp_path


def test_cdi_list_prints_devices_and_problems_as_json(machine: Path) -> None:
    done = run("list", "--config", machine / "config.toml", "--format", "json")
    etc = machine / "etc"
    assert done.exit_code == 0
    assert json.loads(done.output) == {
        "devices": [{"name": "vendor.com/gpu=1", "file": f"{etc}/good.json"}],
        "conflicts": [
            {"name": "vendor.com/gpu=0", "files": [f"{etc}/good.json", f"{etc}/twin.json"]}
        ],
        "errors": [
            {"file": f"{etc}/bad.yaml", "line": 3, "message": "xyz isn't a field that CDI knows"},
            {"file": f"{etc}/bad.yaml", "line": 4, "message": "devices must be a list, not '7'"},
        ],
        "ignored": [
            {"file": f"{etc}/other.yml", "reason": folders.OTHER_ENDING},
            {"file": f"{machine}/run", "reason": folders.MISSING},
        ],
    }


def test_cdi_list_prints_devices_and_problems_as_text(machine: Path) -> None:
    done = run("list", "--config", machine / "config.toml")
    etc = machine / "etc"
    conflict = f"vendor.com/gpu=0 is in {etc}/good.json and {etc}/twin.json"
    conflict += ", so none of these files counts for it"
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "NAME              FILE",
        f"vendor.com/gpu=1  {etc}/good.json",
    ]
    assert done.stderr.splitlines() == [
        f"error: {etc}/bad.yaml, line 3: xyz isn't a field that CDI knows",
        f"error: {etc}/bad.yaml, line 4: devices must be a list, not '7'",
        f"error: {conflict}",
        f"ignored: {etc}/other.yml: {folders.OTHER_ENDING}",
        f"ignored: {machine}/run: {folders.MISSING}",
    ]


def test_command_line_folders_replace_configured_ones(machine: Path) -> None:
    for name, device in (("a", "x"), ("b", "x")):
        (machine / name).mkdir()
        (machine / name / "x.json").write_text(json.dumps(of(device)))
    words = ("--config", machine / "config.toml", "--format", "json")
    folders_ = ("--spec-dir", machine / "a", "--spec-dir", machine / "b")
    found = json.loads(run("list", *words, *folders_).output)
    name = "vendor.com/gpu=x"
    assert found["devices"] == [{"name": name, "file": f"{machine}/b/x.json"}]
    assert found["conflicts"] == found["errors"] == found["ignored"] == []


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m.json").write_text(json.dumps(of("x")))
    (tmp_path / "b\x1b[31m.yaml").write_text("{")
    (tmp_path / "c\x1b[31m").touch()
    path = os.fsencode(tmp_path) + b"/d\xff.json"
    with open(path, "wb") as file:
        file.write(b'{"\\u001b[31m": 1}')
    for words in (["list"], ["list", "--format", "json"], ["validate"]):
        done = run(*words, "--spec-dir", tmp_path)
        assert "\x1b" not in done.output + done.stderr
        assert done.exit_code == (words == ["validate"])


def test_cdi_list_without_devices_prints_one_sentence(tmp_path: Path) -> None:
    done = run("list", "--spec-dir", tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"There are no CDI devices in {tmp_path}.\n"


def test_validate_reports_all_errors_in_the_folders(machine: Path) -> None:
    words = ("--config", machine / "config.toml")
    done = run("validate", *words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 3
    for name in ("bad.yaml", "twin.json"):
        (machine / "etc" / name).unlink()
    done = run("validate", *words)
    assert (done.exit_code, done.stdout) == (0, "1 CDI spec checked, no errors\n")


def test_validate_reports_a_missing_folder(tmp_path: Path) -> None:
    done = run("validate", "--spec-dir", tmp_path / "none")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path}/none: {folders.MISSING}\n"


SECOND = "a second CDI spec starts here, and engines read only the first: give it its own file"


@pytest.mark.parametrize(
    ("name", "rest", "line"),
    [
        ("a.yaml", "---\n{}\n", 2),
        ("a.yaml", "# a comment\n---\n# another\nkind: x\n", 3),
        ("a.yaml", "...\n---\n- 1\n", 3),
        ("a.yaml", "---\n---\ntext\n", 3),
        ("a.yaml", "--- word\n", 2),
        ("a.yaml", "---\n{\n", 2),
        ("a.json", json.dumps(of("2")), 2),
        ("a.json", "]", 2),
        ("a.json", "text", 2),
        ("a.yaml", "", None),
        ("a.yaml", "\n\n# a comment\n", None),
        ("a.yaml", "---\n", None),
        ("a.yaml", "...\n", None),
        ("a.yaml", "...\n---\n# none\n...\n", None),
    ],
)
def test_a_second_cdi_spec_in_a_file_is_an_error_with_its_line(
    tmp_path: Path, name: str, rest: str, line: int | None
) -> None:
    file = tmp_path / name
    file.write_text(f"{json.dumps(of('1'))}\n{rest}")
    expected = "" if line is None else f"error: {file}, line {line}: {SECOND}\n"
    for words in ((file,), ("--spec-dir", tmp_path)):
        done = run("validate", *words)
        assert (done.exit_code, done.stderr) == (line is not None, expected)
    done = run("list", "--spec-dir", tmp_path)
    assert (done.exit_code, done.stderr) == (0, expected)
    assert "vendor.com/gpu=1" in done.stdout  # engines read the first spec, whatever follows it
    found = json.loads(run("list", "--spec-dir", tmp_path, "--format", "json").output)
    assert [each["line"] for each in found["errors"]] == ([] if line is None else [line])


def test_validate_reports_errors_of_the_given_files(machine: Path) -> None:
    good = machine / "etc" / "good.json"
    done = run("validate", good, machine / "etc" / "twin.json")
    assert (done.exit_code, done.stdout) == (0, "2 CDI specs checked, no errors\n")
    (machine / "copy.yml").write_text(good.read_text())
    done = run("validate", good, machine / "copy.yml", machine / "none.json", machine)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"error: {machine}/copy.yml: {folders.OTHER_ENDING}",
        f"error: {machine}/none.json: the file can't be read: No such file or directory",
        f"error: {machine}: the file can't be read: it isn't a regular file",
        f"error: {machine}: {folders.OTHER_ENDING}",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [(["validate", "a.json", "--spec-dir", "/etc"], "not both"),
     (["list", "--format", "yaml"], "yaml"), (["list", "x"], "Unexpected argument 'x'"),
     (["nothing"], "No such command")],
)  # fmt: skip
def test_invalid_command_lines_are_refused(words: list[str], text: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert text in done.stderr


def test_a_missing_configuration_is_a_config_error(tmp_path: Path) -> None:
    for words in (["list"], ["validate"]):
        done = run(*words, "--config", tmp_path / "none")
        assert done.exit_code == 1
        assert type(done.exception).__name__ == "ConfigError"


def test_cdi_list_prints_the_cause_of_a_failed_refresh(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = machine / "state"
    monkeypatch.setattr("gpuhook.tools.cli.cdi_folders.state_folder", lambda *_: str(state))
    managed_specs.save_errors(
        str(state), [managed_specs.RefreshFailure(1.0, "vendor.com/gpu", "NVML failed", "Wait")]
    )
    done = run("list", "--config", machine / "config.toml")
    assert done.exit_code == 0
    assert "last refresh: vendor.com/gpu NVML failed" in done.stderr
    assert "last refresh" not in done.stdout
    (state / "cdi-error.json").write_text("[")
    done = run("list", "--config", machine / "config.toml")
    assert "is damaged" in done.stderr
    managed_specs.save_errors(str(state), [])
    assert "last refresh" not in run("list", "--config", machine / "config.toml").stderr
