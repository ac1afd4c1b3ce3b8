"""The device plugin's file: the shared cases, every value, and the errors for invalid ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import ConfigError
from gpuhook.cluster.device_plugin.config_file import ConfigReader, read, reference_kind
from gpuhook.cluster.device_plugin.options import Content
from gpuhook.cluster.device_plugin.settings import Sharing
from gpuhook.core.cdi import yaml_reader

GPU = "nvidia.com/gpu"


def node(text: str) -> yaml_reader.YamlNode:
    found = yaml_reader.read(text.encode())
    assert found is not None
    return found


def written(folder: Path, text: str) -> Content:
    path = folder / "plugin.yaml"
    path.write_text(text)
    return read(str(path))


# The shared cases -------------------------------------------------------------------------------


@pytest.mark.vectors("plugin_config", "plugin.device_reference")
def test_device_references_match_the_shared_cases(case: dict[str, Any]) -> None:
    assert reference_kind(case["input"]["reference"]) == case["expected"].get("kind")


@pytest.mark.vectors("plugin_config", "plugin.replicated_devices")
def test_replicated_devices_match_the_shared_cases(case: dict[str, Any]) -> None:
    question = node(case["input"]["json"])
    if case["expected"].get("error"):
        with pytest.raises(ConfigError):
            ConfigReader("f").devices(question)
    else:
        assert ConfigReader("f").devices(question) == case["expected"]["devices"]


@pytest.mark.vectors("plugin_config", "plugin.replicated_resource")
def test_replicated_resources_match_the_shared_cases(case: dict[str, Any]) -> None:
    question = node(json.dumps(case["input"]["resource"]))
    if case["expected"].get("error"):
        with pytest.raises(ConfigError):
            ConfigReader("f").replicated(question)
    else:
        assert ConfigReader("f").replicated(question)._asdict() == case["expected"]


@pytest.mark.parametrize(
    "text",
    ["", "-1", "1:", ":1", "0:0:0", "GPU-1", "4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
     "MIG-GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c/0", "٣", "0\n"],
)  # fmt: skip
def test_an_invalid_device_reference_has_no_kind(text: str) -> None:
    assert reference_kind(text) is None


# Values -------------------------------------------------------------------------------------------

WHOLE = """
version: v1
flags:
  migStrategy: mixed
  failOnInitError: false
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [volume-mounts, cdi-cri]
    deviceIDStrategy: index
    cdiAnnotationPrefix: x.cdi.k8s.io/
    containerDriverRoot: /host
    sharedDevicesAllocationPolicy: packed
  gfd: {oneshot: true}
imex: {channelIDs: [0, 3], required: true}
gpuhook:
  {driverFolder: /srv/driver, cdiFolder: /cdi, cdiHookPath: /h, interval: 5, recovery: 0,
   metricsListen: "[::]:9837", xids: {94: fatal, 13: ignore}}
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - {name: gpu, replicas: 4}
      - name: amd.com/gpu
        replicas: 2
"""


def test_every_value_of_the_file_is_read(tmp_path: Path) -> None:
    found = written(tmp_path, WHOLE)
    assert found.warnings == []
    assert found.values == {
        "mig-strategy": "mixed",
        "fail-on-init-error": False,
        "driver-root": "/run/nvidia/driver",
        "dev-root": "/",
        "gdrcopy-enabled": True,
        "gds-enabled": True,
        "mofed-enabled": True,
        "pass-device-specs": True,
        "device-list-strategy": ("volume-mounts", "cdi-cri"),
        "device-id-strategy": "index",
        "cdi-annotation-prefix": "x.cdi.k8s.io/",
        "driver-root-ctr-path": "/host",
        "shared-devices-allocation-policy": "packed",
        "imex-channel-ids": (0, 3),
        "imex-required": True,
        "driver-folder": "/srv/driver",
        "cdi-folder": "/cdi",
        "cdi-hook-path": "/h",
        "interval": 5.0,
        "recovery": 0.0,
        "metrics-listen": "[::]:9837",
        "xid": {94: "fatal", 13: "ignore"},
    }
    assert found.single_requests
    assert found.sharing == {
        GPU: Sharing(GPU, 4, "nvidia.com/gpu.shared"),
        "amd.com/gpu": Sharing("amd.com/gpu", 2, "amd.com/gpu.shared"),
    }


@pytest.mark.parametrize(
    "text", ["", "version: v1", "{}", "flags:", "flags: {plugin: }", "flags: {migStrategy: }",
             "sharing: {mps: , timeSlicing: {resources: }}", '{"version": "v1", "flags": {}}'],
)  # fmt: skip
def test_an_empty_file_or_section_sets_nothing(tmp_path: Path, text: str) -> None:
    assert written(tmp_path, text) == Content()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resources: {gpus: [{pattern: '*', name: gpu}]}", "resources.gpus has no effect"),
        ("flags: {mpsRoot: /run}", "flags.mpsRoot has no effect"),
        ("flags: {deviceDiscoveryStrategy: tegra}", "has no effect"),
        ("flags: {plugin: {nvidiaCTKPath: /usr/bin/nvidia-ctk}}", "has no effect"),
        ("flags:\n  migStategy: mixed", "line 2: 'flags.migStategy' is unknown"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, rename: x}]}}", "rename of"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 1}]}}", "devices"),
    ],
)
def test_settings_without_effect_give_a_warning(tmp_path: Path, text: str, words: str) -> None:
    [warning] = written(tmp_path, text).warnings
    assert words in warning
    assert "plugin.yaml, line" in warning


def test_a_rename_is_ignored_as_in_nvidias_plugin(tmp_path: Path) -> None:
    text = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, rename: x}]}}"
    assert written(tmp_path, text).sharing == {GPU: Sharing(GPU, 2, GPU)}


def test_harmless_unused_settings_give_no_warning(tmp_path: Path) -> None:
    found = written(tmp_path, "flags: {deviceDiscoveryStrategy: auto, useNodeFeatureAPI: true}")
    assert found.warnings == []


@pytest.mark.parametrize(
    ("entry", "shares"),
    [
        ("replicas: 4", (25,) * 4),
        ("replicas: 3, unlimited: true", (33, 33, 33, 0)),
        ("sizes: [50, 30, 20]", (50, 30, 20)),
        ("sizes: [1, 99]", (1, 99)),
        ("sizes: [80, 80], overcommit: true", (80, 80)),
        ("sizes: [100], unlimited: true", (100, 0)),
    ],
)
def test_mps_shares_are_computed_from_replicas_or_sizes(
    tmp_path: Path, entry: str, shares: tuple[int, ...]
) -> None:
    [found] = written(tmp_path, MPS.format(entry)).sharing.values()
    assert found == Sharing(GPU, len(shares), GPU, shares, single=True)


def test_mps_options_of_nvidias_plugin_are_read(tmp_path: Path) -> None:
    words = "renameByDefault: true, failRequestsGreaterThanOne: false"
    text = f"sharing: {{mps: {{{words}, resources: [{{name: gpu, replicas: 2}}]}}}}"
    found = written(tmp_path, text).sharing[GPU]
    assert found == Sharing(GPU, 2, f"{GPU}.shared", (50, 50), single=False)


@pytest.mark.parametrize(
    ("entry", "memory", "overcommits"),
    [
        ("replicas: 4", ("25%",) * 4, False),
        ("replicas: 3", ("33%",) * 3, False),
        ("sizes: [50, 30%, 20]", ("50%", "30%", "20%"), False),
        ("sizes: [1, 99]", ("1%", "99%"), False),
        ("sizes: [8GiB, 16 GiB]", ("8GiB", "16 GiB"), False),
        ("sizes: [80, 80], overcommit: true", ("80%", "80%"), True),
    ],
)
def test_memory_shares_are_computed_from_replicas_or_sizes(
    tmp_path: Path, entry: str, memory: tuple[str, ...], overcommits: bool
) -> None:
    content = written(tmp_path, MEMORY.format(entry))
    [found] = content.sharing.values()
    assert found == Sharing(GPU, len(memory), GPU, (), True, memory, overcommits)
    assert content.warnings == []


@pytest.mark.parametrize("way", ["mps", "memory"])
def test_gpuhooks_own_sharing_keys_give_no_warning(tmp_path: Path, way: str) -> None:
    entry = "replicas: 2, overcommit: true"
    text = f"sharing: {{{way}: {{resources: [{{name: gpu, {entry}}}]}}}}"
    assert written(tmp_path, text).warnings == []


SHARED = "sharing:\n  timeSlicing:\n    resources:\n    - name: gpu\n      replicas: {}\n"
MPS = "sharing:\n  mps:\n    resources:\n    - {{name: gpu, {}}}\n"
MEMORY = MPS.replace("mps", "memory")
SHARED_AND_LONG = f"""sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - {{name: {"x" * 50}, replicas: 2}}
"""


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("version: v2", 1, "version"),
        ("flags:\n  migStrategy: all", 2, "one of none, single, mixed"),
        ("flags:\n  failOnInitError: 'true'", 2, "true or false"),
        ("flags:\n  plugin:\n    deviceListStrategy: [envvar, x]", 3, "one or several of"),
        ("flags:\n  nvidiaDriverRoot: driver", 2, "an absolute path"),
        ("flags:\n- a", 2, "flags must be a table"),
        ("gpuhook:\n  interval: fast", 2, "must be a number of seconds"),
        ("flags:\n  migStrategy: none\n  migStrategy: none", 3, "comes twice"),
        ("imex:\n  channelIDs: [-1]", 2, "numbers from 0"),
        ("imex:\n  channelIDs: [1048576]", 2, "numbers from 0"),
        ("gpuhook:\n  interval: 0", 2, "at least 0.1"),
        ("gpuhook:\n  interval: .nan", 2, "seconds"),
        ("gpuhook:\n  xids: {79: panic}", 2, "NUMBER=ACTION"),
        ("sharing:\n  mps: {resources: {}}", 2, "must be a list"),
        ("sharing:\n  mps:\n    resources:\n    - {name: gpu}", 4, "lacks replicas"),
        (MPS.format("replicas: 2, sizes: [50, 50]"), 4, "replicas or sizes"),
        (MPS.format("sizes: [60, 60]"), 4, "120 % together"),
        (MPS.format("sizes: [true, 60]"), 4, "whole numbers from 1 to 100"),
        (MPS.format("sizes: [0]"), 4, "whole numbers from 1 to 100"),
        (MPS.format("sizes: [100]"), 4, "from 2 to"),
        (MPS.format("replicas: 49"), 4, "MPS serves 48"),
        (MEMORY.format("replicas: 2, sizes: [50, 50]"), 4, "replicas or sizes"),
        (MEMORY.format("sizes: [60, 60]"), 4, "120 % together"),
        (MEMORY.format("sizes: [true, 60]"), 4, "percents from 1 to 100"),
        (MEMORY.format("sizes: [8GiB, 60]"), 4, "sizes such as 8GiB"),
        (MEMORY.format("sizes: [8G, 8G]"), 4, "sizes such as 8GiB"),
        (MEMORY.format("sizes: []"), 4, "sizes such as 8GiB"),
        (MEMORY.format("sizes: [101]"), 4, "percents from 1 to 100"),
        (MEMORY.format("sizes: [8GiB]"), 4, "from 2 to"),
        (MEMORY.format("replicas: 101"), 4, "from 2 to 100"),
        ("sharing:\n  timeSlicing:\n    renameByDefault: 1", 3, "true or false"),
        ("sharing:\n  timeSlicing:\n    resources: {}", 3, "must be a list"),
        (SHARED.format(1), 5, "from 2 to"),
        (SHARED.format(100000), 5, "from 2 to"),
        (SHARED.format(2.5), 5, "whole number"),
        (SHARED.format("true"), 5, "whole number"),
        (SHARED.format(2) + "    - {name: nvidia.com/gpu, replicas: 3}", 6, "shared twice"),
        (SHARED_AND_LONG, 5, "more than 63 characters"),
        ("a: ]", 1, "neither YAML nor JSON"),
        ("flags:\n  migStrategy: !!int x", 2, "doesn't fit"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, text)
    assert f"plugin.yaml, line {line}: " in caught.value.cause
    assert words in caught.value.cause


def test_a_missing_file_or_a_folder_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="can't be read"):
            read(str(path))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = ["version", "flags", "plugin", "sharing", "timeSlicing", "mps", "memory", "resources",
         "name", "replicas", "devices", "rename", "imex", "channelIDs", "gpuhook", "xids",
         "migStrategy", "gpus", "renameByDefault"]  # fmt: skip
TABLES = st.recursive(
    VALUES,
    lambda inner: (
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=4) | st.lists(inner, max_size=2)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(NAMES), TABLES) | TABLES)
def test_any_content_is_read_or_refused(content: object) -> None:
    reader = ConfigReader("f")
    text = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    try:
        root = yaml_reader.read(text)
        assert root is not None
        reader.read(root)
    except (ConfigError, yaml_reader.TreeError):
        pass
