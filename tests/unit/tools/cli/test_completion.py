"""Completion, as the script of each shell requests it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete, get_completion_class
from click.testing import CliRunner

from gpuhook.base.config.loader import load
from gpuhook.base.oci.spec import ContainerState
from gpuhook.core.inventory import cache
from gpuhook.core.records import records
from gpuhook.tools.cli import _completion, cli
from gpuhook.vendors.nvidia.vendor import VENDOR
from gpuhook_simulate.vendors.nvidia import Options, build

ENTRY = "from gpuhook.tools.cli import main; main()"


def _gpuhook(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENTRY, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [("bash", "gpuhook do", "plain,doctor"), ("zsh", "gpuhook do", "plain\ndoctor\n"),
     ("fish", "gpuhook do", "plain,doctor\t"), ("bash", "gpuhook doctor --rep", "plain,--report"),
     ("bash", "gpuhook doctor --format ", "plain,text\nplain,json"),
     ("bash", "gpuhook completion ", "plain,bash\nplain,zsh\nplain,fish")],
)  # fmt: skip
def test_words_are_completed(shell: str, line: str, expected: str) -> None:
    words = line.split(" ")
    settings = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    if shell == "fish":
        settings["COMP_CWORD"] = words[-1]
    done = _gpuhook(_GPUHOOK_COMPLETE=f"{shell}_complete", **settings)
    assert expected in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_completion_script_sets_its_variable(shell: str) -> None:
    done = _gpuhook("completion", shell)
    assert done.returncode == 0
    assert f"_GPUHOOK_COMPLETE={shell}_complete" in done.stdout


def test_the_completion_script_works_in_bash(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "gpuhook"
    program.write_text(f"#!{sys.executable}\n{ENTRY}\n")
    program.chmod(0o755)
    script = (
        f'eval "$({program} completion bash)"; COMP_WORDS=({program} expl); COMP_CWORD=1; '
        f'_gpuhook_completion {program}; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "explain\n"


def test_an_unknown_shell_is_refused() -> None:
    done = _gpuhook("completion", "csh")
    assert done.returncode == 2
    assert "csh" in done.stderr


def _completed(line: str, shell: str = "zsh") -> list[str]:
    """Return the words that a shell is offered for the last word of a line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMP_WORDS", line)
        patch.setenv("COMP_CWORD", str(line.count(" ")))
        _completion.register()
        kind = get_completion_class(shell)
        assert kind is not None
        text = kind(cli, {}, "gpuhook", "_GPUHOOK_COMPLETE").complete()
    if shell == "bash":
        return [each.partition(",")[2] for each in text.splitlines()]
    return text.splitlines()[1::3]


def test_configuration_keys_and_values_are_completed() -> None:
    assert _completed("gpuhook config set nvidia-container-runtime.mod")[0] == (
        "nvidia-container-runtime.mode="
    )
    assert "features.no-additional-gids-for-device-nodes=" in _completed("gpuhook config set feat")
    line = "gpuhook config set gpuhook.helper="
    assert _completed(line) == ["gpuhook.helper=true", "gpuhook.helper=false"]
    assert _completed("gpuhook config set nvidia-container-runtime.mode=sp") == [
        "nvidia-container-runtime.mode=spec"
    ]


def test_vendors_engines_kinds_and_capabilities_are_completed() -> None:
    assert _completed("gpuhook simulate /x --vendor ne") == ["neuron"]
    assert _completed("gpuhook runtime configure --runtime con") == ["containerd"]
    assert "podman" in _completed("gpuhook install --engine ")
    assert _completed("gpuhook simulate /x --model H100,A100-") == ["H100,A100-40GB"]
    assert _completed("gpuhook cdi generate --kind nv") == ["nvidia.com/gpu"]
    line = "gpuhook driver-folder /x --capabilities compute,u"
    assert _completed(line) == ["compute,utility"]


def test_commands_after_help_are_completed() -> None:
    assert _completed("gpuhook help cdi gen") == ["generate"]
    assert _completed("gpuhook help expl") == ["explain"]
    assert _completed("gpuhook help quux x") == []


def test_files_and_folders_are_completed() -> None:
    assert _completed("gpuhook list --config x", "bash") == ["x"]
    items = ShellComplete(cli, {}, "gpuhook", "").get_completions(["list", "--config"], "x")
    assert [(each.type, each.value) for each in items] == [("file", "x")]
    items = ShellComplete(cli, {}, "gpuhook", "").get_completions(["driver-folder"], "x")
    assert [each.type for each in items] == ["dir"]


def _saved_machine(tmp_path: Path) -> str:
    """Simulate and save a machine, and return the configuration that uses it."""
    build(Options(root=str(tmp_path / "root"), gpus=2))
    config = tmp_path / "config.toml"
    config.write_text(
        f'nvidia-container-cli.root = "{tmp_path}/root"\ngpuhook.state-dir = "{tmp_path}/state"\n'
    )
    cache.refresh(load(str(config)), VENDOR)
    return str(config)


def test_devices_of_this_machine_are_completed(tmp_path: Path) -> None:
    config = _saved_machine(tmp_path)
    assert _completed("gpuhook explain -e NVIDIA_VIS") == ["NVIDIA_VISIBLE_DEVICES="]
    found = _completed(f"gpuhook explain --config {config} -e NVIDIA_VISIBLE_DEVICES=")
    prefix = "NVIDIA_VISIBLE_DEVICES="
    assert found[:3] == [f"{prefix}all", f"{prefix}none", f"{prefix}0"]
    assert found[3].startswith(f"{prefix}GPU-")
    found = _completed(f"gpuhook explain --config {config} -e NVIDIA_VISIBLE_DEVICES=0,")
    assert f"{prefix}0,1" in found
    assert f"{prefix}0,0" not in found
    found = _completed("gpuhook explain -e NVIDIA_DRIVER_CAPABILITIES=ut")
    assert found == ["NVIDIA_DRIVER_CAPABILITIES=utility"]


def test_words_split_by_bash_are_completed(tmp_path: Path) -> None:
    config = _saved_machine(tmp_path)
    line = f"gpuhook explain --config = {config} -e NVIDIA_VISIBLE_DEVICES = "
    assert _completed(line, "bash")[:3] == ["all", "none", "0"]
    assert _completed("gpuhook list --format = js", "bash") == ["json"]
    assert _completed("gpuhook config set gpuhook.helper = t", "bash") == ["true"]
    done = CliRunner().invoke(cli, ["completion", "bash"])
    assert "|| compopt -o nospace" in done.stdout


def test_containers_are_completed_by_id_without_an_engine(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'gpuhook.state-dir = "{tmp_path}/state"\n')
    process = os.open("/proc/self", os.O_PATH)
    try:
        state = ContainerState("f" * 64, os.getpid(), "/nowhere", None)
        record = records.describe(state, None, [])
        with records.RecordWriter(f"{tmp_path}/state", process, record):
            assert _completed(f"gpuhook repair --config {config} ff") == ["f" * 12]
            assert _completed(f"gpuhook repair --config {config} e") == []
    finally:
        os.close(process)


def test_a_broken_config_gives_no_completions_except_for_config_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "broken.toml"
    config.write_text("[")
    assert _completed(f"gpuhook repair --config {config} x") == []
    assert _completed(f"gpuhook cdi generate --config {config} --kind nv") == []
    line = "gpuhook config set gpuhook.helper=t"  # this command can repair the file
    monkeypatch.setenv("GPUHOOK_CONFIG", str(config))
    assert _completed(line) == ["gpuhook.helper=true"]
