"""podman gets a drop-in with the runtime, and a hook where that is asked for."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpuhook.tools.engines.ask import Ask
from gpuhook.tools.engines.podman import Podman


def ask_below(prefix: Path, **more: Any) -> Ask:
    return Ask((("gpu-py", "/opt/gpu-py"),), prefix=str(prefix), **more)


def test_the_runtime_is_registered_and_gets_the_log_option(tmp_path: Path) -> None:
    [target] = Podman().install(ask_below(tmp_path, set_default=True)).targets
    assert target.path == f"{tmp_path}/etc/containers/containers.conf.d/99-gpuhook.conf"
    engine = tomllib.loads(target.text)["engine"]
    assert engine["runtime"] == "gpu-py"
    assert engine["runtimes"] == {"gpu-py": ["/opt/gpu-py"]}
    assert engine["runtime_supports_json"][-1] == "gpu-py"
    assert {"crun", "runc"} < set(engine["runtime_supports_json"])
    assert engine["runtime_supports_nocgroup"] == ["crun", "krun", "gpu-py"]


def test_the_admin_s_list_is_extended(tmp_path: Path) -> None:
    folder = tmp_path / "etc/containers"
    (folder / "containers.conf.d").mkdir(parents=True)
    conf = '[engine]\nruntime_supports_json = ["crun"]\n'
    (folder / "containers.conf").write_text(conf)
    [target] = Podman().install(ask_below(tmp_path)).targets
    assert tomllib.loads(target.text)["engine"]["runtime_supports_json"] == ["crun", "gpu-py"]
    (folder / "containers.conf.d/50.conf").write_text(conf.replace("crun", "runc"))
    [target] = Podman().install(ask_below(tmp_path)).targets
    assert tomllib.loads(target.text)["engine"]["runtime_supports_json"] == ["runc", "gpu-py"]


@pytest.mark.parametrize("stage", ["prestart", "precreate"])
def test_the_hook_is_described_for_all_containers(tmp_path: Path, stage: str) -> None:
    ask = ask_below(
        tmp_path, hook=stage, hook_path="/opt/gpuhook-prestart", gpuhook_config="/c.toml"
    )
    drop_in, target = Podman().install(ask).targets
    assert tomllib.loads(drop_in.text)["engine"]["hooks_dir"] == [
        "/usr/share/containers/oci/hooks.d",
        "/etc/containers/oci/hooks.d",
    ]
    assert target.path == f"{tmp_path}/etc/containers/oci/hooks.d/gpuhook.json"
    assert json.loads(target.text) == {
        "version": "1.0.0",
        "hook": {
            "path": "/opt/gpuhook-prestart",
            "args": ["gpuhook-prestart", "--config", "/c.toml", stage],
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"],
        },
        "when": {"always": True},
        "stages": [stage],
    }


def test_rootless_uses_the_user_s_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/u/.config")
    ask = ask_below(tmp_path, rootless=True, hook="prestart", hook_path="/opt/h")
    found = Podman().install(ask)
    assert [target.path for target in found.targets] == [
        f"{tmp_path}/home/u/.config/containers/containers.conf.d/99-gpuhook.conf",
        f"{tmp_path}/home/u/.config/containers/oci/hooks.d/gpuhook.json",
    ]
    folders = tomllib.loads(found.targets[0].text)["engine"]["hooks_dir"]
    assert folders[-1] == "/home/u/.config/containers/oci/hooks.d"
