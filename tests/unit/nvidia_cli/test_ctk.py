"""nvidia-ctk's command line: as NVIDIA documents it, carried out by gpuhook."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import configured
import pytest
from click.testing import CliRunner, Result
from command_lines import commands

from gpuhook import __version__
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import CdiError
from gpuhook.nvidia_cli import ctk_cdi
from gpuhook.nvidia_cli.ctk import ctk, status_of
from gpuhook.tools.vendors.nvidia.program_links import LINKS

Case = dict[str, Any]


def run(*words: str, **environment: str) -> Result:
    env = {"PATH": "/usr/bin:/bin", **environment}
    return CliRunner().invoke(ctk, words, prog_name="nvidia-ctk", env=env)


EVERY = {path: (command, context) for path, command, context in commands(ctk, "nvidia-ctk")}


@pytest.mark.parametrize("path", EVERY)
def test_each_command_has_help_with_valid_examples(path: str) -> None:
    command, context = EVERY[path]
    text = command.get_help(context)
    assert "`" not in text
    assert command.examples or isinstance(command, click.Group) or command.hidden
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert re.fullmatch(r"[A-Z].*[.](  \[.*\])?", option.help or ""), option.opts
    for line in command.examples:
        words = shlex.split(line)
        begin = path.split() if path in line else []
        if begin and not isinstance(command, click.Group):
            command.make_context("x", words[len(begin) :], parent=context.parent).close()


def test_nvidia_ctk_is_a_link_to_gpuhook_ctk() -> None:
    assert LINKS["nvidia-ctk"] == "gpuhook-ctk"


def test_the_version_is_one_that_scripts_accept() -> None:
    for option in ("--version", "-v"):
        done = run(option)
        assert done.exit_code == 0
        first, second = done.stdout.splitlines()
        name, number = first.rsplit(" ", 1)
        assert name == "NVIDIA Container Toolkit CLI version"
        assert [*map(int, number.split("."))] >= [1, 14]  # the lowest version scripts accept
        assert second == f"commit: gpuhook {__version__}"


@pytest.mark.parametrize(
    "line",
    ["runtme", "cdi generate --mod=x", "cdi generate --mode=gds", "cdi generate --mode=x",
     "hook create-symlinks --link a::b", "config --set nope=1",
     "cdi generate --vendor=/", "cdi generate --device-name-strategy=name",
     "runtime configure --runtime=invalid", "runtime configure --runtime=enroot",
     "runtime configure --config-source=x",
     "runtime configure --nvidia-runtime-path=no-such-program",
     "cdi generate --driver-root=/elsewhere", "cdi generate --dev-root=/elsewhere",
     "cdi generate --library-search-path=/elsewhere",
     "cdi generate --config-search-path=/elsewhere"],
)  # fmt: skip
def test_an_unsupported_command_exits_1_with_one_sentence(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(line.split()) == 1
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.splitlines()[-1]
    assert re.fullmatch(r"(nvidia-ctk|Error): .*[.?]", last)


def test_unconfigured_manifest_folders_are_refused_with_the_setting() -> None:
    """The error names the setting to use instead, and NixOS' own folders are accepted."""
    config = Config()
    config.data_search_paths = ("/srv/a",)
    given: dict[str, Any] = dict.fromkeys(ctk_cdi._INEFFECTIVE, ()) | {
        "mode": "auto", "driver_root": None, "dev_root": None, "compat_root": "",
        "search_paths": (), "data_paths": ("/run/opengl-driver/share/", "/srv/a"),
    }  # fmt: skip
    ctk_cdi._check(config, given)
    given["data_paths"] = ("/srv/b,/usr/share",)
    with pytest.raises(CdiError) as caught:
        ctk_cdi._check(config, given)
    assert caught.value.remedy == "Run gpuhook config set gpuhook.data-search-paths=/srv/a:/srv/b"


def test_the_module_runs_as_a_program_with_its_exit_status() -> None:
    words = [sys.executable, "-m", "gpuhook.nvidia_cli.ctk"]
    done = subprocess.run([*words, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([*words, "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


# runtime configure ---------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> list[str]:
    return [f"--config={tmp_path}/daemon.json", f"--state-dir={tmp_path}/state",
            "--nvidia-runtime-path=/bin/true"]  # fmt: skip


@pytest.mark.vectors("runtime_configure", "runtime_configure")
def test_configure_behaves_as_in_the_vectors(case: Case, tmp_path: Path) -> None:
    def configure(*words: str) -> Result:
        done = run("runtime", "configure", *words)
        assert done.stdout == ""
        return done

    configured.check(case, tmp_path, configure)


@pytest.mark.vectors("installer", "installer.runtimes")
def test_runtimes_of_the_installer_match_the_vectors(case: Case, tmp_path: Path) -> None:
    """gpuhook has one of the installer's three runtimes; a setting replaces the others' modes."""
    given, expected = case["input"], case["expected"]
    words = [f"--config={tmp_path}/daemon.json", f"--state-dir={tmp_path}/state",
             "--nvidia-runtime-path=/bin/true"]  # fmt: skip
    words += [f"--nvidia-runtime-name={given['runtime_name']}"] if given["runtime_name"] else []
    words += ["--set-as-default"] if given["set_as_default"] else []
    done = run("runtime", "configure", *words)
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "daemon.json").read_text())
    assert {*expected["runtimes"]} - {*document["runtimes"]} == {"nvidia-cdi", "nvidia-legacy"}
    assert {*document["runtimes"]} == {"nvidia"}
    assert document.get("default-runtime") == expected["default"]


def test_configure_writes_the_name_nvidia(site: list[str], tmp_path: Path) -> None:
    done = run("runtime", "configure", "--runtime=docker", *site, "--set-as-default=true",
               "--cdi.enabled", "--config-source=command", "--executable-path=/x")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert json.loads((tmp_path / "daemon.json").read_text()) == {
        "runtimes": {"nvidia": {"path": "/bin/true"}},
        "default-runtime": "nvidia",
        "features": {"cdi": True},
    }
    assert done.stderr.count("has no effect") == 2
    assert "restart" in done.stderr or "reload" in done.stderr


def test_configure_is_quiet(site: list[str]) -> None:
    done = run("--quiet", "runtime", "configure", *site)
    assert (done.exit_code, done.output) == (0, "")


def test_configure_dry_run_prints_the_files(site: list[str], tmp_path: Path) -> None:
    done = run("runtime", "configure", *site, "--dry-run")
    assert json.loads(done.stdout) == {"runtimes": {"nvidia": {"path": "/bin/true"}}}
    assert not (tmp_path / "daemon.json").exists()
    assert not (tmp_path / "state").exists()


def test_configure_finds_the_runtime_by_its_program_name(tmp_path: Path) -> None:
    words = [f"--config={tmp_path}/x", f"--state-dir={tmp_path}/s", "--runtime-path=true"]
    done = run("runtime", "configure", *words, "--dry-run=1")
    assert json.loads(done.stdout)["runtimes"]["nvidia"]["path"].endswith("/bin/true")


# config --------------------------------------------------------------------------------------


def test_config_prints_the_settings_and_leaves_the_file_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("# mine\nswarm-resource = 'x'\n")
    done = run("config", f"--config-file={file}", "--set", "disable-require",
               "--set=nvidia-container-cli.environment=first=1,second=2")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "# mine" in done.stdout
    assert tomllib.loads(done.stdout) == {
        "swarm-resource": "x",
        "disable-require": True,
        "nvidia-container-cli": {"environment": ["first=1", "second=2"]},
    }
    assert file.read_text() == "# mine\nswarm-resource = 'x'\n"


def test_config_in_place_writes_the_file(tmp_path: Path) -> None:
    file, other = tmp_path / "config.toml", tmp_path / "other.toml"
    done = run("--quiet", "config", f"--config-file={file}", "--in-place")
    assert (done.exit_code, done.output) == (0, "")
    assert load(str(file)).mode == "hook"
    done = run("config", f"-c{file}", "-i", f"-o{other}",
               "--set=nvidia-container-runtime.mode=cdi,disable-require=true")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert not other.exists()
    assert (load(str(file)).mode, load(str(file)).disable_require) == ("cdi", True)
    run("config", f"-c{file}", f"--output={other}")
    assert other.read_text() == file.read_text()


def test_a_copy_of_a_private_configuration_is_private_too(tmp_path: Path) -> None:
    file, other = tmp_path / "config.toml", tmp_path / "other.toml"
    file.write_text("")
    file.chmod(0o640)
    for _ in range(2):  # the second time, the file exists and other users may read it
        assert run("config", f"-c{file}", f"--output={other}").exit_code == 0
        assert other.stat().st_mode & 0o777 == 0o600
        other.chmod(0o644)
    assert run("config", f"-c{file}", "-i", "--set=disable-require").exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o640


def test_config_leaves_out_ineffective_settings_with_a_warning(tmp_path: Path) -> None:
    words = ["--set=nvidia-container-runtime-hook.skip-mode-detection=true"]
    done = run("config", f"--config-file={tmp_path}/x", *words)
    assert done.exit_code == 0
    assert "warning: nvidia-container-runtime-hook.skip-mode-detection is left out" in done.stderr
    assert "skip-mode" not in done.stdout


def test_an_invalid_setting_is_not_written_to_config(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    done = run("config", f"-c{file}", "-i", "--set=nvidia-container-runtime.mode=nope")
    assert "must be one of" in str(done.exception)
    assert not file.exists()


@pytest.mark.parametrize("name", ["default", "create-default", "generate-default"])
def test_the_default_config_is_printed(name: str) -> None:
    done = run("config", name)
    assert done.exit_code == 0, done.output
    assert "#mode = " in done.stdout


# cdi list ------------------------------------------------------------------------------------


def test_cdi_list_prints_all_device_names(tmp_path: Path) -> None:
    one = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
           "devices": [{"name": name, "containerEdits": {"env": ["A=B"]}} for name in "10"],
           }  # fmt: skip
    (tmp_path / "one.json").write_text(json.dumps(one))
    (tmp_path / "broken.json").write_text("{")
    done = run("cdi", "list", f"--spec-dir={tmp_path}")
    assert done.exit_code == 0
    assert done.stdout == "nvidia.com/gpu=0\nnvidia.com/gpu=1\n"
    assert "Found 2 CDI devices" in done.stderr
    assert "broken.json" in done.stderr
    done = run("--quiet", "cdi", "list", NVIDIA_CTK_CDI_SPEC_DIRS=str(tmp_path))
    assert done.output == "nvidia.com/gpu=0\nnvidia.com/gpu=1\n"
