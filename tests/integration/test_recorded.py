"""Records of the programs that a test has called, with several roots mounted in turn."""

from pathlib import Path

import pytest
import ran
from harness.images import REPOSITORY
from harness.namespaces import HOLD, held


def test_programs_of_each_root_are_recorded_separately(
    roots: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that is mounted next can get the device and inode numbers of a root that is gone."""
    monkeypatch.setattr(ran, "ACTIVE", True)
    monkeypatch.setattr(ran, "_noted", set())
    root, work = tmp_path / "root", tmp_path / "work"
    for folder in (root, work):
        folder.mkdir()
    for version, codename in (("1.7.24", "trixie"), ("2.1.9", "forky")):
        upper = tmp_path / codename
        for path in ("usr/bin", "etc", "old", "proc", "sys", "dev", "tmp", "run"):
            (upper / path).mkdir(parents=True)
        (upper / "etc/os-release").write_text(f"NAME=Debian\nVERSION_CODENAME={codename}\n")
        (upper / "usr/bin/ctr").write_text("#!/bin/sh\n")
        (upper / "usr/bin/containerd").write_text(f"#!/bin/sh\necho containerd {version}\n")
        for program in ("ctr", "containerd"):
            (upper / "usr/bin" / program).chmod(0o755)
        layers = f"lowerdir={roots['busybox']},upperdir={upper},workdir={work}"
        inside = f"{REPOSITORY}/scripts/lib/inside --same-run {root} / sh -c '{HOLD}'"
        script = f"mount -t overlay -o {layers} overlay {root} && exec {inside}"
        with held(["sh", "-c", script], folder=Path("/")) as entered:
            ran.begin()
            entered.run("ctr", "version").ok()
            [noted] = ran.noted()
            ran.begin()  # ctr here is the test's own script, not a tested engine
        assert noted[:3] == ("containerd", version, f"Debian {codename}")
