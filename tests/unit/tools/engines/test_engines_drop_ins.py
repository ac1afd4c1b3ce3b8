"""Drop-ins for CRI-O and podman, with the default runtime's options, and podman's hook."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines.ask import HOOK, SET_DEFAULT, EngineRequest
from gpuhook.tools.engines.crio import Crio
from gpuhook.tools.engines.podman import Podman, hook_document
from gpuhook.tools.engines.prefix import state_folder
from gpuhook.tools.engines.toml_text import render


def document_of(short: dict[str, Any]) -> dict[str, Any]:
    """Build a crio.conf, or the expected drop-in, from a case's short form."""
    runtime: dict[str, Any] = {}
    for key, value in short.items():
        if key.startswith("runtimes."):
            runtime.setdefault("runtimes", {})[key.removeprefix("runtimes.")] = value
        else:
            runtime[key] = value
    return {"crio": {"runtime": runtime}}


@pytest.mark.vectors("engine", "engine.crio")
def test_crio_drop_in_matches_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    given = case["input"]
    config = tmp_path / "crio.conf"
    config.write_text(render(document_of(given["source"]), ""))
    pair = (given["add"]["name"], given["add"]["path"])
    ask = EngineRequest((pair,), set_default=given["set_as_default"], config=str(config))
    [target] = Crio().install(ask).targets
    assert target.path == f"{tmp_path}/crio.conf.d/99-gpuhook.conf"
    assert tomllib.loads(target.text) == document_of(case["expected"]["dropin"])


def test_crio_runtime_is_written_to_the_drop_in_only(tmp_path: Path) -> None:
    """The vector 'crio main config untouched' requires this."""
    config = tmp_path / "crio.conf"
    ask = EngineRequest((("nvidia", "/usr/bin/nvidia-container-runtime"),), config=str(config))
    [target] = Crio().install(ask).targets
    assert "[crio.runtime.runtimes.nvidia]\n" in target.text
    assert 'runtime_path = "/usr/bin/nvidia-container-runtime"\n' in target.text


def test_crio_reads_the_drop_in_if_the_configuration_is_a_drop_in_itself(tmp_path: Path) -> None:
    """Older instructions for nvidia-ctk name /etc/crio/crio.conf.d/99-nvidia.conf."""
    folder = tmp_path / "crio.conf.d"
    ask = EngineRequest((("nvidia", "/x"),), config=str(folder / "99-nvidia.conf"))
    [target] = Crio().install(ask).targets
    assert target.path == str(folder / "99-gpuhook.conf")
    assert target.sources == (str(tmp_path / "crio.conf"),)


def test_a_crio_drop_in_records_the_files_it_repeats_as_sources(tmp_path: Path) -> None:
    config, other = tmp_path / "crio.conf", tmp_path / "crio.conf.d" / "10.conf"
    other.parent.mkdir()
    for path in (config, other):
        path.touch()
    [target] = Crio().install(EngineRequest((("gpu-py", "/p"),), config=str(config))).targets
    assert target.sources == (str(config), str(other))


def test_other_drop_ins_count_in_order_and_our_own_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "crio.conf.d"
    folder.mkdir()
    crun = {"runtimes.crun": {"runtime_path": "/crun", "monitor_cgroup": "pod"}}
    first = {"default_runtime": "crun", **crun}
    (folder / "10-crun.conf").write_text(render(document_of(first), ""))
    ours = {"default_runtime": "gpu-py", "runtimes.gpu-py": {"runtime_root": "/old"}}
    (folder / "99-gpuhook.conf").write_text(render(document_of(ours), ""))
    ask = EngineRequest((("gpu-py", "/x"),), config=str(tmp_path / "crio.conf"))
    expected = {"runtime_path": "/x", "runtime_type": "oci", "monitor_cgroup": "pod"}
    short = {"runtimes.gpu-py": expected}
    [target] = Crio().install(ask).targets
    assert tomllib.loads(target.text) == document_of({**short, "default_runtime": "gpu-py"})
    [target] = Crio().install(replace(ask, without=frozenset([SET_DEFAULT]))).targets
    assert tomllib.loads(target.text) == document_of(short)


@pytest.mark.parametrize(
    ("default", "expected"),
    [
        ({"runtime_type": "vm", "runtime_config_path": "/k", "runtime_root": "/run/vc"}, {}),
        ({"runtime_type": "pod", "monitor_path": "/conmonrs", "stream_websockets": True}, {}),
        ({"inherit_default_runtime": True, "monitor_env": ["A=b"]}, {"monitor_env": ["A=b"]}),
        ({"platform_runtime_paths": {"linux/amd64": "/x"}, "no_sync_log": True},
         {"no_sync_log": True}),
    ],
)  # fmt: skip
def test_options_that_replace_the_program_crio_calls_are_not_copied(
    tmp_path: Path, default: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = tmp_path / "crio.conf"
    config.write_text(render(document_of({"default_runtime": "x", "runtimes.x": default}), ""))
    [target] = Crio().install(EngineRequest((("gpu-py", "/p"),), config=str(config))).targets
    ours = {**expected, "runtime_path": "/p", "runtime_type": "oci"}
    assert tomllib.loads(target.text) == document_of({"runtimes.gpu-py": ours})


def test_crio_containers_of_a_runtime_handler_are_found(tmp_path: Path) -> None:
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    for name, handler in (("a" * 20, "gpu-py"), ("b" * 20, "crun")):
        folder = storage / name / "userdata"
        folder.mkdir(parents=True)
        annotations = {"io.kubernetes.cri-o.RuntimeHandler": handler}
        (folder / "config.json").write_text(json.dumps({"annotations": annotations}))
    assert Crio().bound(("gpu-py",), EngineRequest((), prefix=str(tmp_path))) == ["a" * 12]


# podman ---------------------------------------------------------------------------------------


def ask_below(prefix: Path, **more: Any) -> EngineRequest:
    return EngineRequest((("gpu-py", "/opt/gpu-py"),), prefix=str(prefix), **more)


def test_podman_runtime_is_registered_with_json_log_support(tmp_path: Path) -> None:
    [target] = Podman().install(ask_below(tmp_path, set_default=True)).targets
    assert target.path == f"{tmp_path}/etc/containers/containers.conf.d/99-gpuhook.conf"
    engine = tomllib.loads(target.text)["engine"]
    assert engine["runtime"] == "gpu-py"
    assert engine["runtimes"] == {"gpu-py": ["/opt/gpu-py"]}
    assert engine["runtime_supports_json"][-1] == "gpu-py"
    assert {"crun", "runc"} < set(engine["runtime_supports_json"])
    assert engine["runtime_supports_nocgroup"] == ["crun", "krun", "gpu-py"]


def test_the_administrators_json_runtime_list_is_extended(tmp_path: Path) -> None:
    folder = tmp_path / "etc/containers"
    (folder / "containers.conf.d").mkdir(parents=True)
    conf = '[engine]\nruntime_supports_json = ["crun"]\n'
    (folder / "containers.conf").write_text(conf)
    [target] = Podman().install(ask_below(tmp_path)).targets
    assert tomllib.loads(target.text)["engine"]["runtime_supports_json"] == ["crun", "gpu-py"]
    (folder / "containers.conf.d/50.conf").write_text(conf.replace("crun", "runc"))
    [target] = Podman().install(ask_below(tmp_path)).targets
    assert tomllib.loads(target.text)["engine"]["runtime_supports_json"] == ["runc", "gpu-py"]


USUAL = ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"]
OTHER = "/etc/containers/oci/precreate.d"
STAGES = pytest.mark.parametrize(
    ("stage", "folder", "read"),
    [
        ("prestart", USUAL[1], USUAL),
        ("precreate", OTHER, [*USUAL, OTHER]),
    ],
)


@STAGES
def test_the_podman_hook_file_applies_to_all_containers(
    tmp_path: Path, stage: str, folder: str, read: list[str]
) -> None:
    ask = ask_below(
        tmp_path, hook=stage, hook_path="/opt/gpuhook-prestart", gpuhook_config="/c.toml"
    )
    drop_in, target = Podman().install(ask).targets
    assert tomllib.loads(drop_in.text)["engine"]["hooks_dir"] == read
    assert target.path == f"{tmp_path}{folder}/gpuhook.json"
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


@pytest.mark.parametrize(
    ("earlier", "words", "folder"),
    [
        ("prestart", {}, "hooks.d"),
        ("precreate", {}, "precreate.d"),
        ("precreate", {"hook": "prestart"}, "hooks.d"),
        ("prestart", {"hook": "precreate"}, "precreate.d"),
        ("precreate", {"without": frozenset({HOOK})}, ""),
    ],
)
def test_a_hook_in_another_stages_folder_is_removed(
    tmp_path: Path, earlier: str, words: dict[str, Any], folder: str
) -> None:
    """Earlier versions wrote both stages to hooks.d, where a precreate hook fails every build."""
    path = tmp_path / "etc/containers/oci/hooks.d/gpuhook.json"
    path.parent.mkdir(parents=True)
    path.write_text(hook_document("/opt/gpuhook-prestart", earlier, None))
    ask = ask_below(tmp_path, hook_path="/opt/gpuhook-prestart", **words)
    hooks = {Path(each.path): each.gone for each in Podman().install(ask).targets[1:]}
    assert hooks[path] == (folder != "hooks.d")
    assert [each.parent.name for each, gone in hooks.items() if not gone] == [folder] * bool(folder)


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


@pytest.mark.parametrize("home", [None, "home"])
@pytest.mark.parametrize("xdg", [None, "config"])
def test_a_user_without_a_home_is_refused(
    home: str | None, xdg: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOME isn't set and passwd has no entry for the user; relative paths don't count."""
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr("os.geteuid", lambda: 4243)
    for name, value in (("HOME", home), ("XDG_CONFIG_HOME", xdg), ("XDG_STATE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match="Set HOME"):
        EngineRequest(runtimes=()).user("enroot")
    with pytest.raises(EngineError, match="Set HOME"):
        state_folder(None, "")


@pytest.mark.parametrize("name", ["10.conf", "99-nvidia.conf"])
@pytest.mark.parametrize("engine", [Crio(), Podman()])
def test_a_later_file_with_another_default_gives_a_warning(
    tmp_path: Path, engine: Crio | Podman, name: str
) -> None:
    place, text = {
        "crio": ("etc/crio/crio.conf.d", '[crio.runtime]\ndefault_runtime = "x"\n'),
        "podman": ("etc/containers/containers.conf.d", '[engine]\nruntime = "x"\n'),
    }[engine.name]
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / name).write_text(text)
    ask = EngineRequest((("gpu-py", "/p"),), prefix=str(tmp_path))
    assert not engine.install(ask).warnings
    warnings = engine.install(replace(ask, set_default=True)).warnings
    assert [each.partition(" ")[0] for each in warnings] == [
        f"{folder}/{each}" for each in (name,) if each > "99-gpuhook"
    ]


@pytest.mark.parametrize("name", ["runtime_supports_json", "hooks_dir"])
def test_a_list_with_append_true_keeps_it(tmp_path: Path, name: str) -> None:
    """containers.conf(5) describes this form since podman 5."""
    folder = tmp_path / "etc/containers"
    folder.mkdir(parents=True)
    (folder / "containers.conf").write_text(f'[engine]\n{name} = ["x", {{append=true}}]\n')
    ask = EngineRequest((("gpu-py", "/p"),), prefix=str(tmp_path), hook="prestart", hook_path="/h")
    drop_in = Podman().install(ask).targets[0]
    assert tomllib.loads(drop_in.text)["engine"][name][:2] == ["x", {"append": True}]
