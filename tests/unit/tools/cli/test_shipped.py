"""Completeness of the list of files that are shipped with the programs, for each kind of place."""

from pathlib import Path

from click.testing import CliRunner

from gpuhook.tools.cli import _shipped as shipped
from gpuhook.tools.cli import cli

REPOSITORY = Path(__file__).parents[4]
COMMAND = "/opt/my gpus/bin/gpuhook"
CDI = "gpuhook-cdi-refresh"


def paths(folders: dict[str, str]) -> set[str]:
    return {path for file in shipped.files(COMMAND) if (path := file.path(folders))}


def test_every_manual_page_and_unit_of_the_repository_is_shipped() -> None:
    sources = [*(REPOSITORY / "man").iterdir()]
    for folder in ("systemd", "udev", "slurm", "selinux"):
        sources += (REPOSITORY / "packaging" / folder).iterdir()
    listed = {file.name for file in shipped.files(COMMAND)}
    assert {path.name for path in sources} <= listed
    assert {"gpuhook.1", "gpuhook.toml.5", "gpuhook", "_gpuhook", "gpuhook.fish"} <= listed


def test_package_ships_all_files_and_pip_all_but_the_cdi_units() -> None:
    package = paths({**shipped.OF_PACKAGE})
    assert len(package) == len([*shipped.files(COMMAND)])
    assert "/usr/share/man/man5/gpuhook.toml.5" in package
    assert f"/usr/lib/udev/rules.d/70-{CDI}.rules" in package
    placed = paths({**shipped.OF_ADMINISTRATOR})
    missing = {Path(each).name for each in package} - {Path(each).name for each in placed}
    assert missing == {f"{CDI}.service", f"{CDI}.path", f"70-{CDI}.rules"}
    assert "/etc/systemd/system/gpuhook-watch.service" in placed


def test_only_the_slurm_scripts_are_executable() -> None:
    modes = {file.path(shipped.OF_PACKAGE): file.mode for file in shipped.files(COMMAND)}
    assert sorted(path for path, mode in modes.items() if path and mode & 0o111) == [
        "/usr/libexec/gpuhook/slurm/epilog",
        "/usr/libexec/gpuhook/slurm/prolog",
    ]


def test_the_metrics_units_are_not_enabled_by_default() -> None:
    units = {path.name for path in (REPOSITORY / "packaging/systemd").iterdir()}
    assert set(shipped.ENABLED) <= units
    assert not [unit for unit in shipped.ENABLED if "metrics" in unit]


def test_units_run_the_installed_command() -> None:
    for file in shipped.files(COMMAND):
        lines = [line for line in file.text.splitlines() if line.startswith("ExecStart=")]
        assert all(line.startswith(f'ExecStart="{COMMAND}" ') for line in lines), file.name
        assert not (lines and "/usr/bin/gpuhook" in file.text)


def test_the_files_command_lists_and_prints_each_file() -> None:
    said = CliRunner().invoke(cli, ["files"])
    listed = said.output.splitlines()
    assert set(listed) == paths({**shipped.OF_ADMINISTRATOR})
    page = CliRunner().invoke(cli, ["files", "/usr/local/share/man/man8/gpu-py.8"])
    assert page.output == (REPOSITORY / "man/gpu-py.8").read_text()
    texts = {path: CliRunner().invoke(cli, ["files", path]) for path in listed}
    assert all(done.exit_code == 0 and done.output for done in texts.values())


def test_the_files_command_refuses_an_unknown_file() -> None:
    done = CliRunner().invoke(cli, ["files", "/usr/local/share/man/man8/gpu-pi.8"])
    assert done.exit_code == 2
    wrong = "'/usr/local/share/man/man8/gpu-pi.8' isn't a file of gpuhook. Did you mean"
    assert wrong in " ".join(done.stderr.split())
    assert "/usr/local/share/man/man8/gpu-py.8" in done.stderr
