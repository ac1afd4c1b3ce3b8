"""First use of gpuhook install: questions, --gpus, and instructions for the next steps."""

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuhook.base.errors import EngineError
from gpuhook.monitor.host import systemctl
from gpuhook.tools.cli import _questions, cli
from gpuhook.tools.engines import installed
from gpuhook.tools.vendors.nvidia import program_links

PROGRAM = "from gpuhook.tools.cli import main; main()"
NOT_YET = "docker: docker run --gpus, and devices in compose files, don't work yet: "
QUESTION = "Make them work?"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to use as /, with Docker's and CRI-O's folders and gpuhook's programs."""
    for folder in ("etc/docker", "etc/crio", "opt/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("gpu-py", *program_links.LINKS.values()):
        (tmp_path / "opt/bin" / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))  # hides the engines of this host
    (tmp_path / "etc/docker/daemon.json").write_text("{}\n")
    return tmp_path


def words(system: Path, *more: str) -> list[str]:
    return ["install", f"--prefix={system}", f"--runtime-path={system}/opt/bin/gpu-py", *more]


def call(system: Path, *more: str, says: str | None = None) -> Result:
    return CliRunner().invoke(cli, words(system, *more), input=says, catch_exceptions=False)


def runtimes(system: Path) -> dict[str, Any]:
    document = json.loads((system / "etc/docker/daemon.json").read_text())
    found: dict[str, Any] = document.get("runtimes", {})
    return found


def on_terminal(arguments: list[str], answers: str) -> tuple[int, str]:
    """Run gpuhook on a new terminal; return its status and the text that the terminal shows."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            os.write(ours, answers.encode())
            shown = b""
            while select.select([ours], [], [], 60)[0]:
                try:
                    piece = os.read(ours, 1 << 16)
                except OSError:  # EIO: every process has closed the terminal
                    break
                shown += piece
            return process.wait(60), shown.decode().replace("\r\n", "\n")
    finally:
        os.close(ours)


# Which engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--format=json"], ["--gpus"]])
def test_install_without_an_engine_or_terminal_is_refused(system: Path, more: list[str]) -> None:
    before = sorted(system.rglob("*"))
    with pytest.raises(
        EngineError, match="No engine was named, and this host has docker, crio"
    ) as e:
        call(system, *more)
    assert "--engine docker, or all of them with --engine all" in str(e.value)
    assert sorted(system.rglob("*")) == before
    assert runtimes(system) == {}


def test_on_a_terminal_install_asks_for_the_engines(system: Path) -> None:
    status, shown = on_terminal(words(system, "--no-gpus"), "n\ny\n")
    assert status == 0, shown
    assert "Container engines on this host: docker, crio" in shown
    assert runtimes(system) == {}
    assert [*(system / "etc/crio").rglob("*gpuhook*")]


def test_declining_every_engine_changes_nothing(system: Path) -> None:
    status, shown = on_terminal(words(system), "n\nn\n")
    assert status == 1
    assert "--engine all" in shown
    assert runtimes(system) == {}


def test_engine_all_installs_for_every_engine_found(system: Path) -> None:
    assert call(system, "--engine=all").exit_code == 0
    assert "gpu-py" in runtimes(system)
    assert [*(system / "etc/crio").rglob("*gpuhook*")]


# --gpus -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "makes"), [("\n", True), ("y\n", True), ("n\n", False)])
def test_on_a_terminal_install_asks_about_the_gpus_option(
    system: Path, answer: str, makes: bool
) -> None:
    status, shown = on_terminal(words(system, "--engine=docker"), answer)
    assert status == 0, shown
    assert f"{QUESTION} [Y/n]" in shown
    assert ("nvidia" in runtimes(system)) is makes
    assert (system / "usr/local/bin/nvidia-ctk").is_symlink() is makes
    assert NOT_YET not in shown
    if makes:
        assert QUESTION not in on_terminal(words(system, "--engine=docker"), "")[1]


def test_an_installed_nvidia_toolkit_makes_no_the_default_answer(system: Path) -> None:
    theirs = system / "usr/bin/nvidia-container-runtime-hook"
    theirs.parent.mkdir(parents=True)
    theirs.touch(0o755)
    status, shown = on_terminal(words(system, "--engine=docker"), "\n")
    assert status == 0, shown
    assert f"{QUESTION} [y/N]" in shown
    assert [*runtimes(system)] == ["gpu-py"]
    call(system, "--engine=docker", "--set-default")
    assert NOT_YET not in call(system, "--engine=docker").output


@pytest.mark.parametrize("word", ["--gpus", "--no-gpus", "--nvidia-names", "--dry-run"])
def test_an_option_given_on_the_command_line_is_not_asked_for(system: Path, word: str) -> None:
    status, shown = on_terminal(words(system, "--engine=docker", word), "")
    assert status == 0, shown
    assert QUESTION not in shown


def test_without_a_terminal_the_last_line_shows_the_gpus_command(system: Path) -> None:
    last = call(system, "--engine=docker").stdout.splitlines()[-1]
    assert last == f"{NOT_YET}gpuhook install --engine docker --gpus"
    done = call(system, "--engine=docker", "--gpus")
    assert NOT_YET not in done.stdout
    for more in ((), ("--set-default",)):
        assert NOT_YET not in call(system, "--engine=docker", *more).stdout
    assert NOT_YET not in call(system, "--engine=crio").stdout


def test_the_nvidia_names_option_works_as_gpus(system: Path) -> None:
    call(system, "--engine=docker", "--nvidia-names")
    assert [*runtimes(system)] == ["gpu-py", "nvidia"]
    call(system, "--engine=docker", "--no-nvidia-names")
    assert [*runtimes(system)] == ["gpu-py"]
    done = call(system, "--engine=docker", "--gpus", "--no-nvidia-names")
    assert done.exit_code == 2
    assert "--nvidia-names is the old name of --gpus" in done.stderr


@pytest.mark.parametrize("entry", ["/usr/bin/nvidia-container-runtime", "/opt/other/gpu-py"])
def test_an_existing_foreign_nvidia_runtime_stays_unchanged(system: Path, entry: str) -> None:
    text = json.dumps({"runtimes": {"nvidia": {"path": entry}}})
    (system / "etc/docker/daemon.json").write_text(text)
    call(system, "--engine=docker", "--gpus")
    assert runtimes(system)["nvidia"] == {"path": entry}


@pytest.mark.parametrize("name", ["nvidia", "other"])
@pytest.mark.parametrize("engine", ["docker", "containerd", "crio", "podman"])
def test_nvidia_ctk_never_moves_our_entry(tmp_path: Path, name: str, engine: str) -> None:
    """Scripts pass the path of NVIDIA's runtime, which may be a link to gpu-py, or missing."""
    ours, theirs = tmp_path / "opt/gpu-py", tmp_path / "bin/nvidia-container-runtime"
    for path in (ours, theirs):
        path.parent.mkdir()
        path.touch(0o755)
    config = tmp_path / ("99.conf" if engine == "podman" else "config")
    file = [f"--config={config}", f"--state-dir={tmp_path}/state"]
    install = ["install", f"--engine={engine}", f"--runtime-path={ours}", *file]
    configure = ["runtime", "configure", f"--runtime={engine}", f"--nvidia-runtime-name={name}"]
    run = CliRunner().invoke
    for line in (
        install,
        [*configure, f"--nvidia-runtime-path={ours}", *file],
        [*configure, f"--nvidia-runtime-path={theirs}", *file],
    ):
        assert run(cli, line, catch_exceptions=False).exit_code == 0
    text = "".join(
        path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file() and "state" not in path.parts
    )
    assert text.count(f'"{ours}"') == 1
    assert text.count(f'"{theirs}"') == 1


def test_the_nvidia_runtime_has_nvidias_path_for_dev_containers(system: Path) -> None:
    """The command line of dev containers looks for a runtime nvidia with NVIDIA's path."""
    call(system, "--engine=docker", "--engine=crio", "--gpus")
    link = "/usr/local/bin/nvidia-container-runtime"
    assert runtimes(system)["nvidia"] == {"path": link}
    assert runtimes(system)["gpu-py"] == {"path": f"{system}/opt/bin/gpu-py"}
    for more in ((), ("--gpus",), ("--set-default",)):
        call(system, "--engine=docker", *more)
        assert runtimes(system)["nvidia"] == {"path": link}
    call(system, "--engine=docker", "--no-gpus")
    assert [*runtimes(system)] == ["gpu-py"]


def test_an_earlier_nvidia_entry_of_ours_gets_nvidias_path(system: Path) -> None:
    ours = {"path": f"{system}/opt/bin/gpu-py"}
    text = json.dumps({"runtimes": {"nvidia": ours, "gpu-py": ours}})
    (system / "etc/docker/daemon.json").write_text(text)
    call(system, "--engine=docker", "--gpus")
    assert runtimes(system)["nvidia"]["path"].endswith("/nvidia-container-runtime")
    assert runtimes(system)["gpu-py"] == ours


def test_nvidia_ctk_keeps_the_nvidia_runtimes_path(tmp_path: Path) -> None:
    for name in ("gpu-py", *program_links.LINKS.values()):
        (tmp_path / name).touch(0o755)
    config, state = tmp_path / "daemon.json", f"--state-dir={tmp_path}/state"
    program, folder = f"--runtime-path={tmp_path}/gpu-py", f"--bin-dir={tmp_path}/names"
    install = ["install", "--engine=docker", "--gpus", program, folder]
    CliRunner().invoke(cli, [*install, f"--config={config}", state], catch_exceptions=False)
    before = config.read_text()
    words = ["runtime", "configure", "--runtime=docker", "--nvidia-runtime-name=nvidia", state]
    CliRunner().invoke(cli, [*words, f"--config={config}"], catch_exceptions=False)
    assert config.read_text() == before
    assert "names/nvidia-container-runtime" in before


# --gpus by CDI ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "version", "is_by_cdi"),
    [
        ("docker", "29.1.5", False), ("docker", "29.2.0", True), ("docker", "20.10.24", False),
        ("docker", "30.0", True), ("docker", None, False), ("containerd", "2.2.9", False),
        ("containerd", "2.3.0", True), ("podman", "4.9.3", False), ("podman", "5.0.0", True),
        ("crio", "1.36", False),
    ],
)  # fmt: skip
def test_only_recent_engine_versions_serve_gpus_by_cdi(
    engine: str, version: str | None, is_by_cdi: bool
) -> None:
    assert installed.serves_gpus_by_cdi(engine, version) is is_by_cdi
    assert bool(installed.missing_gpus(engine, version)) is (engine == "podman" and not is_by_cdi)


@pytest.mark.parametrize(
    ("version", "more", "has_cdi"),
    [
        ("29.1.5", ["--gpus"], False),
        ("29.2.1", ["--gpus"], True),
        ("29.2.1", ["--gpus", "--no-cdi"], False),
        ("29.2.1", [], False),
    ],
)
def test_the_gpus_option_adds_cdi_if_the_docker_version_needs_it(
    system: Path, monkeypatch: pytest.MonkeyPatch, version: str, more: list[str], has_cdi: bool
) -> None:
    """No test host has such a Docker, so the test replaces the reported version."""
    monkeypatch.setattr(
        "gpuhook.tools.engines.installed.version", lambda engine, prefix="": version
    )
    done = call(system, "--engine=docker", *more)
    assert done.exit_code == 0, done.output
    assert (system / "var/lib/gpuhook/cdi.json").exists() is has_cdi
    assert (f"docker {version} serves --gpus by CDI specs" in done.stdout) is has_cdi


# What to do next --------------------------------------------------------------------------------


def driver(system: Path, monkeypatch: pytest.MonkeyPatch, *paths: str, more: str = "") -> None:
    """Configure a driver root with these folders only."""
    root = system / "driver"
    root.mkdir()
    for path in paths:
        (root / path).mkdir(parents=True)
    config = system / "config.toml"
    config.write_text(f'[gpuhook]\nroot = "{root}"\n{more}')
    monkeypatch.setenv("GPUHOOK_CONFIG", str(config))


@pytest.mark.parametrize("engine", ["docker", "podman", "crio"])
def test_install_without_a_driver_says_so(
    system: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    driver(system, monkeypatch)
    lines = call(system, f"--engine={engine}", "--no-gpus").stdout.splitlines()
    at = lines.index(
        "No driver of a GPU is loaded here: install one, until gpuhook info shows its GPUs, or try "
        "simulated GPUs: gpuhook help simulate"
    )
    assert not [line for line in lines if line.startswith("Try it: ")]
    assert lines[at + 1].startswith(f"Then try: {engine} run --rm") is (engine != "crio")
    assert lines[-1] == "Check this host: gpuhook doctor"


def test_install_ends_with_a_trial_command_and_the_doctor(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(system, monkeypatch, "proc/driver/nvidia")
    done = call(system, "--engine=docker", "--no-gpus")
    trial = "docker run --rm --runtime gpu-py -e NVIDIA_VISIBLE_DEVICES=all debian:12 nvidia-smi -L"
    assert done.stdout.splitlines()[-2:] == [f"Try it: {trial}", "Check this host: gpuhook doctor"]
    done = call(system, "--engine=docker", "--gpus")
    trial = "docker run --rm --gpus all debian:12 nvidia-smi -L"
    assert done.stdout.splitlines()[-2:] == [f"Try it: {trial}", "Check this host: gpuhook doctor"]
    again = call(system, "--engine=docker").stdout.splitlines()
    assert again[-3] == "Nothing has changed: these settings were already in the engine's files"
    assert again[-2:] == done.stdout.splitlines()[-2:]
    assert "Try it" not in call(system, "--engine=docker", "--set-default", "--dry-run").stdout


DECLARED = """
[[gpuhook.vendors]]
name = "acme"
variable = "ACME_VISIBLE_DEVICES"
kind = "acme.com/npu"
nodes = ["/dev/acme{n}"]
"""


@pytest.mark.parametrize(
    ("path", "more", "variable"),
    [
        ("sys/module/amdgpu", "", "AMD_VISIBLE_DEVICES"),
        ("dev", DECLARED, "ACME_VISIBLE_DEVICES"),
    ],
)
def test_the_trial_command_uses_the_hosts_vendor(
    system: Path, monkeypatch: pytest.MonkeyPatch, path: str, more: str, variable: str
) -> None:
    driver(system, monkeypatch, path, more=more)
    done = call(system, "--engine=podman", "--runtime-name=ours")
    asks = f"podman run --rm --runtime ours -e {variable}=all debian:12 ls -R /dev"
    assert f"Try it: {asks}\n" in done.stdout


def test_install_prints_the_next_steps_as_json(system: Path) -> None:
    found = json.loads(call(system, "--engine=docker", "--format=json").stdout)
    assert found["next"][-1].startswith(NOT_YET)
    again = json.loads(call(system, "--engine=docker", "--format=json").stdout)
    assert not again["changed"]
    assert again["next"] == [again["next"][0], *found["next"]]
    assert again["next"][0].startswith("Nothing has changed: ")


@pytest.mark.parametrize(
    ("cgroup", "command"),
    [
        ("0::/system.slice/docker.service\n", "systemctl reload docker"),
        ("3:devices:/\n1:name=systemd:/system.slice/docker.service\n", "systemctl reload docker"),
        ("0::/system.slice/snap.docker.dockerd.service\n", "systemctl reload snap.docker.dockerd"),
        ("0::/user.slice/user-7.slice/user@7.service/app.slice/docker.service\n",
         "systemctl --user reload docker"),
        ("0::/system.slice/ssh.service\n", ""),
        ("0::/docker/abc\n", ""),
        ("0::/system.slice/docker x.service\n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_reload_command_uses_systemctl_for_a_systemd_service(cgroup: str, command: str) -> None:
    assert systemctl.command_in("reload", "docker", cgroup.encode()) == command


def test_no_question_is_asked_without_a_terminal_for_input() -> None:
    assert not _questions.can_ask()  # pytest's input isn't a terminal


@pytest.mark.parametrize(
    ("version", "more", "works", "is_told"),
    [
        ("5.0.0", [], False, True),
        ("5.4.2", ["--no-gpus"], False, False),
        ("5.4.2", ["--gpus"], True, False),
        ("5.4.2", ["--cdi"], True, False),
        ("4.3.1", [], False, False),
        ("4.3.1", ["--gpus"], False, False),
    ],
)
def test_podman_gpus_hint_depends_on_version_and_options(
    system: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    more: list[str],
    works: bool,
    is_told: bool,
) -> None:
    monkeypatch.setattr(
        "gpuhook.tools.engines.installed.version", lambda engine, prefix="": version
    )
    driver(system, monkeypatch, "proc/driver/nvidia")
    done = call(system, "--engine=podman", *more)
    assert done.exit_code == 0, done.output
    assert ("Try it: podman run --rm --gpus all debian:12 nvidia-smi -L\n" in done.stdout) is works
    told = "podman: podman run --gpus doesn't work yet: gpuhook install --engine podman --gpus\n"
    assert (told in done.stdout) is is_told
