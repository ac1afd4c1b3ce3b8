"""Edits that the launcher repeats: what it writes is what Python would have written."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launchers import Installed

from gpuhook import cgroup, edit_check, edit_records, edit_script, launcher_files
from gpuhook.config import Config, load, loads
from gpuhook.errors import EditError
from gpuhook.oci import Spec
from gpuhook.runtime_shim import HELPER_OPTION, add_hook, make_way

DENY = {"allow": False, "access": "rwm"}
DOCKERS = [DENY, {"allow": True, "type": "c", "major": 1, "minor": 5, "access": "rwm"}]
NETWORK_HOOK = {"path": "/proc/7/exe", "args": ["libnetwork-setkey", "-exec-root=/r", "id", "id2"]}
ALL = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")


def spec(
    env: tuple[str, ...] = ALL,
    rules: Any = DOCKERS,
    hooks: Any = None,
    namespaces: Any = ({"type": "pid"}, {"type": "mount"}),
    args: tuple[str, ...] = ("true",),
    **more: Any,
) -> dict[str, Any]:
    """Return a config.json as an engine writes it."""
    made: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {"args": args, "env": ["PATH=/bin", *env], "cwd": "/"},
        "root": {"path": "rootfs"},
        **more,
    }
    if hooks is not None:
        made["hooks"] = hooks
    made["linux"] = {"resources": {"devices": rules}, "namespaces": namespaces}
    return made


def compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


class Machine:
    """An installed launcher on a simulated machine, and Python's part of what happens there."""

    def __init__(self, installed: Installed) -> None:
        self.installed = installed
        self.root = installed.folder / "driver"
        self.gpus = self.root / "proc/driver/nvidia/gpus"
        for bus in ("0000:01:00.0", "0000:02:00.0"):
            (self.gpus / bus).mkdir(parents=True)
        (self.root / "dev/dri").mkdir(parents=True)
        past = time.time() - 10
        for name in ("dev", "dev/dri"):
            os.utime(self.root / name, (past, past))
        installed.configure(f'[nvidia-container-cli]\nroot = "{self.root}"\n')
        self.config = load(str(installed.config))
        self.rules = [(195, 255), (195, 0), (195, 1)]

    def edit(self, text: str, *, helped: bool, options: tuple[str, ...] = ()) -> Spec:
        """Edit a config.json as the runtime does for a container that gets both GPUs."""
        rules: list[dict[str, Any]] = [
            {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"}
            for major, minor in self.rules
        ]
        path = str(self.installed.bundle / "config.json")
        edited = Spec(path, text)
        if rules:
            edited = edited.append(("linux", "resources", "devices"), rules)
        words = [HELPER_OPTION, "77", "3", "4", "5", "/b"] if helped else []
        return add_hook(edited, self.config, str(self.installed.bin), [*words, *options])

    def create(self, text: str) -> tuple[str, str]:
        """Have the launcher create a container: what was run, and config.json then."""
        ran = self.installed.create(text)
        return ran, (self.installed.bundle / "config.json").read_text()

    def learn(self, text: str, *, helped: bool = False) -> None:
        """Be the Python that the launcher starts: for one, or two, containers."""
        for _ in range(2):
            self.installed.create(text)
            line = self.installed.log.read_text().split()
            if line[0] != "python":
                return
            before = Spec(str(self.installed.bundle / "config.json"), text)
            path = line[1].partition(":")[2]
            began = time.time_ns()
            after = self.edit(text, helped=helped)
            edit_records.learn(path, before, after, self.config, began)

    def expected(self, text: str, *, helped: bool = False) -> str:
        """Return what Python writes, with the devices that the launcher names in it."""
        options = edit_check.option(self.rules) if self.rules else []
        made = self.edit(text, helped=helped, options=tuple(options)).text
        if not helped:
            return made
        pid = (self.installed.folder / "log.helper").read_text().split()[0]
        return made.replace('"77","3","4","5","/b"', f'"{pid}","9","8","7","/b"')


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    installed = Installed(tmp_path)
    monkeypatch.setattr(launcher_files, "FOLDER", str(installed.left))
    return Machine(installed)


@pytest.mark.parametrize(
    "hooks",
    [
        None,
        {},
        {"poststop": [{"path": "/bin/true"}]},
        {"prestart": [NETWORK_HOOK]},
        {"prestart": [NETWORK_HOOK, {"path": "/x", "env": ["A=b"], "timeout": 5}]},
    ],
    ids=["none", "empty", "another stage", "Docker's", "two"],
)
def test_edit_is_repeated(machine: Machine, hooks: Any) -> None:
    machine.learn(compact(spec(hooks=hooks)))
    another = compact(spec(hooks=hooks, hostname="another"))
    assert machine.create(another) == ("runc", machine.expected(another))


def test_edit_is_repeated_without_a_configuration(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after pip alone: the defaults hold, of which the driver's root is /."""
    installed = machine.installed
    script = (installed.bin / "gpu-py").read_text()
    nowhere = str(installed.folder / "none/config.toml")
    installed.program(installed.bin / "gpu-py", script.replace("/etc/gpuhook/config.toml", nowhere))
    monkeypatch.setenv("GPUHOOK_CONFIG", "")
    run = installed.run
    monkeypatch.setattr(installed, "run", lambda *argv: run(*argv, env={"GPUHOOK_CONFIG": ""}))
    machine.config = Config()
    assert installed.create(compact(spec())) == "python"
    assert installed.log.read_text() == "python runtime-anew\n"
    launcher_files.leave(machine.config, launcher_files.now())
    machine.learn(compact(spec()))
    assert machine.create(compact(spec())) == ("runc", machine.expected(compact(spec())))
    assert list((installed.left / "defaults").rglob("plain"))


def test_helper_is_started(machine: Machine) -> None:
    text = compact(spec())
    machine.learn(text, helped=True)
    ran, written = machine.create(text)
    assert ran == "runc"
    args = json.loads(written)["hooks"]["prestart"][0]["args"]
    assert args[:2] == ["gpuhook-prestart", "--helper"]
    assert args[3:7] == ["9", "8", "7", str(machine.installed.bundle)]
    assert args[7:9] == ["--allowed", "195:255,195:0,195:1"]
    helper = machine.installed.folder / "log.helper"
    for _ in range(500):
        if helper.exists() and helper.read_text().endswith("\n"):
            break
        time.sleep(0.01)
    parent, bundle = helper.read_text().split()
    assert (int(parent) > 0, bundle) == (True, str(machine.installed.bundle))
    assert args[2] != parent


HELPER = """\
#!/bin/sh
shift 5
[ "$1" = helper ] || exit 1
while [ -z "$hook" ]; do read -r hook <&9; done
printf 'taken\\nIt was %s that asked.\\n' "$hook" >&8
"""


@pytest.mark.parametrize("shell", [("dash",), ("bash", "--posix"), ("bash",)])
def test_hook_finds_the_helper_of_any_shell(machine: Machine, shell: tuple[str, ...]) -> None:
    """A helper that hasn't come to Python's first line yet is waited for, too."""
    installed = machine.installed
    machine.learn(compact(spec()), helped=True)
    installed.program(installed.bin / "python3", HELPER)
    (installed.bundle / "config.json").write_text(compact(spec()))
    environ = {"PATH": f"{installed.path}:/usr/bin:/bin", "GPUHOOK_CONFIG": str(installed.config)}
    launcher = installed.bin / "gpu-py"
    create = (launcher, "create", "--bundle", installed.bundle, "ID")
    subprocess.run([*shell, *create], env=environ, check=True)
    words = json.loads((installed.bundle / "config.json").read_text())["hooks"]["prestart"][0]
    hook = installed.bin / "gpuhook-prestart"
    installed.program(hook, launcher.read_text())
    process = subprocess.Popen(
        [*shell, hook, *words["args"][1:]],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, told = process.communicate()
    assert told == f"gpuhook-prestart: It was {process.pid} that asked.\n"


def test_helper_makes_the_pipes_that_a_shell_could_not() -> None:
    script = (
        "import os; from gpuhook import helper\n"
        "os.dup2(os.open('/dev/null', os.O_RDONLY), 9)\n"
        "helper._make_missing_pipes()\n"
        "for number in (8, 9): os.write(number, b'x'); assert os.read(number, 5) == b'x'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "other",
    [
        spec(env=("NVIDIA_VISIBLE_DEVICES=0", ALL[1])),
        spec(env=(*ALL, "NVIDIA_GDS=enabled")),
        spec(env=(*ALL, "CUDA_VERSION=12.2")),
        spec(env=(*ALL, "NVIDIA_REQUIRE_CUDA=cuda>=12.2")),
        spec(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=0"}),
        spec(rules=[DENY]),
        spec(rules=[*DOCKERS, {"allow": True, "access": "rwm"}]),
        spec(hooks={}),
        spec(hooks={"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]}),
        spec(hooks={"prestart": [{"path": "/usr/bin/gpuhook-prestart"}]}),
        spec(hostname="@helper@"),
        spec(env=(ALL[1],), args=("env", ALL[0])),
        spec(env=(ALL[1],), hostname=ALL[0]),
        spec(env=(ALL[1], f'NOTE=say "{ALL[0]}')),
        spec(env=(f'NOTE="{ALL[0]}"', ALL[1])),
        spec(env=(*ALL, "TORCH_CUDA_VERSION=1")),
        spec(rules=[]),
        spec(namespaces=[{"type": "pid"}]),
        spec(namespaces=[{"type": "mount", "path": "/proc/1/ns/mnt"}]),
        spec(namespaces=[{"path": "/proc/1/ns/mnt", "type": "mount"}]),
    ],
    ids=[
        "another GPU", "a feature", "an old image", "a requirement", "an annotation",
        "other rules", "more rules", "hooks", "NVIDIA's hook", "our hook", "our mark",
        "its arguments", "its name", "a note", "a quotation", "half a word", "no rules",
        "no namespace", "another's namespace", "another's namespace, named first",
    ],
)  # fmt: skip
def test_other_containers_are_pythons(machine: Machine, other: dict[str, Any]) -> None:
    machine.learn(compact(spec()))
    assert machine.create(compact(spec()))[0] == "runc"
    text = compact(other)
    assert machine.create(text) == ("python", text)


def test_odd_neighbours_do_no_harm(machine: Machine) -> None:
    machine.learn(compact(spec()))
    text = compact(spec(env=('A="\\', "B=\u003e", "C=é[],{}", *ALL)))
    assert machine.create(text) == ("runc", machine.expected(text))


def test_rules_that_allow_all_teach_nothing_about_others(machine: Machine) -> None:
    every = [{"allow": True, "access": "rwm"}]
    machine.rules = []
    machine.learn(compact(spec(rules=every)))
    assert machine.create(compact(spec(rules=every)))[0] == "runc"
    assert machine.create(compact(spec()))[0] == "python"


@pytest.mark.parametrize(
    "env",
    [
        ("NVIDIA_VISIBLE_DEVICES=" + "9" * 201,),
        ("NVIDIA_VISIBLE_DEVICES=" + "1," * 1200,),
        (ALL[0], "NVIDIA_GDS=" + "x" * 100_000),
        (ALL[0], "CUDA_VERSION=9.0"),
        ("CUDA_VERSION=9.0", "NVIDIA_REQUIRE_CUDA="),
    ],
    ids=["long", "much", "huge", "an old image", "an old image without devices"],
)
def test_nothing_is_learned_of_what_is_long_or_old(machine: Machine, env: tuple[str, ...]) -> None:
    [settings_file] = machine.installed.left.rglob("settings")
    before = settings_file.read_text()
    machine.learn(compact(spec(env=env)))
    assert machine.create(compact(spec(env=env)))[0] == "python"
    assert settings_file.read_text() == before


def test_old_image_that_says_what_it_wants_is_like_any_other(machine: Machine) -> None:
    text = compact(spec(env=("CUDA_VERSION=9.0", *ALL)))
    machine.learn(text)
    assert machine.create(text) == ("runc", machine.expected(text))


def test_a_config_json_is_tried_in_secret(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    run = edit_script._run

    def looked(command: str, *words: str) -> bytes:
        modes.extend(os.stat(word).st_mode & 0o777 for word in words if word.endswith(".try"))
        said = run(command, *words)
        modes.extend(os.stat(word).st_mode & 0o777 for word in words if word.endswith(".try"))
        return said

    monkeypatch.setattr(edit_script, "_run", looked)
    old = os.umask(0)
    try:
        machine.learn(compact(spec()))
    finally:
        os.umask(old)
    assert modes == [0o600, 0o600]
    assert not list(machine.installed.left.rglob(".try"))


def test_learning_never_fails_a_container(machine: Machine) -> None:
    """Neither an engine's hook without arguments, nor a file that isn't as we left it."""
    foreign = compact(spec(hooks={"prestart": [{"path": "/x"}]}))
    path = str(machine.installed.bundle / "config.json")
    edit_records.learn("", Spec(path, foreign), Spec(path, foreign), machine.config, 0)
    [settings_file] = machine.installed.left.rglob("settings")
    settings_file.write_bytes(b"\xff\n")
    machine.learn(compact(spec()))
    assert machine.create(compact(spec()))[0] == "python"


def test_launcher_is_followed_where_links_lead_to_it(machine: Machine) -> None:
    installed = machine.installed
    real = installed.bin / "gpu-py"
    elsewhere = installed.folder / "elsewhere"
    elsewhere.mkdir()
    moved = installed.bin / "gpu-py-1"
    real.rename(moved)
    real.symlink_to(moved)
    machine.learn(compact(spec()))
    assert machine.create(compact(spec()))[0] == "runc"
    other = installed.folder / "venv2"
    shutil.copytree(installed.bin.parent, other, symlinks=True)
    real.unlink()
    real.symlink_to(other / "bin/gpu-py-1")
    assert machine.create(compact(spec()))[0] == "python"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("accept-nvidia-visible-devices-envvar-when-unprivileged = false\n", ""),
        ("", "[gpuhook]\nrepeat-edits = false\n"),
    ],
    ids=["privileges decide", "switched off"],
)
def test_nothing_is_learned_where_it_must_not_be(machine: Machine, before: str, after: str) -> None:
    text = machine.installed.config.read_text()
    machine.installed.configure(before + text + after)
    machine.config = load(str(machine.installed.config))
    machine.learn(compact(spec()))
    assert machine.create(compact(spec()))[0] == "python"
    assert not list(machine.installed.left.rglob("plain"))


def in_cgroup(path: str) -> str:
    made = spec()
    made["linux"]["cgroupsPath"] = path
    return compact(made)


def test_links_that_systemd_needs_are_made_first(machine: Machine) -> None:
    machine.learn(in_cgroup("/docker/1"))
    assert machine.create(in_cgroup("/docker/2"))[0] == "runc"
    systemds = in_cgroup("system.slice:docker:1")
    assert machine.create(systemds) == ("python", systemds)
    machine.learn(systemds)
    for path in ("system.slice:docker:2", "/docker/2"):
        assert machine.create(in_cgroup(path))[0] == "runc"


def test_text_of_several_lines_is_pythons(machine: Machine) -> None:
    machine.learn(compact(spec()))
    text = json.dumps(spec(), indent=1)
    assert machine.create(text) == ("python", text)


@pytest.mark.parametrize("grep", ["grep", "busybox grep"])
def test_settings_alone_ask_for_nothing(machine: Machine, grep: str) -> None:
    """Not even where grep tells the first match alone, and there is another one behind it."""
    installed = machine.installed
    script = (installed.bin / "gpu-py").read_text()
    assert script.count("run_plainly grep") == 2
    changed = script.replace("run_plainly grep", f"run_plainly {grep}")
    installed.program(installed.bin / "gpu-py", changed)
    alone = compact(spec(env=("NVIDIA_DRIVER_CAPABILITIES=all", "NVIDIA_REQUIRE_CUDA=cuda>=12")))
    machine.learn(compact(spec()))
    assert machine.create(alone) == ("runc", alone)
    asked = compact(spec(env=("NVIDIA_REQUIRE_CUDA=cuda>=12", "CUDA_VERSION=1")))
    assert machine.create(asked) == ("python", asked)


def test_nothing_is_learned_of_text_that_is_not_plain(machine: Machine) -> None:
    for value in ("../..", "a/b", "a b", "é", "GPU-1&2"):
        text = compact(spec(env=(f"NVIDIA_VISIBLE_DEVICES={value}",)))
        machine.learn(text)
        assert machine.create(text) == ("python", text)
    assert not list(machine.installed.left.rglob("plain"))


def test_what_can_not_be_repeated_is_not_tried_again_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules stand in another place, too: sed would take the first one."""
    text = compact(spec(annotations={"devices": DOCKERS}))
    tries: list[str] = []
    makes = edit_script.makes

    def counted(script: str, folder: str, before: str, after: str) -> bool:
        tries.append(script)
        return makes(script, folder, before, after)

    monkeypatch.setattr(edit_script, "makes", counted)
    for _ in range(3):
        machine.learn(text)
        assert machine.create(text) == ("python", text)
    assert len(tries) == 1
    for record in machine.installed.left.rglob("plain"):
        os.utime(record, (time.time() - 61,) * 2)
    machine.learn(text)
    assert len(tries) == 2


def test_one_process_learns_at_a_time(machine: Machine) -> None:
    [settings_file] = machine.installed.left.rglob("settings")
    with (settings_file.parent / ".learning").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        machine.learn(compact(spec()))
        assert machine.create(compact(spec()))[0] == "python"
    machine.learn(compact(spec()))
    assert machine.create(compact(spec()))[0] == "runc"


def test_no_command_of_seds_gets_into_a_record(machine: Machine, tmp_path: Path) -> None:
    written = tmp_path / "written"
    rules = [{"allow": False, "access": "|x|e;#"}]  # sed: run the text as a command
    text = compact(spec(rules=rules, hostname=f"$(touch {written})"))
    machine.learn(text)
    assert machine.create(text) == ("python", text)
    assert not written.exists()


def test_new_configuration_is_noticed(machine: Machine) -> None:
    machine.learn(compact(spec()))
    assert machine.create(compact(spec()))[0] == "runc"
    machine.installed.configure("# another\n" + machine.installed.config.read_text())
    os.utime(machine.installed.config)
    assert machine.create(compact(spec()))[0] == "python"


def test_new_launcher_is_noticed(machine: Machine) -> None:
    machine.learn(compact(spec()))
    assert machine.create(compact(spec()))[0] == "runc"
    os.utime(machine.installed.bin / "gpu-py")
    assert machine.create(compact(spec()))[0] == "python"


@pytest.mark.parametrize("change", ["gpu goes", "gpu comes", "node", "mig", "dri"])
def test_changed_machine_is_noticed(machine: Machine, change: str) -> None:
    machine.learn(compact(spec()))
    assert machine.create(compact(spec()))[0] == "runc"
    if change == "gpu goes":
        (machine.gpus / "0000:02:00.0").rmdir()
    elif change == "gpu comes":
        (machine.gpus / "0000:03:00.0").mkdir()
    elif change == "node":
        (machine.root / "dev/nvidia7").touch()
    elif change == "dri":
        (machine.root / "dev/dri/renderD128").touch()
    else:
        (machine.gpus.parent / "capabilities/gpu0/mig/gi1/ci0").mkdir(parents=True)
    assert machine.create(compact(spec()))[0] == "python"


def test_records_are_limited(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_records, "_LIMIT", 3)
    for number in range(7):
        machine.learn(compact(spec(env=(f"NVIDIA_VISIBLE_DEVICES={number}",))))
        assert len(list(machine.installed.left.rglob("plain"))) <= 3
    [settings] = machine.installed.left.rglob("settings")
    assert len(settings.read_text().split()) <= len(launcher_files.SETTINGS) + 3
    last = compact(spec(env=("NVIDIA_VISIBLE_DEVICES=6",)))
    assert machine.create(last) == ("runc", machine.expected(last))


names = st.sampled_from((
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", "CUDA_VERSION",
    "NVIDIA_IMEX_CHANNELS", "NVIDIA_MIG_CONFIG_DEVICES", "X",
))  # fmt: skip
values = st.sampled_from((
    "all", "0", "0,1", "none", "compute,utility", "GPU-12-34,GPU-56-78", 'a"b', "/", "é", "..",
    "NVIDIA_VISIBLE_DEVICES=all", '"NVIDIA_VISIBLE_DEVICES=all"', "*", "a b", "@helper@", "\\",
    '}],"hooks":{}', "[{", "|", "&", "\n",
))  # fmt: skip
envs = st.lists(st.builds("{}={}".format, names, values), max_size=3).map(tuple)
strings = st.sampled_from(("a", "", "]", "}", '"', "é", "&", "|", "\\1", "@helper@", '"hooks":{}'))
hook_objects = st.fixed_dictionaries(
    {"path": strings}, optional={"args": st.lists(strings, max_size=2), "timeout": st.just(3)}
)
hook_tables = st.none() | st.dictionaries(
    st.sampled_from(("prestart", "poststop", "createRuntime")),
    st.lists(hook_objects, max_size=2),
    max_size=2,
)
rule_lists = st.sampled_from((DOCKERS, [DENY], [], [*DOCKERS, DENY], None))
specs = st.builds(spec, envs, rule_lists, hook_tables, hostname=strings)
writers = st.sampled_from((compact, json.dumps, lambda data: json.dumps(data, indent=1)))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(specs, writers, specs, writers)
def test_launcher_writes_what_python_would_or_nothing(
    machine: Machine, first: dict[str, Any], write: Any, second: dict[str, Any], again: Any
) -> None:
    machine.learn(write(first))
    for text in (write(first), again({**first, "hostname": "x"}), again(second)):
        ran, written = machine.create(text)
        if ran == "python" or written == text:
            assert written == text
        else:
            assert written == machine.expected(text)


# What others make of it -----------------------------------------------------------------


def repeated(devices: str) -> Spec:
    hook = {"path": "/x/gpuhook-prestart", "args": ["gpuhook-prestart", "--allowed", devices, "p"]}
    return Spec("/b/config.json", compact(spec(hooks={"prestart": [NETWORK_HOOK, hook]})))


def test_hook_accepts_what_it_gives_itself() -> None:
    edit_check.check(repeated("195:0,195:255"), [(195, 255), (195, 0), (195, 1)], Config())
    edit_check.check(Spec("/b/config.json", compact(spec())), [], Config())


def test_hook_refuses_what_it_would_not_give(machine: Machine) -> None:
    machine.learn(compact(spec()))
    assert list(machine.installed.left.rglob("plain"))
    with pytest.raises(EditError, match=r"allows the devices 195:1, .*Start the container again"):
        edit_check.check(repeated("195:0,195:1"), [(195, 0)], machine.config)
    assert not list(machine.installed.left.rglob("plain"))


@pytest.mark.parametrize("helped", [True, False])
def test_repeated_edit_is_taken_back_where_a_bundle_starts_again(helped: bool) -> None:
    """The rules of the refused start must not outlive the hook that would check them."""
    theirs = {"allow": True, "type": "c", "major": 195, "minor": 9, "access": "rwm"}
    words = ["--helper", "1", "9", "8", "7", "/b"] if helped else []
    args = ["gpuhook-prestart", *words, "--allowed", "195:0,195:1", "prestart"]
    hook = {"path": "/x/gpuhook-prestart", "args": args}
    rules = [*DOCKERS, theirs, *cgroup.device_rules([(195, 0), (195, 1)])]
    before = Spec("/b/config.json", compact(spec(rules=rules, hooks={"prestart": [hook]})))
    after = make_way(before)
    assert after.device_rules == [*DOCKERS, theirs]
    assert after.hooks("prestart") == []


def test_edits_are_kept_where_the_configuration_lies() -> None:
    assert launcher_files.folder_of(Config()) == "/run/gpuhook/launcher/defaults"
    assert launcher_files.folder_of(loads("", "/etc/x.toml")) == "/run/gpuhook/launcher/etc/x.toml"
    assert launcher_files.folder_of(loads("", "/etc/../x.toml")) is None
