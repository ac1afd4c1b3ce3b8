"""Lines of oci.conf that gpuhook slurm oci writes."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuhook.base.errors import RequestError
from gpuhook.hpc.slurm import oci_conf
from gpuhook.tools.cli import cli

REPOSITORY = Path(__file__).parents[4]
PROGRAMS = ("/usr/bin/gpuhook", "/usr/bin/gpu-py")
FOLDER = "/run/slurm-containers"


def test_the_slurm_page_shows_the_written_lines() -> None:
    page = (REPOSITORY / "docs/schedulers/slurm.md").read_text()
    shown = re.findall(r"^ +(RunTime\w+=.*)$", page, re.MULTILINE)
    assert oci_conf.text(*PROGRAMS, FOLDER).splitlines() == shown


def test_other_folders_and_files_are_quoted_in_oci_conf() -> None:
    text = oci_conf.text(
        "/opt/a b/gpuhook", "/opt/gpu-py", "/srv/jobs/", "/etc/slurm-2/cgroup.conf"
    )
    [run] = [line for line in text.splitlines() if line.startswith("RunTimeRun=")]
    assert run.startswith("RunTimeRun=\"'/opt/a b/gpuhook' slurm request ")
    assert "request --cgroup-conf=/etc/slurm-2/cgroup.conf %b &&" in run
    assert " --root=/srv/jobs/%u.%j run -b %b " in run


@pytest.mark.parametrize("path", ['/a"b', "/a%b", "/a\nb", "/a$b", "/a`b", "/a\\b", "a/b", ""])
@pytest.mark.parametrize("at", range(3))
def test_paths_unsafe_for_slurm_or_the_shell_are_refused(path: str, at: int) -> None:
    paths = [*PROGRAMS, FOLDER]
    paths[at] = path
    with pytest.raises(RequestError, match=r"can't be in oci\.conf"):
        oci_conf.text(*paths)


def test_an_unchanged_oci_conf_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "oci.conf"
    said = []
    for _ in range(2):
        done = CliRunner().invoke(
            cli, ["slurm", "oci", "--output", str(path)], catch_exceptions=False
        )
        assert done.exit_code == 0
        said.append(done.stdout)
    assert said == [f"wrote {path}\n", f"{path}: unchanged\n"]
    printed = CliRunner().invoke(cli, ["slurm", "oci"], catch_exceptions=False).stdout
    assert path.read_text() == printed
    assert re.search(
        r'^RunTimeRun="/\S+/gpuhook slurm request %b && .*/gpu-py ', printed, re.MULTILINE
    )
