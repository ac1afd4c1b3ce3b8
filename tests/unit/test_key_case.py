"""Case of keys in each format, read as the Go program that owns the format reads them.

Go's encoding/json takes keys in any case. Kubernetes' own reader (sigs.k8s.io/json), go-yaml
and maps don't, and dockerd refuses other spellings of daemon.json's own keys. Each rule comes
from the program's source. For dockerd, podman and runc, it also comes from trying such a file.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.errors import ConfigError, GpuhookError
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.spec import Spec
from gpuhook.cluster.device_plugin import config_file
from gpuhook.cluster.dra import access, configs
from gpuhook.core.cdi import document
from gpuhook.core.request.reader import SpecReader
from gpuhook.metrics import web_files
from gpuhook.tools.doctor import docker as doctors_docker
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.engines import docker
from gpuhook.vendors.nvidia import cuda_compat
from gpuhook.vendors.nvidia import names as nvidia

Reader = Callable[[str, Path], object]


def cuda_note(text: str, _folder: Path) -> object:
    note = cuda_compat.parse_note(text.encode())
    return note and (note.cuda, note.branches)


def plugin_file(text: str, folder: Path) -> object:
    (folder / "plugin.yaml").write_text(text)
    return config_file.read(str(folder / "plugin.yaml"))


def cdi_spec(text: str, _folder: Path) -> object:
    found = document.read(text.encode())
    return found.document, found.problems


def docker_runtimes(text: str, folder: Path) -> object:
    (folder / "daemon.json").write_text(text)
    found = doctors_docker._runtimes(Machine(str(folder)), "/daemon.json")
    assert found == docker._programs(json.loads(text).get("runtimes", {}))
    return found


def claim(text: str, _folder: Path) -> object:
    given = {"opaque": {"driver": "gpu.nvidia.com", "parameters": json.loads(text)}}
    return configs.wish([given], "gpu.nvidia.com", "gpu", nvidia, is_part=False)


def kubeconfig(text: str, folder: Path) -> object:
    path = folder / "kubeconfig"
    path.write_text(text)
    found = access.from_kubeconfig(str(path))
    return found.server, found.token


def web(text: str, folder: Path) -> object:
    (folder / "web.yaml").write_text(text)
    return web_files._tables(str(folder / "web.yaml"))


def oci_config(text: str, _folder: Path) -> object:
    """Return whether a config.json may request NVIDIA's devices.

    crun accepts only the specification's spelling, and engines write it.
    """
    return SpecReader(Spec("config.json", text).data, Config()).asks(nvidia)


NOTE = '{"format":1,"CUDA version":"12.9","driver":[535]}'
CDI = """{"cdiVersion": "0.5.0", "kind": "a.com/b",
"devices": [{"name": "0", "containerEdits": {"env": ["A=1"]}}]}"""
SHARING = "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 2}]}}"
RUNTIMES = '{"runtimes": {"gpu-py": {"path": "/usr/bin/gpu-py"}}}'
CLAIM = """{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
"sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}}"""
KUBECONFIG = """
current-context: c
contexts: [{name: c, context: {cluster: k, user: u}}]
clusters: [{name: k, cluster: {server: "https://k"}}]
users: [{name: u, user: {token: t}}]
"""

# A reader, a text in its documented spelling, a key in that text, and another spelling of it.
ANY_CASE: list[tuple[Reader, str, str, str]] = [
    (cuda_note, NOTE, "format", "Format"),
    (cuda_note, NOTE, "CUDA version", "cuda VERSION"),
    (cuda_note, NOTE, "driver", "DRIVER"),
    (plugin_file, "version: v1\nflags: {migStrategy: mixed}", "version", "Version"),
    (plugin_file, "flags: {migStrategy: mixed}", "flags", "FLAGS"),
    (plugin_file, "flags: {migStrategy: mixed}", "migStrategy", "MigStrategy"),
    (plugin_file, "flags: {plugin: {passDeviceSpecs: true}}", "plugin", "Plugin"),
    (plugin_file, "flags: {plugin: {passDeviceSpecs: true}}", "passDeviceSpecs", "passdevicespecs"),
    (plugin_file, "flags: {gfd: {oneshot: true}}", "gfd", "GFD"),
    (plugin_file, "flags: {mpsRoot: /}", "mpsRoot", "MPSRoot"),
    (plugin_file, "imex: {channelIDs: [0]}", "imex", "IMEX"),
    (plugin_file, "imex: {channelIDs: [0]}", "channelIDs", "channelIds"),
    (plugin_file, "resources: {gpus: []}", "gpus", "GPUs"),
    (plugin_file, SHARING, "sharing", "Sharing"),
    (plugin_file, SHARING, "timeSlicing", "timeslicing"),
    (plugin_file, SHARING.replace("timeSlicing", "mps"), "mps", "MPS"),
    (cdi_spec, CDI, "cdiVersion", "CDIVersion"),
    (cdi_spec, CDI, "containerEdits", "containeredits"),
    (cdi_spec, CDI, "env", "ENV"),
    (docker_runtimes, RUNTIMES, "path", "Path"),
]  # fmt: skip
EXACT: list[tuple[Reader, str, str, str]] = [
    (plugin_file, SHARING, "renameByDefault", "renamebydefault"),
    (plugin_file, SHARING, "resources", "Resources"),
    (plugin_file, SHARING, "replicas", "Replicas"),
    (plugin_file, SHARING.replace("timeSlicing", "mps"), "resources", "Resources"),
    (docker_runtimes, RUNTIMES, "runtimes", "Runtimes"),
    (docker_runtimes, RUNTIMES, '"gpu-py"', '"GPU-py"'),
    (claim, CLAIM, "kind", "Kind"),
    (claim, CLAIM, "sharing", "Sharing"),
    (claim, CLAIM, "strategy", "Strategy"),
    (claim, CLAIM, "interval", "Interval"),
    (kubeconfig, KUBECONFIG, "current-context", "Current-Context"),
    (kubeconfig, KUBECONFIG, "token", "Token"),
    (web, "basic_auth_users: {a: b}", "basic_auth_users", "Basic_Auth_Users"),
    (oci_config, '{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}', "process", "Process"),
    (oci_config, '{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}', "env", "Env"),
]


def outcome(read: Reader, text: str, folder: Path) -> object:
    """Return the content read from a text, or the kind of error if the text is refused."""
    try:
        return read(text, folder)
    except GpuhookError as error:
        return type(error)


@pytest.mark.parametrize(("read", "text", "key", "other"), ANY_CASE)
def test_case_insensitive_keys_are_read_in_any_case(
    read: Reader, text: str, key: str, other: str, tmp_path: Path
) -> None:
    assert text.replace(key, other) != text
    found = read(text.replace(key, other), tmp_path)
    assert found
    assert found == read(text, tmp_path)


@pytest.mark.parametrize(("read", "text", "key", "other"), EXACT)
def test_case_sensitive_keys_are_read_in_one_spelling_only(
    read: Reader, text: str, key: str, other: str, tmp_path: Path
) -> None:
    assert text.replace(key, other) != text
    assert outcome(read, text, tmp_path)
    assert outcome(read, text.replace(key, other), tmp_path) != outcome(read, text, tmp_path)


def test_a_key_in_two_spellings_is_refused_in_the_plugin_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2: flags\.migStrategy comes twice"):
        plugin_file("flags: {migStrategy: none,\n  MigStrategy: mixed}", tmp_path)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({}, None),
        ({"path": 1}, 1),
        ({"PATH": 1}, 1),
        ({"path": 1, "Path": 2}, 2),
        ({"Path": 2, "path": 1}, 1),
        ({"paths": 1, "pat\u212b": 2}, None),
    ],
)
def test_the_last_key_equal_but_for_case_counts(table: dict[str, Any], found: object) -> None:
    assert jsontext.field(table, "path") == found


@pytest.mark.parametrize(("one", "other"), [("kind", "\u212aind"), ("sharing", "\u017fharing")])
def test_letters_are_folded_as_go_does(one: str, other: str) -> None:
    assert jsontext.folded(other) == jsontext.folded(one)


def test_a_docker_runtime_entry_keeps_the_spelling_of_its_keys() -> None:
    entry = {"Path": "/old/gpu-py", "RuntimeArgs": ["--debug"]}
    assert docker._led(entry, "/new/gpu-py") == {**entry, "Path": "/new/gpu-py"}
