"""Runtimes and swarm resources in daemon.json, where all other settings stay."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.errors import EngineError
from gpuhook.monitor.host.processes import Process
from gpuhook.tools.engines import docker, installer
from gpuhook.tools.engines.ask import ALIASES, SET_DEFAULT, EngineRequest
from gpuhook.tools.engines.docker import Docker, wanted_document
from gpuhook.tools.engines.docker_api import DockerInfo
from gpuhook.tools.engines.files import Change
from gpuhook.tools.engines.store import Store
from gpuhook.tools.engines.swarm import KEY, SwarmNode, SwarmResource


def without_args(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document without ``args`` of runtimes; Docker's key is runtimeArgs."""
    runtimes = document.get("runtimes", {})
    kept = {name: {"path": entry["path"]} for name, entry in runtimes.items()}
    return {**document, "runtimes": kept}


@pytest.mark.vectors("engine", "engine.docker")
def test_daemon_json_matches_the_vectors(case: dict[str, Any]) -> None:
    given, expected = case["input"], case["expected"]
    runtimes = tuple(given.get("add", {}).items()) or ((given["name"], "/x"),)
    ask = EngineRequest(runtimes, set_default=given.get("set_as_default", False))
    document = wanted_document(given["config"], ask, "daemon.json")
    if "config" in expected:
        assert document == without_args(expected["config"])
    else:
        assert document.get("default-runtime") == expected["default-runtime"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"runtimes": []}, '"runtimes" in /d.json isn\'t a JSON object'),
        ({"features": True}, '"features" in /d.json isn\'t a JSON object'),
    ],
)
def test_wrong_types_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        wanted_document(document, EngineRequest((("gpu-py", "/x"),), cdi=True), "/d.json")


def test_a_runtime_named_runc_is_refused() -> None:
    with pytest.raises(EngineError, match="runc"):
        wanted_document({}, EngineRequest((("runc", "/x"),)), "/d.json")


def test_features_are_merged_and_an_existing_entry_keeps_its_options() -> None:
    entry = {"path": "/x", "runtimeArgs": ["--debug"]}
    document = {"features": {"buildkit": False}, "runtimes": {"gpu-py": entry}}
    wanted = wanted_document(document, EngineRequest((("gpu-py", "/x"),), cdi=True), "/d.json")
    assert wanted["features"] == {"buildkit": False, "cdi": True}
    assert wanted["runtimes"] == {"gpu-py": entry}


DOCKERD = Process(0, 0, ("dockerd", "--config-file"), 0, 0.0, {}, "")


@pytest.mark.protects(
    "dockers-options",
    "installation: a setting that dockerd has as an option isn't also written to its file",
)
@pytest.mark.parametrize(
    ("option", "key", "more"),
    [
        ("--default-runtime", "default-runtime", {"set_default": True}),
        ("--feature", "features", {"cdi": True}),
        ("--node-generic-resource", KEY, {"swarm": (SwarmResource("nvidia", "GPU", "GPU-1"),)}),
    ],
)
def test_a_setting_already_given_as_dockerd_option_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, key: str, more: dict[str, Any]
) -> None:
    config = tmp_path / "daemon.json"
    daemon = replace(DOCKERD, argv=(*DOCKERD.argv, str(config), option, "x"))
    monkeypatch.setattr("gpuhook.monitor.host.processes.running", lambda *_: [daemon])
    ask = EngineRequest((("gpu-py", "/x"),), config=str(config))
    assert Docker().install(ask).targets
    with pytest.raises(EngineError, match=f'{option}, and wouldn\'t start with "{key}"'):
        Docker().install(replace(ask, **more))
    config.write_text(json.dumps({key: {} if key == "features" else []}))
    assert Docker().install(replace(ask, **more)).targets


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), {"runtimes": {}, "default-runtime": "runc"}),
        (("--default-runtime", "runc"), {"runtimes": {}}),  # dockerd refuses both in one start
    ],
)
def test_daemon_json_resets_runtimes_only_while_dockerd_reloads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], said: dict[str, Any]
) -> None:
    config, read = tmp_path / "daemon.json", []

    def send(*_: object) -> bool:
        read.append(json.loads(config.read_text()))
        return True

    config.write_text("{}")
    daemon = replace(DOCKERD, argv=(*DOCKERD.argv, str(config), *options))
    monkeypatch.setattr("gpuhook.monitor.host.processes.running", lambda *_: [daemon])
    monkeypatch.setattr("gpuhook.monitor.host.processes.send", send)
    monkeypatch.setattr("gpuhook.tools.engines.docker_api.asked", lambda _: [])
    change = Change(str(config), b"{}", None)
    assert Docker().forget(change, ("gpu-py",)) == [daemon.pid]
    assert (read, config.read_text()) == ([said], "{}")


def test_advice_names_the_file_that_dockerd_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    daemon = replace(DOCKERD, argv=(*DOCKERD.argv, "/srv/my d.json"))
    monkeypatch.setattr("gpuhook.monitor.host.processes.running", lambda *_: [daemon])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ask = EngineRequest((("gpu-py", "/x"),), rootless=True)
    [advice] = Docker().install(ask).afterwards
    assert advice.endswith("run gpuhook install --engine docker --config '/srv/my d.json'")
    [advice] = Docker().install(replace(ask, config=str(tmp_path / "daemon.json"))).afterwards
    assert advice.startswith("No running Docker reads this file")


def test_an_existing_nvidia_runtime_of_another_program_stays(tmp_path: Path) -> None:
    config = tmp_path / "daemon.json"
    config.write_text('{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}')
    ask = EngineRequest((("gpu-py", "/x"),), also=(("nvidia", "/x"),), config=str(config))
    [target] = Docker().install(ask).targets
    assert json.loads(target.text)["runtimes"] == {
        "nvidia": {"path": "nvidia-container-runtime"},
        "gpu-py": {"path": "/x"},
    }


@pytest.mark.parametrize("comes", ["after", "instead"])
def test_an_nvidia_runtime_added_later_by_another_program_stays(tmp_path: Path, comes: str) -> None:
    config, store = tmp_path / "daemon.json", Store(str(tmp_path / "state"))
    others = {"path": "/usr/bin/nvidia-container-runtime"}

    def put(**more: Any) -> dict[str, Any]:
        ask = EngineRequest((("gpu-py", "/x/gpu-py"),), config=str(config), **more)
        with store.locked():
            installer.install(store, [*Docker().install(ask).targets])
        document: dict[str, Any] = json.loads(config.read_text())
        return document

    def add() -> None:
        document = json.loads(config.read_text())
        document["runtimes"]["nvidia"] = others
        config.write_text(json.dumps(document))

    assert put(also=(("nvidia", "/x/gpu-py"),))["runtimes"]["nvidia"] == {"path": "/x/gpu-py"}
    if comes == "after":
        assert "nvidia" not in put(without=frozenset({ALIASES}))["runtimes"]
        add()
    else:
        add()
        assert put(without=frozenset({ALIASES}))["runtimes"]["nvidia"] == others
    assert put()["runtimes"]["nvidia"] == others
    with store.locked():
        installer.uninstall(store, store.records())
    assert json.loads(config.read_text()) == {"runtimes": {"nvidia": others}}


def test_containers_bound_to_a_runtime_are_found(tmp_path: Path) -> None:
    config = tmp_path / "daemon.json"
    config.write_text(json.dumps({"data-root": str(tmp_path / "data")}))
    for name, runtime in (("one", "gpu-py"), ("two", "runc"), ("three", "gpu-py")):
        folder = tmp_path / "data" / "containers" / name
        folder.mkdir(parents=True)
        (folder / "hostconfig.json").write_text(json.dumps({"Runtime": runtime}))
        (folder / "config.v2.json").write_text(json.dumps({"Name": f"/{name}"}))
    (tmp_path / "data" / "containers" / "broken").mkdir()
    assert Docker().bound(("gpu-py",), EngineRequest((), config=str(config))) == ["one", "three"]


@pytest.mark.parametrize(("user", "command"), [(0, "systemctl"), (1000, "systemctl --user")])
def test_restart_advice_is_for_the_users_own_docker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int, command: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    path = tmp_path / "daemon.json"
    ask = EngineRequest(
        runtimes=(("gpu-py", "/opt/gpu-py"),), config=str(path), prefix=str(tmp_path)
    )
    end = f": {command} restart docker"
    assert Docker().afterwards().endswith(end)
    [advice] = Docker().install(replace(ask, cdi=True, cdi_setting=True)).afterwards
    assert advice == f"Restart Docker, which reads features only at start-up{end}"
    path.write_text(
        '{"runtimes": {"gpu-py": {"path": "/opt/gpu-py"}}, "default-runtime": "gpu-py"}'
    )
    [advice] = Docker().install(replace(ask, without=frozenset({SET_DEFAULT}))).afterwards
    assert advice.startswith("Restart Docker, which keeps a default runtime")
    assert advice.endswith(end)


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (None, ""),
        ({"Runtimes": {"gpu-py": {"path": "/new"}}, "DefaultRuntime": "gpu-py"}, ""),
        ({"Runtimes": {}, "DefaultRuntime": "gpu-py"}, "the runtime 'gpu-py' from /d.json"),
        ({"Runtimes": {"gpu-py": {"path": "/old"}}}, "the runtime 'gpu-py' from /d.json"),
        ({"Runtimes": {"gpu-py": {"path": "/new"}}, "DefaultRuntime": "runc"}, "its new default"),
    ],
)
def test_settings_not_yet_loaded_by_dockerd_are_reported(
    info: dict[str, Any] | None, problem: str
) -> None:
    """`docker run` must work right after `gpuhook install --reload`."""
    dockerd = Process(7, 0, ("dockerd",), 0, 0.0, None, "")
    answer = DockerInfo(dockerd, "/d.json", "/docker.sock", info, "")
    document = {"runtimes": {"gpu-py": {"path": "/new"}}, "default-runtime": "gpu-py"}
    said = docker._still_missing(answer, document)
    assert problem in said
    assert bool(said) == bool(problem)


# Swarm ----------------------------------------------------------------------------------------


ONE, TWO = (SwarmResource("nvidia", "NVIDIA-GPU", f"GPU-{name}") for name in ("1111", "2222"))
PART = SwarmResource("nvidia", "NVIDIA-MIG", "MIG-3333")
AMD = SwarmResource("amd", "AMD-GPU", "0xab12")


@pytest.mark.parametrize(
    ("entries", "devices", "expected"),
    [
        ([], [ONE, TWO], ["NVIDIA-GPU=GPU-1111", "NVIDIA-GPU=GPU-2222"]),
        ([], [PART, AMD], ["NVIDIA-MIG=MIG-3333", "AMD-GPU=0xab12"]),
        # Entries of others are kept, including counts.
        (["SSD=fast", "RAM=4"], [ONE], ["SSD=fast", "RAM=4", "NVIDIA-GPU=GPU-1111"]),
        (["NVIDIA-GPU=2"], [ONE], ["NVIDIA-GPU=2", "NVIDIA-GPU=GPU-1111"]),
        # A device keeps its entry, and other devices of the same type get the same resource name.
        (["AMD_GPU=0xab12"], [ONE, AMD], ["AMD_GPU=0xab12", "NVIDIA-GPU=GPU-1111"]),
        (["gpu=GPU-2222"], [ONE, TWO], ["gpu=GPU-2222", "gpu=GPU-1111"]),
        (["big=GPU-1111", "small=GPU-2222"], [ONE, TWO], ["big=GPU-1111", "small=GPU-2222"]),
        (["gpu=gpu-1"], [ONE, TWO], ["gpu=gpu-1", "gpu=GPU-2222"]),
        # An entry that is the beginning of several ids names no device, and is kept.
        (["gpu=GPU-"], [ONE, TWO], ["gpu=GPU-", "NVIDIA-GPU=GPU-1111", "NVIDIA-GPU=GPU-2222"]),
        # Entries of devices that are gone are removed, and no entry is repeated.
        (["NVIDIA-GPU=GPU-9", "NVIDIA-GPU=GPU-1111"], [ONE], ["NVIDIA-GPU=GPU-1111"]),
        (["gpu=GPU-9", "gpu=GPU-1111"], [ONE], ["gpu=GPU-1111"]),
        (["gpu=GPU-1111", "gpu=GPU-1111"], [ONE], ["gpu=GPU-1111"]),
    ],
)
def test_swarm_resource_entries_are_merged(
    entries: list[str], devices: list[SwarmResource], expected: list[str]
) -> None:
    assert SwarmNode(entries, devices).merged() == expected
    assert SwarmNode(expected, devices).merged() == expected


def test_swarm_variables_follow_the_resource_entries() -> None:
    node = SwarmNode(
        ["gpu=GPU-1111", "gpu=0xab12", "NVIDIA-MIG=MIG-3333", "SSD=x"], [ONE, PART, AMD]
    )
    assert node.variables() == {
        "DOCKER_RESOURCE_GPU": ["nvidia", "amd"],
        "DOCKER_RESOURCE_NVIDIA-MIG": ["nvidia"],
    }


def test_swarm_resources_also_set_the_default_runtime() -> None:
    """A swarm service can't choose its runtime."""
    ask = EngineRequest((("gpu-py", "/x"),), swarm=(ONE,))
    wanted = wanted_document({"labels": ["a=b"]}, ask, "/d.json")
    assert wanted[KEY] == ["NVIDIA-GPU=GPU-1111"]
    assert wanted["default-runtime"] == "gpu-py"
    assert KEY not in wanted_document({}, EngineRequest((("gpu-py", "/x"),)), "/d.json")


@pytest.mark.parametrize("value", ["gpu=GPU-1", [1], {"gpu": "GPU-1"}])
def test_generic_resources_that_are_not_a_list_are_refused(value: object) -> None:
    with pytest.raises(EngineError, match=f'"{KEY}" in /d.json isn.t a list'):
        wanted_document({KEY: value}, EngineRequest((("gpu-py", "/x"),), swarm=(ONE,)), "/d.json")
