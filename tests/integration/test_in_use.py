"""Reasons to refuse the removal of gpu-py for CRI-O, which isn't on this host."""

from pathlib import Path

import pytest
from harness.commands import Result, run
from harness.installation import Installation
from harness.strangers import AS_STRANGER, pretender


class Site:
    """A crio.conf in a folder that every user may enter, and the gpuhook command."""

    def __init__(self, folder: Path, command: Path) -> None:
        self.folder = folder
        self.config = folder / "crio.conf"
        self.drop_in = folder / "crio.conf.d/99-gpuhook.conf"
        self._command = command
        self.config.write_text("[crio.runtime]\n")

    def gpuhook(self, verb: str, *words: str) -> Result:
        options = [f"--config={self.config}", f"--state-dir={self.folder}/state"]
        return run([self._command, verb, "--engine=crio", *options, *words])


@pytest.fixture
def site(tmp_path: Path, installation: Installation) -> Site:
    return Site(tmp_path, installation.command)


def test_removal_is_refused_while_crio_uses_it_as_default_runtime(site: Site) -> None:
    site.gpuhook("install", "--set-default").ok()
    with pretender(site.folder / "crio", f"--config={site.config}", way=()):
        done = site.gpuhook("uninstall", "--unless-in-use").failed()
        assert "gpuhook uninstall --engine crio && systemctl restart crio" in done.stderr
        assert site.drop_in.exists()
    site.gpuhook("uninstall", "--unless-in-use").ok()
    assert not site.drop_in.exists()


def test_a_crio_with_other_files_or_another_default_does_not_block_removal(site: Site) -> None:
    with pretender(site.folder / "crio", f"--config={site.config}", way=()):
        site.gpuhook("install").ok()
        site.gpuhook("uninstall", "--unless-in-use").ok()
    site.gpuhook("install", "--set-default").ok()
    with pretender(site.folder / "crio", "--config=/etc/crio/crio.conf", way=()):
        site.gpuhook("uninstall", "--unless-in-use").ok()


def test_removal_is_refused_while_a_crio_container_needs_it(
    site: Site, installation: Installation
) -> None:
    """conmon has no folder to examine, but its arguments name the runtime."""
    words = ["-b", "/bundle", "-c", "0123", "-n", "k8s_main", "-r", str(installation.runtime)]
    with pretender(site.folder / "conmon", *words, way=()):
        done = site.gpuhook("uninstall", "--unless-in-use").failed()
        assert "k8s_main" in done.stderr
        assert "Run this first: kubectl drain" in done.stderr


def test_a_plain_removal_is_refused_unless_forced(site: Site, installation: Installation) -> None:
    site.gpuhook("install").ok()
    runtime = str(installation.runtime)
    with pretender(site.folder / "conmon", "-n", "pods", "-r", runtime, way=()):
        done = site.gpuhook("uninstall").failed()
        assert "can't be started again without gpu-py: pods" in done.stderr
        assert site.drop_in.exists()
        refused = site.gpuhook("uninstall", "--force", "--unless-in-use").failed()
        assert "--force and --unless-in-use exclude each other" in refused.stderr
        site.gpuhook("uninstall", "--force").ok()
        assert not site.drop_in.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["-n", "of-another-engine", "--exit-command", "/usr/bin/podman", "-r", "RUNTIME"],
        ["-n", "of-another-runtime", "-r", "/usr/bin/runc"],
    ],
)
def test_other_containers_stop_no_removal(
    site: Site, installation: Installation, words: list[str]
) -> None:
    site.gpuhook("install").ok()
    given = [str(installation.runtime) if word == "RUNTIME" else word for word in words]
    with pretender(site.folder / "conmon", *given, way=()):
        site.gpuhook("uninstall").ok()


def test_processes_of_other_users_do_not_prevent_removal(
    workspace: Path, site: Site, installation: Installation
) -> None:
    folder = workspace / "in-use"  # a folder that other users may enter
    words = ["-n", "his", "-r", str(installation.runtime)]
    with pretender(folder / "conmon", *words, way=AS_STRANGER):
        site.gpuhook("uninstall", "--unless-in-use").ok()
