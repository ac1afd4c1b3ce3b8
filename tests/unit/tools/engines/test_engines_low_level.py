"""podman's own low-level runtime, and the one that gpu-py calls."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.podman import Podman, other_runtime, own_runtime

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CRUN = "GPUHOOK_RUNTIME=/usr/bin/crun"


@pytest.fixture
def ask(tmp_path: Path) -> EngineRequest:
    """A request for a host below a prefix, which has several low-level runtimes."""
    for path in ("usr/bin/crun", "usr/sbin/runc", "opt/crun-1", "opt/kata", "opt/youki"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch(0o755)
    return EngineRequest((("gpu-py", "/opt/gpu-py"),), prefix=str(tmp_path))


OPT = {"runtimes": {"crun": ["/none/crun", "/opt/crun-1"], "kata": ["/opt/kata"], "mine": []}}
SOURCES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no file names one": ([{"events_logger": "x"}], "/usr/bin/crun"),
    "another folder": ([{"runtime": "runc"}], "/usr/sbin/runc"),
    "a later file": ([{"runtime": "crun"}, {"runtime": "runc"}, {}], "/usr/sbin/runc"),
    "listed programs": ([OPT], "/opt/crun-1"),
    "listed elsewhere": ([{"runtime": "crun"}, OPT], "/opt/crun-1"),
    "a list of a later file": ([OPT, {"runtimes": {"crun": ["/usr/bin/crun"]}}], "/usr/bin/crun"),
    "a path": ([{"runtime": "/opt/youki"}], "/opt/youki"),
    "a virtual machine": ([{"runtime": "kata"}, OPT], ""),
    "ours": ([{"runtime": "/opt/gpu-py"}], "/usr/bin/crun"),
    "ours by name": ([{"runtime": "g", "runtimes": {"g": ["/opt/gpu-py"]}}], "/usr/bin/crun"),
    "no program": ([{"runtime": "mine"}, OPT], "/opt/crun-1"),
    "unusual values": ([{"runtime": "", "runtimes": 7}, {"runtimes": {"crun": "x"}}],
                       "/usr/sbin/runc"),
}  # fmt: skip


@pytest.mark.parametrize("case", SOURCES.values(), ids=SOURCES.keys())
def test_podmans_own_low_level_runtime_is_found_from_its_settings(
    ask: EngineRequest, case: tuple[list[dict[str, Any]], str]
) -> None:
    Path(ask.prefix, "opt/gpu-py").touch(0o755)
    sources, own = case
    assert own_runtime(sources, ask) == own


def test_podman_falls_back_to_runc_without_crun(ask: EngineRequest) -> None:
    Path(ask.prefix, "usr/bin/crun").unlink()
    assert own_runtime([], ask) == "/usr/sbin/runc"
    Path(ask.prefix, "usr/sbin/runc").unlink()
    assert own_runtime([], ask) == ""


def installed(ask: EngineRequest) -> list[object] | None:
    """Return the variables for conmon that install writes; None if it doesn't set them."""
    [target] = [each for each in Podman().install(ask).targets if each.path.endswith(".conf")]
    assert target.text is not None
    variables: list[object] | None = tomllib.loads(target.text)["engine"].get("conmon_env_vars")
    return variables


CONF: dict[str, list[object] | None] = {
    "": [PATH, CRUN],
    'runtime = "runc"': [PATH, "GPUHOOK_RUNTIME=/usr/sbin/runc"],
    'conmon_env_vars = ["A=b"]': ["A=b", CRUN],
    'conmon_env_vars = ["A=b", {append = true}]': ["A=b", {"append": True}, CRUN],
    'conmon_env_vars = ["GPUHOOK_RUNTIME=/opt/youki"]': ["GPUHOOK_RUNTIME=/opt/youki"],
    'runtime = "kata"\n[engine.runtimes]\nkata = ["/opt/kata"]': None,
}


@pytest.mark.parametrize(("text", "variables"), CONF.items())
def test_conmon_environment_names_podmans_own_runtime(
    ask: EngineRequest, text: str, variables: list[object] | None
) -> None:
    folder = Path(ask.prefix, "etc/containers/containers.conf.d")
    folder.mkdir(parents=True)
    (folder / "50-mine.conf").write_text(f"[engine]\n{text}\n")
    assert installed(ask) == variables


def test_gpu_py_as_default_is_not_taken_for_podmans_own_runtime(ask: EngineRequest) -> None:
    path = Path(ask.prefix, "etc/containers/containers.conf.d/99-gpuhook.conf")
    path.parent.mkdir(parents=True)
    for _ in range(2):
        [target] = Podman().install(replace(ask, set_default=True)).targets
        assert target.text is not None
        path.write_text(target.text)
        assert tomllib.loads(target.text)["engine"]["runtime"] == "gpu-py"
        assert installed(ask) == [PATH, CRUN]


@pytest.mark.parametrize(
    ("podmans", "ours", "is_warned"),
    [
        ("crun", ["runc", "crun"], True),
        ("runc", ["crun"], True),
        ("crun", ["crun", "runc"], False),
        ("runc", ["runc"], False),
        ("crun", ["absent"], False),  # the doctor reports a missing program
        ("crun", None, False),  # without a setting, gpu-py calls podman's runtime
    ],
)
def test_a_low_level_runtime_differing_from_podmans_gives_a_warning(
    tmp_path: Path, podmans: str, ours: list[str] | None, is_warned: bool
) -> None:
    for name in ("crun", "runc"):
        (tmp_path / name).touch(0o755)
    config = tmp_path / "config.toml"
    paths = ", ".join(f'"{tmp_path}/{name}"' for name in ours or ())
    named = f"runtimes = [{paths}]\n" if ours else ""
    config.write_text(f"[nvidia-container-runtime]\n{named}")
    ask = EngineRequest((("gpu-py", str(tmp_path / "gpu-py")),), gpuhook_config=str(config))
    found = [*other_runtime(f"{tmp_path}/{podmans}", ask)]
    assert len(found) == is_warned
    if is_warned:
        [first, *_] = ours or []
        assert f"calls {tmp_path}/{podmans}, but gpu-py calls {tmp_path}/{first}" in found[0]
        assert f"because {config} names it in nvidia-container-runtime.runtimes" in found[0]


def test_low_level_runtimes_below_a_prefix_are_not_compared(tmp_path: Path) -> None:
    ask = EngineRequest((("gpu-py", "/opt/gpu-py"),), prefix=str(tmp_path))
    assert [*other_runtime("/usr/bin/crun", ask)] == []
