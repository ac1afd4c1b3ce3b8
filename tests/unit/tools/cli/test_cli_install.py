"""gpuhook install, uninstall and configure, run on folders that stand for a system."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import configured
import pytest
from click.testing import CliRunner, Result

from gpuhook.base.errors import CdiError, ConfigError, EngineError
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.tools.cli import cli
from gpuhook.tools.vendors.nvidia import program_links as nvidia_names

DAEMON = '{\n  "log-driver": "json-file",\n  "features": { "buildkit": true }\n}\n'
CONTAINERD = "version = 2\n# mine\n[plugins]\n"


def tree(folder: Path) -> dict[str, str]:
    """Return the content below a folder: texts of files and targets of links, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = "link " + os.readlink(path) if path.is_symlink() else ""
        found[str(path)] = kind or (path.read_text() if path.is_file() else "folder")
    return found


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A folder with its own /etc and with three of gpuhook's programs."""
    (tmp_path / "etc/docker").mkdir(parents=True)
    (tmp_path / "etc/docker/daemon.json").write_text(DAEMON)
    (tmp_path / "etc/containerd").mkdir()
    (tmp_path / "etc/containerd/config.toml").write_text(CONTAINERD)
    (tmp_path / "etc/crio").mkdir()
    programs = tmp_path / "opt/bin"
    programs.mkdir(parents=True)
    for name in ("gpu-py", *nvidia_names.LINKS.values()):
        (programs / name).touch(0o755)
    return tmp_path


def call(system: Path, *words: str) -> Result:
    options = ["--prefix", str(system)]
    if words[0] == "install":
        options += ["--runtime-path", str(system / "opt/bin/gpu-py")]
    return CliRunner().invoke(cli, [words[0], *options, *words[1:]], catch_exceptions=False)


def test_uninstall_restores_every_changed_file(system: Path) -> None:
    before = tree(system)
    engines = [f"--engine={name}" for name in ("docker", "containerd", "crio", "podman")]
    options = ["--set-default", "--cdi", "--gpus", "--hook=precreate"]
    for advice in (True, False):
        done = call(system, "install", *engines, *options)
        assert done.exit_code == 0, done.output
        assert tree(system) != before
        assert ("restart Docker" in done.output) is advice
    done = call(system, "uninstall")
    assert done.exit_code == 0, done.output
    after = tree(system)
    for folder in ("var", "var/lib", "usr", "usr/local", "usr/local/bin"):
        after.pop(str(system / folder), None)
    assert after == before


def test_uninstall_reports_the_path_of_a_kept_edited_file(system: Path) -> None:
    path = system / "etc/enroot/hooks.d/98-gpuhook.sh"
    path.parent.mkdir(parents=True)
    call(system, "install", "--engine=enroot")
    text = path.read_text() + "# mine\n"
    path.write_text(text)
    for more, keeps in ((["--dry-run"], "would keep"), ([], "kept")):
        done = call(system, "uninstall", *more)
        assert f"enroot: {keeps} the edited file as {path}.edited\n" in done.output
        assert Path(f"{path}.edited").exists() is not bool(more)
    assert Path(f"{path}.edited").read_text() == text
    assert not path.exists()


def test_dry_run_shows_a_diff_and_changes_nothing(system: Path) -> None:
    before = tree(system)
    done = call(system, "install", "--engine=docker", "--gpus", "--dry-run")
    assert tree(system) == before
    path = system / "etc/docker/daemon.json"
    assert f"--- {path}\n+++ {path}\n" in done.stdout
    assert '+    "gpu-py": {\n' in done.stdout
    assert "would link" in done.stdout
    call(system, "install", "--engine=docker")
    installed = tree(system)
    done = call(system, "uninstall", "--dry-run")
    assert tree(system) == installed
    assert '-    "gpu-py": {\n' in done.stdout


def test_a_broken_config_file_stops_the_installation_for_all_engines(system: Path) -> None:
    (system / "etc/containerd/config.toml").write_text("version = \n")
    before = tree(system)
    with pytest.raises(EngineError, match=r"config\.toml is not valid TOML"):
        call(system, "install", "--engine=docker", "--engine=containerd")
    assert tree(system) == before


def test_uninstall_of_one_engine_leaves_the_others_installed(system: Path) -> None:
    call(system, "install", "--engine=docker", "--engine=containerd")
    call(system, "uninstall", "--engine=containerd")
    assert (system / "etc/containerd/config.toml").read_text() == CONTAINERD
    assert "gpu-py" in (system / "etc/docker/daemon.json").read_text()


def test_uninstall_without_an_installation_reports_nothing_to_remove(system: Path) -> None:
    done = call(system, "uninstall")
    assert done.exit_code == 0
    assert "nothing to remove" in done.stdout


def test_uninstall_warns_of_containers_bound_to_the_runtime(system: Path) -> None:
    call(system, "install", "--engine=docker")
    folder = system / "var/lib/docker/containers/abc"
    folder.mkdir(parents=True)
    (folder / "hostconfig.json").write_text('{"Runtime": "gpu-py"}')
    (folder / "config.v2.json").write_text('{"Name": "/training"}')
    done = call(system, "uninstall")
    assert "training" in done.stderr
    assert "gpu-py" in done.stderr


@pytest.mark.parametrize("own", ["", 'imports = ["conf.d/*.toml"]\n'])
def test_uninstall_warns_of_files_no_longer_imported(system: Path, own: str) -> None:
    """NVIDIA's toolkit adds no import if gpuhook's import covers its file."""
    config = system / "etc/containerd/config.toml"
    config.write_text(own + CONTAINERD)
    call(system, "install", "--engine=containerd")
    theirs = config.parent / "conf.d/99-nvidia.toml"
    theirs.write_text("version = 2\n")
    done = call(system, "uninstall")
    assert config.read_text() == own + CONTAINERD
    assert (f"{config} no longer imports {theirs}, which gpuhook" in done.stderr) is (not own)
    assert "99-gpuhook" not in done.stderr


@pytest.mark.parametrize("migrated", [False, True])
def test_copies_of_our_runtime_are_warned_of(system: Path, *, migrated: bool) -> None:
    """`containerd config migrate` also prints the content of imported files."""
    config = system / "etc/containerd/config.toml"
    config.write_text('version = 4\nimports = ["conf.d/*.toml"]\n')
    call(system, "install", "--engine=containerd", "--set-default")
    text = config.read_text()
    if migrated:
        text += (config.parent / "conf.d/99-gpuhook.toml").read_text().partition("version = 4")[2]
        config.write_text(text)
    done = call(system, "uninstall")
    assert ("gpu-py" in config.read_text()) == migrated
    assert (f"{config} has a copy of gpu-py" in done.stderr) == migrated


def test_existing_nvidia_programs_are_never_replaced(system: Path) -> None:
    theirs = system / "usr/bin/nvidia-container-cli"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    done = call(system, "install", "--engine=docker", "--gpus")
    assert f"{theirs} is installed already" in done.stderr
    folder = system / "usr/local/bin"
    assert sorted(os.listdir(folder)) == [
        "nvidia-cdi-hook",
        "nvidia-container-runtime",
        "nvidia-container-runtime-hook",
        "nvidia-ctk",
    ]
    (folder / "nvidia-container-runtime").unlink()
    (folder / "nvidia-container-runtime").write_text("theirs, installed later")
    call(system, "uninstall")
    assert os.listdir(folder) == ["nvidia-container-runtime"]
    assert theirs.read_text() == "theirs"


def test_nvidia_links_are_removed_with_the_last_configuration(system: Path) -> None:
    folder = system / "opt/names"
    config = f"--config={system}/etc/other.json"
    names = ["--gpus", f"--bin-dir={folder}"]
    call(system, "install", "--engine=docker", config, *names)
    call(system, "install", "--engine=docker")
    call(system, "install", "--engine=crio")
    for words in (["--engine=crio"], ["--engine=docker", config]):
        done = call(system, "uninstall", *words)
        assert f"{folder}/nvidia-container-cli" in done.stdout
        assert "kept" in done.stdout
        assert sorted(os.listdir(folder)) == sorted(nvidia_names.LINKS)
    done = call(system, "uninstall", "--engine=docker", "--dry-run")
    assert f"would remove {folder}/nvidia-container-cli" in done.stdout
    assert sorted(os.listdir(folder)) == sorted(nvidia_names.LINKS)
    done = call(system, "uninstall", "--engine=docker")
    assert f"removed {folder}/nvidia-container-cli" in done.stdout
    assert not folder.exists()
    assert "nothing to remove" in call(system, "uninstall").stdout


@pytest.mark.parametrize("engines", [[], ["--engine=all"], ["--engine=docker", "--engine=crio"]])
def test_config_option_without_exactly_one_engine_is_refused(
    system: Path, engines: list[str]
) -> None:
    done = call(system, "install", *engines, "--config=/x")
    assert done.exit_code == 2
    assert "one --engine" in done.stderr


def test_a_missing_or_relative_runtime_path_is_refused(tmp_path: Path) -> None:
    words = ["install", "--engine=docker", "--state-dir", str(tmp_path), "--config", "/x"]
    with pytest.raises(EngineError, match="isn't an executable program"):
        CliRunner().invoke(cli, [*words, "--runtime-path=/no/such"], catch_exceptions=False)
    with pytest.raises(EngineError, match="isn't an absolute path"):
        CliRunner().invoke(cli, [*words, "--runtime-path=gpu-py"], catch_exceptions=False)


def test_concurrent_installations_are_all_kept(system: Path) -> None:
    program = "from gpuhook.tools.cli import main; main()"
    options = [f"--prefix={system}", f"--runtime-path={system}/opt/bin/gpu-py"]
    words = [sys.executable, "-c", program, "install", "--engine=docker", *options]
    names = [f"gpu-{number}" for number in range(6)]
    running = [
        subprocess.Popen([*words, f"--runtime-name={name}"], stdout=subprocess.DEVNULL)
        for name in names
    ]
    assert [one.wait() for one in running] == [0] * len(names)
    runtimes = json.loads((system / "etc/docker/daemon.json").read_text())["runtimes"]
    assert sorted(runtimes) == names
    call(system, "uninstall")
    assert (system / "etc/docker/daemon.json").read_text() == DAEMON


@pytest.mark.parametrize("name", ["", "-x", "a/b", 'a"b', "a b", "x" * 64, "ä"])
def test_an_invalid_runtime_name_is_refused(system: Path, name: str) -> None:
    with pytest.raises(EngineError, match="isn't a valid runtime name"):
        call(system, "install", "--engine=docker", f"--runtime-name={name}")


def test_reload_reports_engines_that_need_a_restart(system: Path) -> None:
    done = call(system, "install", "--engine=docker", "--engine=containerd", "--reload")
    assert done.exit_code == 0
    assert "docker: no running process uses " in done.stdout
    assert "containerd: Restart containerd" in done.stdout


def test_only_one_restart_instruction_is_printed(system: Path) -> None:
    """A restart of Docker makes an earlier reload unnecessary."""
    done = call(system, "install", "--engine=docker", "--gpus", "--cdi")
    text = done.stdout.replace(str(system), "")
    said = [line for line in text.splitlines() if line.startswith("docker: ")]
    orders = [line for line in said if "estart" in line or "HUP" in line or "No running" in line]
    assert len(orders) == 1
    assert orders[0].startswith("docker: For --gpus, restart Docker")


def test_reload_still_reports_options_that_need_a_restart(system: Path) -> None:
    done = call(system, "install", "--engine=docker", "--gpus", "--reload")
    assert "docker: no running process uses " in done.stdout
    assert "docker: For --gpus, restart Docker" in done.stdout
    done = call(system, "install", "--engine=docker", "--cdi", "--reload")
    assert "docker: Restart Docker, which reads features only at start-up" in done.stdout


def test_cdi_specs_are_removed_with_the_last_engines_last_file(system: Path) -> None:
    kept, unit = (
        system / "var/lib/gpuhook/cdi.json",
        system / "etc/systemd/system/gpuhook-cdi-refresh.service",
    )
    files = [str(system / f"etc/docker/{name}.json") for name in ("daemon", "other")]
    for file in files:
        call(system, "install", "--engine=docker", f"--config={file}", "--cdi")
    call(system, "install", "--engine=crio", "--engine=podman", "--cdi")
    assert json.loads(kept.read_text())["engines"] == ["docker", "crio", "podman"]
    assert "kept for docker, crio" in call(system, "uninstall", "--engine=podman").stdout
    call(system, "uninstall", f"--config={files[0]}")
    assert json.loads(kept.read_text())["engines"] == ["docker", "crio"]
    call(system, "uninstall", f"--config={files[1]}")
    assert json.loads(kept.read_text())["engines"] == ["crio"]
    assert unit.exists()
    call(system, "uninstall", "--engine=crio")
    assert not kept.exists()
    assert not unit.parent.exists()


def test_a_hand_written_cdi_spec_with_our_hook_blocks_uninstall(system: Path) -> None:
    call(system, "install", "--engine=docker", "--engine=podman", "--cdi")
    folder = system / "etc/cdi"
    folder.mkdir()
    hook = Path(our_program("gpu-py")).parent / "gpuhook-cdi-hook"
    document = {
        "cdiVersion": "0.5.0",
        "kind": "a.com/b",
        "devices": [{"name": "0", "containerEdits": {"env": ["A=1"]}}],
        "containerEdits": {"hooks": [{"hookName": "createContainer", "path": str(hook)}]},
    }
    (folder / "mine.json").write_text(json.dumps(document))
    installed = tree(system)
    with pytest.raises(CdiError, match=r"Run this first: rm .*/mine\.json"):
        call(system, "uninstall", "--unless-in-use")
    assert tree(system) == installed
    assert call(system, "uninstall", "--engine=docker", "--unless-in-use").exit_code == 0
    (folder / "mine.json").unlink()
    assert call(system, "uninstall", "--unless-in-use").exit_code == 0
    assert not (system / "etc/systemd").exists()


def configure(*words: str) -> Result:
    return CliRunner().invoke(cli, ["runtime", "configure", *words], catch_exceptions=False)


@pytest.mark.vectors("runtime_configure", "runtime_configure")
def test_configure_behaves_as_in_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    options = ["runtime", "configure", "--nvidia-runtime-name=nvidia"]
    configured.check(case, tmp_path, lambda *words: CliRunner().invoke(cli, [*options, *words]))


def test_configure_writes_a_hook_file(tmp_path: Path) -> None:
    path = tmp_path / "hooks.d" / "hook.json"
    words = ["--config-mode=oci-hook", f"--oci-hook-path={path}", "--runtime=crio"]
    done = configure(
        *words, f"--state-dir={tmp_path}/state", "--nvidia-runtime-hook-path=/bin/true"
    )
    assert done.exit_code == 0, done.output
    hook = json.loads(path.read_text())
    assert hook["hook"]["path"] == "/bin/true"
    assert hook["hook"]["args"] == ["true", "prestart"]
    assert hook["stages"] == ["prestart"]


def test_configure_accepts_nvidias_spelling_of_options(tmp_path: Path) -> None:
    config = tmp_path / "daemon.json"
    words = ["--runtime=docker", f"--config={config}", f"--state-dir={tmp_path}/state"]
    done = configure(*words, "--cdi.enabled", "--nvidia-runtime-path=/bin/true", "--dry-run")
    assert not config.exists()
    assert '"cdi": true' in done.stdout
    configure(*words, "--enable-cdi", "--nvidia-runtime-path=/bin/true")
    document = json.loads(config.read_text())
    assert document == {"runtimes": {"gpu-py": {"path": "/bin/true"}}, "features": {"cdi": True}}
    assert "default-runtime" not in document


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio", "podman"])
def test_configure_accepts_a_runtime_that_is_installed_later(tmp_path: Path, engine: str) -> None:
    """NVIDIA's command accepts it, and images and operators call it before the program exists."""
    program, state = tmp_path / "bin/gpu-py", f"--state-dir={tmp_path}/state"
    config = tmp_path / ("99.conf" if engine == "podman" else "config")
    words = [f"--runtime={engine}", f"--config={config}", state, f"--nvidia-runtime-path={program}"]
    done = configure(*words)
    assert done.exit_code == 0
    assert f"{program} doesn't exist yet" in done.stderr
    found = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(str(program) in text for text in found)
    program.parent.mkdir()
    program.write_text("")
    with pytest.raises(EngineError, match="isn't an executable program"):
        configure(*words)
    program.chmod(0o755)
    assert "isn't there" not in configure(*words).output


def test_install_refuses_a_missing_runtime(tmp_path: Path) -> None:
    words = ["install", "--engine=docker", f"--config={tmp_path}/daemon.json"]
    words += [f"--runtime-path={tmp_path}/gpu-py", f"--state-dir={tmp_path}/state"]
    with pytest.raises(EngineError, match="isn't an executable program"):
        CliRunner().invoke(cli, words, catch_exceptions=False)
    assert [*tmp_path.iterdir()] == []


FOREIGN = "# mine\n[engine]\ncgroup_manager = 'systemd'\n"


@pytest.mark.parametrize(
    ("engine", "option", "usual"),
    [
        ("podman", "config", "etc/containers/containers.conf.d/99-gpuhook.conf"),
        ("podman", "drop-in-config", "etc/containers/containers.conf.d/99-gpuhook.conf"),
        ("crio", "drop-in-config", "etc/crio/crio.conf.d/99-gpuhook.conf"),
        ("containerd", "drop-in-config", "etc/containerd/conf.d/99-gpuhook.toml"),
    ],
)
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_install_refuses_to_replace_a_foreign_file(
    system: Path, engine: str, option: str, usual: str, dry_run: list[str]
) -> None:
    path = system / "etc/theirs.conf"
    path.write_text(FOREIGN)
    before = tree(system)
    with pytest.raises(EngineError, match=f"{path} exists and is not a file of gpuhook") as caught:
        call(system, "install", f"--engine={engine}", f"--{option}={path}", *dry_run)
    assert f"such as {system / usual}," in str(caught.value)
    assert tree(system) == before


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        ("podman", "etc/containers/containers.conf.d/99-gpuhook.conf"),
        ("podman", "etc/containers/oci/hooks.d/gpuhook.json"),
        ("crio", "etc/crio/crio.conf.d/99-gpuhook.conf"),
        ("containerd", "etc/containerd/conf.d/99-gpuhook.toml"),
    ],
)
@pytest.mark.parametrize("text", ["", "[other]\n", '{"hook": {"path": "/bin/other"}}'])
def test_install_refuses_a_foreign_file_at_the_default_path(
    system: Path, engine: str, path: str, text: str
) -> None:
    theirs = system / path
    theirs.parent.mkdir(parents=True)
    theirs.write_text(text if path.endswith(".json") or not text.startswith("{") else "a = 1\n")
    before = tree(system)
    with pytest.raises(EngineError, match=f"{theirs} exists and is not a file of gpuhook"):
        call(system, "install", f"--engine={engine}", "--hook=prestart")
    assert tree(system) == before


@pytest.mark.parametrize("engine", ["podman", "crio", "containerd"])
def test_installed_files_without_a_record_are_still_recognized(system: Path, engine: str) -> None:
    words = ["install", f"--engine={engine}", "--hook=prestart"]
    call(system, *words)
    shutil.rmtree(system / "var")
    assert call(system, *words, "--set-default").exit_code == 0
    call(system, "uninstall")
    assert not list((system / "etc").rglob("*gpuhook*"))


# An installation is a state -----------------------------------------------------------------

ENGINES = ("docker", "containerd", "crio", "podman")
# Option that adds something -> option that removes it again.
OPTIONS = {
    ("--set-default",): "--no-set-default",
    ("--gpus",): "--no-gpus",
    ("--cdi",): "--no-cdi",
    ("--hook=precreate",): "--hook=none",
}


# Each engine, and containerd also with each version of its file, which other engines don't touch.
VERSIONS = pytest.mark.parametrize(
    ("engine", "version"),
    [*((name, "") for name in ENGINES), ("containerd", "version = 2\n"),
     ("containerd", "version = 3\n")],
)  # fmt: skip


def files(system: Path) -> dict[str, str]:
    """Return the content below the system's folders, without gpuhook's state; TOML is parsed."""
    return {
        path: str(tomllib.loads(text)) if path.endswith(".toml") else text
        for path, text in tree(system).items()
        if "/var/" not in path
    }


@VERSIONS
def test_installing_again_keeps_earlier_options(system: Path, engine: str, version: str) -> None:
    (system / "etc/containerd/config.toml").write_text(version + '[debug]\nlevel = "info"\n')
    words = ("install", f"--engine={engine}")
    call(system, *words, *(word for option in OPTIONS for word in option), "--runtime-name=first")
    call(system, *words)
    before = tree(system)
    done = call(system, *words)
    assert tree(system) == before
    done = call(system, *words, "--set-default", "--runtime-name=first")
    assert tree(system) == before
    assert f"{engine}: unchanged {system}/etc" in done.stdout
    assert f"{engine}: changed" not in done.stdout
    assert "estart" not in done.output
    found = "".join(files(system).values())
    for word in ("first", "gpu-py", "nvidia"):
        assert word in found
    if engine == "podman":
        assert '"precreate"' in found
        assert "hooks_dir" in found
    call(system, "uninstall")
    assert not any("gpu-py" in text for text in files(system).values() if text[:5] != "link ")


@pytest.mark.parametrize("option", OPTIONS)
@VERSIONS
def test_an_option_is_removed_by_its_negation(
    system: Path, engine: str, option: tuple[str], version: str
) -> None:
    theirs = version + '[debug]\nlevel = "info"\n'
    (system / "etc/containerd/config.toml").write_text(theirs)
    words = ("install", f"--engine={engine}")
    call(system, *words)
    before = files(system)
    call(system, *words, *option)
    shown = call(system, *words, OPTIONS[option], "--dry-run").stdout
    assert ("--- " in shown or "would remove" in shown) is (files(system) != before)
    call(system, *words, OPTIONS[option])
    assert files(system) == before
    assert f"{engine}: changed" not in call(system, *words, OPTIONS[option]).stdout
    call(system, "uninstall")
    assert (system / "etc/containerd/config.toml").read_text() == theirs
    assert (system / "etc/docker/daemon.json").read_text() == DAEMON


def test_the_previous_default_runtime_is_restored(system: Path) -> None:
    path = system / "etc/docker/daemon.json"
    path.write_text('{"default-runtime": "crun"}\n')
    call(system, "install", "--engine=docker", "--set-default")
    done = call(system, "install", "--engine=docker", "--no-set-default")
    assert "Restart Docker, which keeps a default runtime" in done.stdout
    assert json.loads(path.read_text())["default-runtime"] == "crun"
    path.write_text(path.read_text().replace("crun", "runc"))
    call(system, "install", "--engine=docker", "--no-set-default")
    assert json.loads(path.read_text())["default-runtime"] == "runc"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_moved_gpuhook_updates_its_paths_in_engine_files(system: Path, engine: str) -> None:
    """Another gpuhook with a name of its own keeps its path."""
    for folder in ("opt/other", "opt/new"):
        shutil.copytree(system / "opt/bin", system / folder)
    words = ["install", f"--engine={engine}", f"--prefix={system}"]
    for more in (
        ["--runtime-path=/opt/bin/gpu-py", "--gpus", "--hook=prestart"],
        ["--runtime-path=/opt/other/gpu-py", "--runtime-name=other"],
        ["--runtime-path=/opt/new/gpu-py"],
    ):
        assert CliRunner().invoke(cli, [*words, *more], catch_exceptions=False).exit_code == 0
    found = "".join(text for text in files(system).values() if text[:5] != "link ")
    by_link = found.count("/usr/local/bin/nvidia-container-runtime")
    assert (found.count("/opt/new/gpu-py"), by_link) == ((1, 1) if engine == "docker" else (2, 0))
    assert found.count("/opt/other/gpu-py") == 1
    assert "/opt/bin" not in found
    if engine == "podman":
        assert "/opt/new/gpuhook-prestart" in found


@pytest.mark.parametrize("more", [[], ["--gpus"]])
def test_nvidia_links_are_updated_to_a_moved_gpuhook(system: Path, more: list[str]) -> None:
    call(system, "install", "--engine=docker", "--gpus")
    shutil.move(system / "opt/bin", system / "opt/new")
    path = f"--runtime-path={system}/opt/new/gpu-py"
    words = ["install", f"--prefix={system}", "--engine=docker", path, *more]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert "is installed already" not in done.output
    for name, program in nvidia_names.LINKS.items():
        assert os.readlink(system / "usr/local/bin" / name) == f"{system}/opt/new/{program}"
    call(system, "uninstall")
    assert not (system / "usr").exists()


def test_install_prints_its_result_as_json(system: Path) -> None:
    words = ("install", "--engine=docker", "--engine=podman", "--format=json")
    path = str(system / "etc/docker/daemon.json")

    def result(*more: str) -> Any:
        found = json.loads(call(system, *words, *more).stdout)
        docker, podman = found["engines"]
        assert (docker["engine"], podman["engine"]) == ("docker", "podman")
        assert podman["restart"] is False
        return found["changed"], docker["files"], docker["restart"], podman["changed"]

    assert result("--dry-run") == (True, [path], False, True)
    assert result() == (True, [path], False, True)
    for again in ((), ("--dry-run",), ("--no-cdi",)):
        assert result(*again) == (False, [], False, False)
    assert result("--hook=prestart") == (True, [], False, True)
    assert result("--gpus") == (True, [path], True, True)
    assert result("--gpus") == (False, [], False, False)
    assert result("--cdi")[0] is True
    assert result("--cdi")[0] is False


def test_uninstall_prints_its_result_as_json(system: Path) -> None:
    path = str(system / "etc/docker/daemon.json")

    def result(*more: str) -> Any:
        return json.loads(call(system, "uninstall", "--format=json", *more).stdout)

    nothing = {"changed": False, "engines": [], "links": []}
    assert result() == nothing
    call(system, "install", "--engine=docker", "--gpus")
    links = [str(system / "usr/local/bin" / name) for name in sorted(nvidia_names.LINKS)]
    for more in (["--dry-run"], []):
        found = result(*more)
        [docker] = found["engines"]
        assert (docker["engine"], docker["files"], len(docker["advice"])) == ("docker", [path], 1)
        assert found["changed"] is True
        assert sorted(found["links"]) == links
    assert result() == nothing


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        (["--engine=docker", "--hook=prestart"], True),
        (["--engine=docker", "--hook=none"], False),
        (["--engine=docker", "--engine=podman", "--hook=prestart"], False),
        (["--engine=all", "--hook=precreate"], False),
    ],
)
def test_hook_option_without_podman_gives_a_warning(
    system: Path, options: list[str], is_warned: bool
) -> None:
    done = call(system, "install", *options)
    assert done.exit_code == 0
    assert ("--hook is only for podman" in done.stderr) is is_warned


def test_for_training_sets_only_missing_limits(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sets only limits that config.toml doesn't set; everything else in it is unchanged."""
    monkeypatch.delenv("GPUHOOK_CONFIG", raising=False)
    path = system / "etc/gpuhook/config.toml"
    path.parent.mkdir()
    path.write_text('# mine\n[gpuhook.containers]\nstack = "1GiB"\n')
    before = tree(system)
    words = ("install", "--engine=docker", "--for-training")
    dry = call(system, *words, "--dry-run")
    assert f"would set gpuhook.containers.memlock=unlimited in {path}" in dry.output
    assert tree(system) == before
    report = json.loads(call(system, *words, "--format=json").stdout)
    assert report["changed"]
    expected = ["gpuhook.containers.memlock=unlimited", "gpuhook.containers.shm-size=50%"]
    assert report["settings"] == expected
    text = path.read_text()
    assert text.startswith("# mine\n")
    limits = tomllib.loads(text)["gpuhook"]["containers"]
    assert limits == {"stack": "1GiB", "memlock": "unlimited", "shm-size": "50%"}
    again = json.loads(call(system, *words, "--format=json").stdout)
    assert (again["settings"], again["changed"]) == ([], False)
    assert path.read_text() == text


def test_for_training_creates_a_missing_config_file(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUHOOK_CONFIG", raising=False)
    call(system, "install", "--engine=docker")
    path = system / "etc/gpuhook/config.toml"
    assert not path.exists()
    assert (
        "set gpuhook.containers.stack=64MiB"
        in call(system, "install", "--engine=docker", "--for-training").output
    )
    assert "containers" in tomllib.loads(path.read_text())["gpuhook"]


def test_for_training_with_an_invalid_config_changes_nothing(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUHOOK_CONFIG", raising=False)
    path = system / "etc/gpuhook/config.toml"
    path.parent.mkdir()
    path.write_text('[gpuhook.containers]\nmemlock = "lots"\n')
    before = tree(system)
    with pytest.raises(ConfigError, match="memlock must be"):
        call(system, "install", "--engine=docker", "--for-training")
    assert tree(system) == before
