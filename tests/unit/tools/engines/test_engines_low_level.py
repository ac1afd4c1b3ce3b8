"""podman's own low-level runtime, and the one that gpu-py calls."""

from pathlib import Path

import pytest

from gpuhook.tools.engines.ask import Ask
from gpuhook.tools.engines.podman import other_runtime


@pytest.mark.parametrize(
    ("podmans", "ours", "is_warned"),
    [
        ("crun", ["runc", "crun"], True),
        ("runc", ["crun"], True),
        ("crun", ["crun", "runc"], False),
        ("runc", ["runc"], False),
        ("kata", ["runc"], False),  # gpu-py can't call it
        ("crun", ["absent"], False),  # the doctor's subject
    ],
)
def test_another_low_level_runtime_is_said(
    tmp_path: Path, podmans: str, ours: list[str], is_warned: bool
) -> None:
    for name in ("crun", "runc", "kata"):
        (tmp_path / name).touch(0o755)
    config = tmp_path / "config.toml"
    paths = ", ".join(f'"{tmp_path}/{name}"' for name in ours)
    config.write_text(f"[nvidia-container-runtime]\nruntimes = [{paths}]\n")
    ask = Ask((("gpu-py", str(tmp_path / "gpu-py")),), gpuhook_config=str(config))
    sources = [{"runtime": "other"}, {"runtime": f"{tmp_path}/{podmans}"}, {"events_logger": "x"}]
    found = [*other_runtime(sources, ask)]
    assert len(found) == is_warned
    if is_warned:
        first, *rest = [f"{tmp_path}/{podmans}", *(f"{tmp_path}/{name}" for name in ours)]
        order = ",".join((first, *(each for each in rest if each != first)))
        assert f"podman itself calls {podmans}, but gpu-py calls {tmp_path}/{ours[0]}" in found[0]
        assert f"gpuhook config set nvidia-container-runtime.runtimes={order}," in found[0]


def test_below_a_prefix_nothing_is_compared(tmp_path: Path) -> None:
    ask = Ask((("gpu-py", "/opt/gpu-py"),), prefix=str(tmp_path))
    assert [*other_runtime([{"runtime": "crun"}], ask)] == []
