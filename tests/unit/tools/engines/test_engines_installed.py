"""Versions of engines, as their programs print them."""

from pathlib import Path

import pytest

from gpuhook.tools.engines.installed import version

SAYS = [
    ("docker", "dockerd", "Docker version 20.10.24+dfsg1, build 5d6db84", "20.10.24+dfsg1"),
    ("docker", "dockerd", "Docker version 29.2.0-rc.1, build deadbee", "29.2.0-rc.1"),
    ("podman", "podman", "podman version 5.4.2", "5.4.2"),
    ("crio", "crio", "crio version 1.31.3\nVersion:        1.31.3", "1.31.3"),
    (
        "containerd", "containerd",
        "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3",
        "1.6.20~ds1",
    ),
    (
        "containerd", "containerd",
        "containerd github.com/containerd/containerd/v2 v2.1.3 c787fb98911740dd3ff2d0e45ce88cdf",
        "2.1.3",
    ),
    ("containerd", "containerd", "containerd containerd.io 1.7.24 88bf19b2105c8b17", "1.7.24"),
    ("podman", "podman", "no version", None),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "program", "says", "expected"), SAYS)
def test_an_engine_version_is_parsed_from_its_programs_output(
    engine: str, program: str, says: str, expected: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / program
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{says}'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version(engine) == expected


def test_missing_or_failing_programs_have_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version("podman") is None
    (tmp_path / "podman").write_text("#!/bin/sh\necho podman version 5.4.2\nexit 1\n")
    (tmp_path / "podman").chmod(0o755)
    assert version("podman") is None
