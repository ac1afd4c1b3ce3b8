"""Runtimes in containerd's configuration, with its default's options, in every version."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines import installer
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.containerd import Containerd, answer
from gpuhook.tools.engines.containerd_settings import too_new
from gpuhook.tools.engines.merge import get
from gpuhook.tools.engines.store import Store
from gpuhook.tools.engines.toml_text import render

PLUGINS = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
ASK = {"runtimes": (("gpu-py", "/opt/gpu-py"),)}
COMMENTED = """\
version = 2
# ours
imports = [
  "/etc/containerd/more/*.toml", # the admin's
]
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true
"""


def ask_for(config: Path, **more: Any) -> EngineRequest:
    return EngineRequest(**{**ASK, "config": str(config), **more})


def source_of(given: dict[str, Any]) -> dict[str, Any]:
    """Build a configuration file's document from a case's short form."""
    containerd: dict[str, Any] = {}
    for key, value in given["source"].items():
        if key.startswith("runtimes."):
            containerd.setdefault("runtimes", {})[key.removeprefix("runtimes.")] = value
        else:
            containerd[key] = value
    document = {} if given["version"] == 1 else {"version": given["version"]}
    return {**document, "plugins": {PLUGINS[given["version"]]: {"containerd": containerd}}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


@pytest.mark.vectors("engine", "engine.containerd")
@pytest.mark.parametrize("program", [None, (1, 6), (2, 1)])
def test_containerd_configuration_matches_the_vectors(
    case: dict[str, Any], program: tuple[int, int] | None, config: Path
) -> None:
    given, expected = case["input"], case["expected"]
    config.write_text(render(source_of(given), "the admin's"))
    pair = (given["add"]["name"], given["add"]["path"])
    ask = EngineRequest((pair,), set_default=given["set_as_default"], config=str(config))
    plugin = expected.get("plugin", PLUGINS[given["version"]])
    text = answer(ask, program).targets[0].text
    containerd = get(tomllib.loads(text), ("plugins", plugin, "containerd"))
    test = expected["runtimes.test"]
    if (program == (2, 1) or given["version"] == 3) and test.get("runtime_root") == "":
        # NVIDIA's default entry has keys that containerd 2 doesn't know.
        test = {key: test[key] for key in test if key not in ("runtime_root", "runtime_engine")}
    assert containerd["runtimes"]["test"] == test
    if "runtimes.runc" in expected and program != (2, 1):
        assert containerd["runtimes"]["runc"] == expected["runtimes.runc"]
    if "default_runtime_name" in expected and (program != (2, 1) or given["set_as_default"]):
        assert containerd.get("default_runtime_name") == expected["default_runtime_name"]


@pytest.mark.parametrize(
    ("text", "program", "known"),
    [
        ("version = 2\n", None, True),
        ("version = 2\n", (1, 7), True),
        ("version = 2\n", (2, 0), False),
        ("version = 3\n", None, False),
        ("version = 3\n", (2, 1), False),
        ("version = 4\n", None, False),
        ("version = 4\n", (2, 3), False),
        ("", (2, 3), False),
    ],
)
def test_containerd_2_gets_no_unknown_runtime_keys(
    text: str, program: tuple[int, int] | None, known: bool, config: Path
) -> None:
    """containerd 2 warns at each start, for each runtime, about keys that it doesn't know."""
    config.write_text(text)
    document = tomllib.loads(answer(ask_for(config), program).targets[0].text)
    [plugin] = document["plugins"].values()
    entry = plugin["containerd"]["runtimes"]["gpu-py"]
    assert ("runtime_root" in entry, "runtime_engine" in entry) == (known, known)
    assert entry["runtime_type"] == "io.containerd.runc.v2"


def test_imports_are_appended(config: Path) -> None:
    """The vector 'containerd imports appended' has the same result in another order."""
    config.write_text('version = 2\nimports = ["/foo/bar/*.toml"]\n')
    drop_in = "/etc/containerd/conf.d/99-nvidia.toml"
    main = answer(ask_for(config, drop_in=drop_in), None).targets[1]
    assert main.text == (
        'version = 2\nimports = ["/foo/bar/*.toml", "/etc/containerd/conf.d/*.toml"]\n'
    )


def test_main_file_keeps_comments_and_drop_in_copies_its_settings(
    tmp_path: Path, config: Path
) -> None:
    config.write_text(COMMENTED)
    drop_in, main = answer(ask_for(config), (1, 7)).targets
    line = '  "/etc/containerd/more/*.toml", # the admin\'s\n'
    assert main.text == COMMENTED.replace(line, line + f'  "{tmp_path}/conf.d/*.toml",\n')
    assert drop_in.path == f"{tmp_path}/conf.d/99-gpuhook.toml"
    cri = get(tomllib.loads(drop_in.text), ("plugins", PLUGINS[2]))
    # This containerd reads the table only from the last file, so that file must contain all of it.
    assert cri["cni"] == {"bin_dir": "/usr/lib/cni"}
    assert cri["containerd"]["runtimes"]["runc"]["options"] == {"SystemdCgroup": True}
    assert cri["containerd"]["runtimes"]["gpu-py"]["options"] == {
        "SystemdCgroup": True,
        "BinaryName": "/opt/gpu-py",
    }
    assert "copied" in drop_in.text


def test_an_edited_drop_in_copy_is_removed_whole(tmp_path: Path, config: Path) -> None:
    config.write_text(COMMENTED)
    store = Store(str(tmp_path / "state"))
    targets = list(answer(ask_for(config), (1, 7)).targets)
    with store.locked():
        installer.install(store, targets)
        drop_in = Path(targets[0].path)
        drop_in.write_text(drop_in.read_text().replace("/usr/lib/cni", "/opt/cni"))
        installer.uninstall(store, store.records())
    assert not drop_in.exists()
    assert config.read_text() == COMMENTED


def test_a_drop_in_holds_only_our_settings_if_tables_are_merged(config: Path) -> None:
    config.write_text(COMMENTED)
    ask = ask_for(config, set_default=True, cdi=True)
    document = tomllib.loads(answer(ask, (2, 1)).targets[0].text)
    cri = get(document, ("plugins", PLUGINS[2]))
    assert set(cri) == {"containerd", "enable_cdi"}
    assert set(cri["containerd"]) == {"runtimes", "default_runtime_name"}
    assert set(cri["containerd"]["runtimes"]) == {"gpu-py"}
    assert cri["containerd"]["runtimes"]["gpu-py"]["options"]["SystemdCgroup"] is True


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("conf.d/*.toml", False),  # containerd 1.6.20 finds nothing: its working folder is /
        ("conf.d/99-gpuhook.toml", True),
        ("{}/conf.d/99-*.toml", True),
        ("{}/conf.d/10-*.toml", False),
    ],
)
def test_an_import_that_covers_the_drop_in_is_enough(
    tmp_path: Path, pattern: str, covered: bool, config: Path
) -> None:
    text = f'version = 2\nimports = ["{pattern.format(tmp_path)}"]\n'
    config.write_text(text)
    assert (answer(ask_for(config), None).targets[1].text == text) is covered


def test_settings_of_other_imported_files_are_copied(tmp_path: Path) -> None:
    config, folder = tmp_path / "config.toml", tmp_path / "conf.d"
    folder.mkdir()
    config.write_text('version = 2\nimports = ["conf.d/*.toml"]\n')
    (folder / "10.toml").write_text(
        f'version = 2\n[plugins."{PLUGINS[2]}"]\nsandbox_image = "pause:1"\n'
    )
    (folder / "99-gpuhook.toml").write_text(
        f'version = 2\n[plugins."{PLUGINS[2]}"]\nsandbox_image = "old copy"\n'
    )
    document = tomllib.loads(answer(ask_for(config), None).targets[0].text)
    assert get(document, ("plugins", PLUGINS[2], "sandbox_image")) == "pause:1"


def test_a_new_file_is_written_when_none_exists(tmp_path: Path) -> None:
    config = tmp_path / "containerd" / "config.toml"
    drop_in, main = answer(ask_for(config), (1, 6)).targets
    assert tomllib.loads(main.text) == {
        "version": 2,
        "imports": [f"{tmp_path}/containerd/conf.d/*.toml"],
    }
    assert tomllib.loads(drop_in.text)["version"] == 2
    assert tomllib.loads(answer(ask_for(config), (2, 0)).targets[1].text)["version"] == 3
    targets = answer(ask_for(config), (2, 3)).targets
    assert [tomllib.loads(each.text)["version"] for each in targets] == [4, 4]


@pytest.mark.parametrize(
    ("main", "other", "program", "refused"),
    [
        (3, 4, (2, 3), True),
        (3, 4, None, True),
        (2, 3, (2, 3), True),
        (2, 3, None, False),
        (2, 3, (2, 2), False),
        (3, 3, (2, 3), False),
        (4, 2, (2, 3), False),
    ],
)
@pytest.mark.parametrize("imports", ['imports = ["conf.d/*.toml"]\n', ""])
def test_a_file_of_a_higher_version_is_not_imported(
    config: Path,
    imports: str,
    main: int,
    other: int,
    program: tuple[int, int] | None,
    refused: bool,
) -> None:
    """containerd 2.3 doesn't start if an imported file has a higher version than the main file."""
    config.write_text(f"version = {main}\n{imports}")
    (config.parent / "conf.d").mkdir()
    later = config.parent / "conf.d/50-other.toml"
    later.write_text(f"version = {other}\n")
    if not refused:
        assert answer(ask_for(config), program).targets
        return
    with pytest.raises(EngineError, match=f"{later} has the configuration version {other}"):
        answer(ask_for(config), program)


@pytest.mark.parametrize(
    ("main", "others", "found"),
    [(0, [2], []), (0, [2, 3], ["1"]), (0, [0, 3], []), (1, [2], ["0"]), (3, [3, 4, 2], ["1"])],
)
def test_versions_of_imported_files_are_compared_as_containerd_does(
    main: int, others: list[int], found: list[str]
) -> None:
    """If the main file has no version, the first import with one counts (seen with 2.3.4)."""
    documents = [{"version": version} if version else {} for version in (main, *others)]
    imported = {str(at): document for at, document in enumerate(documents[1:])}
    assert too_new(documents[0], imported, (2, 3)) == found


def test_our_own_file_of_a_higher_version_is_replaced(config: Path) -> None:
    config.write_text("version = 4\n")
    drop_in = answer(ask_for(config), (2, 3)).targets[0]
    Path(drop_in.path).parent.mkdir()
    Path(drop_in.path).write_text(drop_in.text)
    config.write_text(f'version = 3\nimports = ["{drop_in.path}"]\n')
    assert tomllib.loads(answer(ask_for(config), (2, 3)).targets[0].text)["version"] == 3


def test_version_1_is_edited_in_place(config: Path) -> None:
    config.write_text('# one\nroot = "/r"\n[plugins.cri]\n  sandbox_image = "p" # two\n')
    found = answer(ask_for(config, set_default=True, cdi=True), None)
    [target] = found.targets
    assert target.path == str(config)
    assert target.text.startswith('# one\nroot = "/r"\n[plugins.cri]\n  sandbox_image = "p" # two')
    containerd = get(tomllib.loads(target.text), ("plugins", "cri", "containerd"))
    assert containerd["default_runtime_name"] == "gpu-py"
    assert containerd["runtimes"]["gpu-py"]["options"]["Runtime"] == "/opt/gpu-py"
    assert any("version 2" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("imported", "version", "tables", "program", "taken"),
    [
        (True, 1, 1, (2, 3), True),
        (True, 2, 2, (2, 3), True),
        (True, 2, 2, None, True),  # only containerd 2.3 reads a main file of version 4
        (True, 3, 2, (2, 3), True),
        (True, 3, 3, (2, 3), True),
        (True, 4, 2, (2, 3), False),
        (True, 4, 3, (2, 3), True),
        (False, 2, 2, (2, 3), True),
        (False, 3, 2, (2, 3), True),
        (False, 4, 2, (2, 3), False),
        (False, 4, 3, (2, 3), True),
    ],
)
def test_containerd_2_3_migrates_each_file_by_its_own_version(
    config: Path,
    imported: bool,
    version: int,
    tables: int,
    program: tuple[int, int] | None,
    taken: bool,
) -> None:
    """`containerd config dump` of 2.3.4 shows it; pods fail at once if SystemdCgroup is lost."""
    head = f"version = {version}\n" if version > 1 else ""
    table = f'[plugins."{PLUGINS[tables]}".containerd.runtimes.runc'
    text = f"{head}{table}]\nruntime_type = 'io.containerd.runc.v2'\n"
    text += f"{table}.options]\nSystemdCgroup = true\n"
    if imported:
        config.write_text('version = 4\nimports = ["other.toml"]\n')
        (config.parent / "other.toml").write_text(text)
    else:
        config.write_text(text)
    drop_in = tomllib.loads(answer(ask_for(config), program).targets[0].text)
    [plugin] = drop_in["plugins"].values()
    options = plugin["containerd"]["runtimes"]["gpu-py"]["options"]
    assert options.get("SystemdCgroup", False) == taken


def test_tables_of_several_versions_in_one_file(config: Path) -> None:
    """For each key of containerd's table, the newest version counts."""
    new, old = (f'[plugins."{PLUGINS[version]}".containerd' for version in (3, 2))
    config.write_text(
        f'version = 3\n{new}.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n'
        f"{new}.runtimes.runc.options]\nNoPivotRoot = true\n"
        f'{old}]\ndefault_runtime_name = "crun"\n'
        f"{old}.runtimes.crun.options]\nSystemdCgroup = true\n"
    )
    drop_in = tomllib.loads(answer(ask_for(config), (2, 3)).targets[0].text)
    options = get(drop_in, ("plugins", PLUGINS[3], "containerd", "runtimes", "gpu-py", "options"))
    assert options == {"NoPivotRoot": True, "BinaryName": "/opt/gpu-py"}


@pytest.mark.parametrize(
    ("program", "warned"), [(None, 0), ((1, 7), 0), ((2, 0), 1), ((2, 1), 1), ((2, 3), 0)]
)
def test_settings_that_containerd_2_ignores_are_warned_of(
    config: Path, program: tuple[int, int] | None, warned: int
) -> None:
    config.write_text('root = "/r"\n')
    found = answer(ask_for(config), program)
    assert [("ignores" in warning) for warning in found.warnings] == [True] * warned
    config.write_text('version = 2\nroot = "/r"\n')
    assert answer(ask_for(config), program).warnings == ()


@pytest.mark.parametrize("plugin", PLUGINS.values())
def test_a_disabled_cri_is_warned_of(config: Path, plugin: str) -> None:
    config.write_text(f'version = 2\ndisabled_plugins = ["{plugin}"]\n')
    assert any("disables" in warning for warning in answer(ask_for(config), None).warnings)


@pytest.mark.parametrize("text", ["version = 'x'", "version = 0", "version = 2\nimports = 1"])
def test_wrong_values_are_refused(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(EngineError, match=str(config)):
        answer(ask_for(config), None)


def test_a_containerd_used_only_by_docker_counts_as_absent(config: Path) -> None:
    config.write_text('disabled_plugins = ["cri"]\n')
    assert not Containerd().is_present(ask_for(config))
    config.write_text("version = 2\n")
    assert Containerd().is_present(ask_for(config))


def test_running_containers_are_found_by_their_binary(tmp_path: Path, config: Path) -> None:
    config.write_text(f'version = 2\nstate = "{tmp_path}"\n')
    tasks = tmp_path / "io.containerd.runtime.v2.task"
    for name, binary in (("one", "/opt/gpu-py"), ("two", "/usr/sbin/runc")):
        (tasks / "k8s.io" / name).mkdir(parents=True)
        (tasks / "k8s.io" / name / "runtime").write_text(binary)
    assert Containerd().bound(("gpu-py",), ask_for(config)) == ["k8s.io/one"]


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("program", [None, (1, 6), (2, 1)])
def test_built_in_runc_is_kept_if_no_file_names_a_runtime(
    tmp_path: Path, version: int, program: tuple[int, int] | None, config: Path
) -> None:
    """Any entry in ``runtimes`` makes containerd forget runc, its default."""
    head = "" if version == 1 else f"version = {version}\n"
    text = head + f'[plugins."{PLUGINS[version]}".cni]\n  bin_dir = "/usr/lib/cni"\n'
    config.write_text(text)
    store = Store(str(tmp_path / "state"))
    with store.locked():
        for _ in range(2):  # the second time with the files of the first
            targets = list(answer(ask_for(config), program).targets)
            installer.install(store, targets)
            document = tomllib.loads(targets[0].text)
            runtimes = get(document, ("plugins", PLUGINS[version], "containerd", "runtimes"))
            assert set(runtimes) == {"runc", "gpu-py"}
            assert runtimes["runc"] == {"runtime_type": "io.containerd.runc.v2", "options": {}}
            assert runtimes["gpu-py"]["options"]["BinaryName"] == "/opt/gpu-py"
        installer.uninstall(store, store.records())
    assert config.read_text() == text
    assert not (tmp_path / "conf.d").exists()


def test_a_runtime_without_a_type_gets_the_runc_type(config: Path) -> None:
    table = f'[plugins."{PLUGINS[2]}".containerd'
    config.write_text(
        f'version = 2\n{table}]\ndefault_runtime_name = "crun"\n{table}.runtimes.crun.options]\n'
        "SystemdCgroup = true\n"
    )
    document = tomllib.loads(answer(ask_for(config), (1, 6)).targets[0].text)
    ours = get(document, ("plugins", PLUGINS[2], "containerd", "runtimes", "gpu-py"))
    assert ours["runtime_type"] == "io.containerd.runc.v2"
    assert ours["options"]["SystemdCgroup"] is True


def test_runc_is_not_added_beside_a_named_runtime(config: Path) -> None:
    table = f'[plugins."{PLUGINS[2]}".containerd'
    config.write_text(
        f'version = 2\n{table}]\ndefault_runtime_name = "crun"\n'
        f'{table}.runtimes.crun]\nruntime_type = "io.containerd.runc.v2"\n'
    )
    document = tomllib.loads(answer(ask_for(config), (1, 6)).targets[0].text)
    runtimes = get(document, ("plugins", PLUGINS[2], "containerd", "runtimes"))
    assert set(runtimes) == {"crun", "gpu-py"}


def test_the_built_in_runtime_adds_no_comment_about_copies(config: Path) -> None:
    assert "copied" not in answer(ask_for(config), (1, 6)).targets[0].text


@pytest.mark.parametrize("closed", ["config.toml", "more/registry.toml"])
@pytest.mark.parametrize("program", [(1, 6), (2, 1)])
def test_a_drop_in_is_private_if_a_config_file_is_private(
    tmp_path: Path, closed: str, program: tuple[int, int]
) -> None:
    """Before containerd 2.1, the drop-in contains a copy of all CRI settings."""
    config, more = tmp_path / "config.toml", tmp_path / "more" / "registry.toml"
    more.parent.mkdir()
    config.write_text(COMMENTED.replace("/etc/containerd", str(tmp_path)))
    auth = 'plugins."io.containerd.grpc.v1.cri".registry.configs.a.auth.password = "secret"\n'
    more.write_text("version = 2\n" + auth)
    (tmp_path / closed).chmod(0o600)
    store = Store(str(tmp_path / "state"))
    for _ in range(2):
        with store.locked():
            installer.install(store, [*answer(ask_for(config), program).targets])
        drop_in = tmp_path / "conf.d/99-gpuhook.toml"
        assert ("secret" in drop_in.read_text()) == (program < (2, 1))
        assert drop_in.stat().st_mode & 0o777 == 0o600
        drop_in.chmod(0o644)  # the mode that earlier versions left


def cri(version: int, **settings: Any) -> str:
    return render({"version": version, "plugins": {PLUGINS[version]: settings}}, "")


@pytest.mark.parametrize("nested", [False, True])
def test_a_later_file_that_overrides_the_drop_in_gives_a_warning(
    tmp_path: Path, config: Path, nested: bool
) -> None:
    """NVIDIA's toolkit writes conf.d/99-nvidia.toml, and nested imports are read last."""
    later = tmp_path / ("more.toml" if nested else "conf.d/99-nvidia.toml")
    later.parent.mkdir(exist_ok=True)
    config.write_text('version = 2\nimports = ["conf.d/*.toml"]\n')
    if nested:
        (tmp_path / "conf.d").mkdir()
        (tmp_path / "conf.d/10.toml").write_text(f'version = 2\nimports = ["{later}"]\n')
    later.write_text(cri(2, containerd={"default_runtime_name": "nvidia"}))
    [warning] = answer(ask_for(config), (1, 7)).warnings
    assert warning.startswith(f"{later} is read after {tmp_path}/conf.d/99-gpuhook.toml")
    better = f"{tmp_path}/conf.d/zz-gpuhook.toml"
    assert warning.endswith(f"--drop-in-config {better}") is not nested
    assert not answer(ask_for(config, drop_in=better), (1, 7)).warnings or nested
    assert not answer(ask_for(config), (2, 1)).warnings
    [warning] = answer(ask_for(config, set_default=True), (2, 1)).warnings
    assert warning.startswith(f"{later} is read after this and makes 'nvidia' the default")
    later.write_text(cri(2, containerd={"default_runtime_name": "gpu-py"}))
    assert not answer(ask_for(config, set_default=True), (2, 1)).warnings


def test_settings_of_files_that_are_imported_by_others_are_copied(
    tmp_path: Path, config: Path
) -> None:
    """containerd reads the main file once, and first, even if a pattern matches it."""
    config.write_text('imports = ["*.toml"]\n' + cri(2, sandbox_image="first"))
    (tmp_path / "one.toml").write_text('version = 2\nimports = ["more/two.toml"]\n')
    (tmp_path / "more").mkdir()
    (tmp_path / "more/two.toml").write_text(cri(2, sandbox_image="last"))
    drop_in = answer(ask_for(config), (1, 7)).targets[0]
    assert get(tomllib.loads(drop_in.text), ("plugins", PLUGINS[2]))["sandbox_image"] == "last"


def test_newly_imported_files_are_named_in_a_warning(tmp_path: Path, config: Path) -> None:
    config.write_text("version = 2\n")
    other = tmp_path / "conf.d/50.toml"
    other.parent.mkdir()
    other.write_text("version = 2\n")
    first = answer(ask_for(config), (2, 1))
    assert [f"now also imports {other}" in each for each in first.warnings] == [True]
    store = Store(str(tmp_path / "state"))
    with store.locked():
        installer.install(store, list(first.targets))
    assert not answer(ask_for(config), (2, 1)).warnings


@pytest.mark.parametrize("shim", ["io.containerd.kata.v2", "io.containerd.runsc.v1"])
@pytest.mark.parametrize("program", [None, (1, 6), (2, 1)])
def test_options_of_a_default_runtime_without_binary_are_not_copied(
    config: Path, program: tuple[int, int] | None, shim: str
) -> None:
    runc = {"runtime_type": "io.containerd.runc.v2", "options": {"SystemdCgroup": True}}
    other = {"runtime_type": shim, "snapshotter": "x", "options": {"ConfigPath": "/x"}}
    settings = {"default_runtime_name": "other", "runtimes": {"other": other, "runc": runc}}
    config.write_text(cri(2, containerd=settings))
    drop_in = answer(ask_for(config), program).targets[0]
    runtimes = get(tomllib.loads(drop_in.text), ("plugins", PLUGINS[2], "containerd", "runtimes"))
    options = {"SystemdCgroup": True, "BinaryName": "/opt/gpu-py"}
    assert runtimes["gpu-py"] == {**runc, "options": options}
