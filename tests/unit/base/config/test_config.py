"""Reading of config.toml: accepted settings, their meaning, and the messages about mistakes."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.config.loader import default_user, examine, load, loads
from gpuhook.base.config.locate import line_of
from gpuhook.base.config.model import FEATURE_PREFIX, FEATURES, KEYS, MODES, Config
from gpuhook.base.config.source import MAX_BYTES, flatten
from gpuhook.base.errors import ConfigError

Case = dict[str, Any]

# gpuhook's defaults that differ from NVIDIA's; docs/engineering/differences.md says why.
OWN_DEFAULTS = {"nvidia-container-runtime.mode": "hook"}
# NVIDIA's keys that have no effect in gpuhook.
NOT_READ = {"nvidia-container-runtime-hook.path", "nvidia-ctk.path"}

NVIDIA_FILE = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
environment = []
ldconfig = "@/sbin/ldconfig.real"
load-kmods = true
#no-cgroups = false
path = "/usr/bin/nvidia-container-cli"
root = "/run/nvidia/driver"
user = "root:video"

[nvidia-container-runtime]
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"

[features]
ignore-imex-channel-requests = true
"""


def default_text() -> str:
    return (resources.files("gpuhook") / "tools/config/config.toml").read_text()


def uncommented(text: str) -> str:
    return re.sub(r"(?m)^#(?=[a-z])", "", text)


def settings(config: Config) -> dict[str, object]:
    found = {name: getattr(config, name) for name in Config.__annotations__}
    del found["path"]
    return found


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUHOOK_CONFIG", raising=False)


# --- the shared cases ---


@pytest.mark.vectors("config", "config.load")
def test_config_loading_matches_the_shared_cases(case: Case, tmp_path: Path) -> None:
    file, release = tmp_path / "config.toml", tmp_path / "os-release"
    file.write_text(case["input"]["toml"])
    release.write_text(f'NAME=x\nID_LIKE="{" ".join(case["input"].get("id_like", []))}"\n')
    config = load(str(file))
    for key, value in case["expected"].items():
        if key in NOT_READ:
            continue
        found = getattr(config, KEYS[key][0])
        if key == "nvidia-container-cli.user" and not loads(case["input"]["toml"]).user:
            found = default_user(str(release))
        expected = OWN_DEFAULTS.get(key, value)
        assert found == (tuple(expected) if isinstance(expected, list) else expected)


@pytest.mark.vectors("config", "config.valid")
def test_an_invalid_ldconfig_setting_is_an_error(case: Case) -> None:
    given = case["input"]
    text = f'nvidia-container-cli.ldconfig = "{given["ldconfig"]}"\n'
    if given["features.allow-ldconfig-from-container"]:
        text += "features.allow-ldconfig-from-container = true\n"
    _, errors = examine(text)
    assert (not errors) is case["expected"]["valid"]
    assert all("nvidia-container-cli.ldconfig" in str(error) for error in errors)


# --- defaults and the commented file ---


def test_an_empty_file_and_the_commented_file_give_the_defaults() -> None:
    for text in ("", default_text()):
        assert settings(loads(text)) == settings(Config())


def test_commented_file_has_every_key_with_its_default() -> None:
    config, errors = examine(uncommented(default_text()))
    assert errors == []
    assert config.ignored == ()
    assert config.features == dict.fromkeys(FEATURES, False)
    config.features, config.given = {}, ()
    assert settings(config) == settings(Config())
    live = flatten(tomllib.loads(uncommented(default_text())))
    assert set(live) == set(KEYS) | {FEATURE_PREFIX + name for name in FEATURES}


def test_the_packaged_config_is_a_link_to_the_commented_file() -> None:
    """The package contains a link to the file, which an editor could have replaced by a copy."""
    repository = Path(__file__).parents[4]
    packaged = repository / "src/gpuhook/tools/config/config.toml"
    assert packaged.samefile(repository / "config/config.toml")


def test_every_key_of_the_commented_file_is_explained() -> None:
    lines = default_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"#[a-z]", line):
            assert lines[number - 1].startswith("# "), line


def test_every_attribute_has_a_key() -> None:
    attributes = {attribute for attribute, _, _ in KEYS.values()}
    assert attributes | {"path", "features", "given", "ignored", "vendors"} == set(
        Config.__annotations__
    )


# --- Driver roots ---


@pytest.mark.parametrize(
    ("text", "roots"),
    [
        ("", ("/", "/")),
        ('nvidia-container-cli.root = "/n"', ("/n", "/n")),
        ('gpuhook.root = "/g"', ("/g", "/g")),
        ('nvidia-container-cli.root = "/n"\ngpuhook.root = "/g"', ("/g", "/g")),
        ('gpuhook.root = "/"\ngpuhook.driver-roots = ["nvidia=/n"]', ("/n", "/")),
        ('nvidia-container-cli.root = "/n"\ngpuhook.driver-roots = ["acme=/a=b"]', ("/n", "/a=b")),
    ],
)
def test_the_most_specific_driver_root_setting_counts(text: str, roots: tuple[str, str]) -> None:
    config = loads(text)
    assert (config.driver_root_of("nvidia"), config.driver_root_of("acme")) == roots


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[gpuhook]\nroot = "srv"', "line 2: gpuhook.root must be an absolute path"),
        ('[gpuhook]\ndriver-roots = ["acme"]', "gpuhook.driver-roots contains 'acme'"),
        ('[gpuhook]\nmissing-driver = "warn"', "gpuhook.missing-driver must be fail or ignore"),
    ],
)
def test_invalid_driver_settings_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text)
    assert words in caught.value.cause


# --- NVIDIA's file ---


def test_a_config_file_of_nvidias_toolkit_is_read_unchanged() -> None:
    config = loads(NVIDIA_FILE)
    assert config.driver_root == "/run/nvidia/driver"
    assert config.ldconfig == "@/sbin/ldconfig.real"
    assert config.user == "root:video"
    assert config.mode == "auto"
    assert config.feature("ignore-imex-channel-requests")
    assert not config.feature("allow-ldconfig-from-container")
    assert {key for key, _ in config.ignored} == {
        "nvidia-container-cli.path",
        "nvidia-container-runtime-hook.path",
        "nvidia-container-runtime-hook.skip-mode-detection",
        "nvidia-ctk.path",
    }


@pytest.mark.parametrize(("word", "mode"), MODES.items())
def test_every_mode_name_is_accepted(word: str, mode: str) -> None:
    assert loads(f'[nvidia-container-runtime]\nmode = "{word}"').mode == mode


def test_unknown_keys_never_stop_a_container() -> None:
    text = """
        discover-mode = "x"
        "quoted.key" = 1
        numbers = [1, 2.5, 1979-05-27, { a = 1 }]
        [nvidia-container-cli]
        cuda-compat-mode = "x"
        [nvidia-container-runtime.modes.new]
        a.b = true
        [[array]]
        x = 1
        [empty]
        [features]
        unheard-of = "x"
        [gpuhook]
        typo = 1
    """
    assert {key for key, _ in loads(text).ignored} == {
        "discover-mode",
        '"quoted.key"',
        "numbers",
        "nvidia-container-cli.cuda-compat-mode",
        "nvidia-container-runtime.modes.new.a.b",
        "array",
        "features.unheard-of",
        "gpuhook.typo",
    }


def test_features_without_effect_are_reported_as_ignored() -> None:
    text = """
        [features]
        allow-cuda-compat-libs-from-container = true
        allow-unknown-oci-spec-fields = true
        disable-imex-channel-creation = true
    """
    ignored = dict(loads(text).ignored)
    assert len(ignored) == 3
    assert "gpuhook doesn't know this key" not in ignored.values()


def test_every_setting_with_an_effect_is_read_by_code() -> None:
    """Keys that no code reads must be listed as without effect."""
    read = set[str]()
    for path in (Path(__file__).parents[4] / "src/gpuhook").rglob("*.py"):
        if path.parent.name != "config" or path.name == "model.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
                elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "feature":
                    read |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    assert {attribute for attribute, _, _ in KEYS.values()} - read == set()
    # The reader of the configuration judges this key: no program of an image is run either way.
    assert set(FEATURES) - read == {"allow-ldconfig-from-container"}


def test_quoted_key_with_a_dot_is_not_the_dotted_key() -> None:
    config = loads('"nvidia-container-cli.root" = "/x"')
    assert config.driver_root == ""
    assert config.ignored[0][0] == '"nvidia-container-cli.root"'


def test_dotted_keys_and_inline_tables_are_equivalent() -> None:
    for text in (
        '[nvidia-container-cli]\nroot = "/r"',
        'nvidia-container-cli.root = "/r"',
        'nvidia-container-cli = { root = "/r" }',
        "nvidia-container-cli . 'root' = '''/r'''",
    ):
        assert loads(text).driver_root == "/r"


@pytest.mark.parametrize(
    ("key", "word", "attribute", "result"),
    [
        ("modes.legacy.cuda-compat-mode", "bogus", "cuda_compat_mode", "disabled"),
        ("log-level", "bogus", "log_level", "info"),
    ],
)
def test_invalid_values_that_nvidia_accepts_give_a_default_and_a_warning(
    key: str, word: str, attribute: str, result: str
) -> None:
    config = loads(f'nvidia-container-runtime.{key} = "{word}"')
    assert getattr(config, attribute) == result
    assert config.ignored[0][0] == f"nvidia-container-runtime.{key}"
    assert repr(word) in config.ignored[0][1]


# --- mistakes ---

WRONG = {
    "true or false": ("1", '"true"', "[]", "{ a = 1 }", "1979-05-27"),
    "a string": ("1", "true", "[]", '["a"]', "{ a = 1 }", "nan"),
    "a list of strings": ("1", '"a"', "[1]", '["a", 1]', "[[]]", "{ a = 1 }"),
    "a number of seconds above 0": ("0", "-1", '"1"', "true", "[1]", "nan", "inf", "1e9"),
    "a number of seconds, or 0": ("-1", '"1"', "true", "[1]", "nan", "inf", "1e9"),
    "a whole number": ("-1", '"1"', "true", "[1]", "nan", "inf", "1.5"),
}
WRONG_CASES = [
    (key, kind, value) for key, (_, kind, _) in KEYS.items() for value in WRONG[kind]
] + [(FEATURE_PREFIX + name, "true or false", "1") for name in FEATURES]


@pytest.mark.parametrize(("key", "kind", "value"), WRONG_CASES)
def test_wrong_type_names_key_line_and_type(key: str, kind: str, value: str) -> None:
    table, _, name = key.rpartition(".")
    header = f"[{table}]\n" if table else ""
    text = f"# a comment\n\n{header}# {name} = {value}\n{name} = {value}\n"
    line = text.count("\n")
    with pytest.raises(ConfigError) as caught:
        loads(text, "/etc/x.toml")
    assert f"/etc/x.toml, line {line}: {key} must be {kind}, not " in caught.value.cause
    assert caught.value.code == "config"


@pytest.mark.parametrize("table", ["nvidia-container-cli", "nvidia-container-runtime.modes.cdi"])
@pytest.mark.parametrize("table_value", ["1", '"x"', "[]", "[{}]"])
def test_a_value_in_place_of_a_table_is_refused(table: str, table_value: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2: {table} must be a table"):
        loads(f"\n{table} = {table_value}")


@pytest.mark.protects(
    "mps-clients", "MPS: the configured number of clients can't exceed the maximum of MPS"
)
@pytest.mark.protects(
    "mps-exclusive", "MPS: a device can't be configured as both exclusive and shared"
)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('nvidia-container-runtime.mode = ""', "must be one of hook, spec"),
        ('nvidia-container-runtime.mode = "HOOK"', "must be one of hook, spec"),
        ('nvidia-container-cli.root = "run/driver"', "must be an absolute path"),
        ('nvidia-container-cli.ldcache = "x"', "must be an absolute path"),
        ('gpuhook.state-dir = ""', "must be an absolute path"),
        ('gpuhook.library-search-paths = ["/a", "b"]', "must be an absolute path, not 'b'"),
        ('nvidia-container-runtime.modes.cdi.spec-dirs = [""]', "must be an absolute path"),
        ('nvidia-container-runtime.modes.cdi.default-kind = "gpu"', "must be a CDI kind"),
        ('nvidia-container-cli.root = "/a\\u0000b"', "NUL"),
        ('nvidia-container-cli.environment = ["a\\u0000b"]', "NUL"),
        ('nvidia-container-cli.ldconfig = "@ldconfig"', "must begin with @/"),
        ('supported-driver-capabilities = "compute,not-compute"', "names 'not-compute'"),
        ('gpuhook.mps.devices = "0,,1"', "names with commas between them"),
        ("gpuhook.mps.active-thread-percentage = 101", "from 1 to 100, or 0"),
        ('gpuhook.mps.device-memory = "101%"', "such as 8GiB or 50%"),
        ("gpuhook.mps.clients = 49", "from 1 to 48, the maximum of MPS, not 49"),
        ("gpuhook.mps.clients = 0", "from 1 to 48"),
        ('gpuhook.mps.version = "4"', "must be one of auto, 2, 3"),
        ('gpuhook = {exclusive = ["nvidia.com/gpu"], mps = {devices = "0"}}', "one container"),
    ],
)
def test_an_invalid_value_is_refused_with_line_and_reason(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(f"\n\n{text}\n")
    assert "line 3: " in caught.value.cause
    assert problem in caught.value.cause


def test_all_mistakes_are_found_at_once() -> None:
    config, errors = examine('disable-require = 1\nswarm-resource = 2\n[gpuhook]\nnvml-timeout="x"')
    assert len(errors) == 3
    assert config.nvml_timeout == 30.0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\na = ", 2),
        ("\n\na = [1,\n", 4),
        ("\na b = 1", 2),
        ("\n\n[x\n", 3),
        ("a = 1\na = 2", 2),
        ("[a]\n[a]\n", 2),
        ('a = "\x01"', 1),
        ("\ufeffa = 1", 1),
        ("a = 01", 1),
    ],
)
def test_an_invalid_toml_error_names_the_line(text: str, line: int) -> None:
    with pytest.raises(ConfigError, match="/x is not valid TOML") as caught:
        loads(text, "/x")
    assert re.search(rf"line {line}\b", caught.value.cause)


@pytest.mark.parametrize(
    "text",
    [
        "[nvidia-container-cli.root" + ".a" * 100_000 + "]",
        "a = " + "[" * 100_000,
        "a = " + "{x=" * 100_000,
        "a" + ".a" * 100_000 + " = 1",
        "[a" + ".a" * 100_000 + "]",
        "a = " + "9" * 100_000,
    ],
)
def test_extremely_nested_or_long_toml_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        loads(text)


def test_a_huge_number_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be true or false, not 'int'"):
        loads("disable-require = 0x" + "f" * 20_000)


def test_many_unknown_keys_take_linear_time() -> None:
    config = loads("".join(f"k{n} = {n}\n" for n in range(20_000)))
    assert len(config.ignored) == 20_000


# --- the file ---


def test_without_the_default_file_there_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty GPUHOOK_CONFIG counts as unset."""
    monkeypatch.setattr("gpuhook.base.config.loader.DEFAULT_PATH", "/nonexistent/config.toml")
    assert load().path is None
    monkeypatch.setenv("GPUHOOK_CONFIG", "")
    config = load()
    assert config.path is None
    config.user = ""
    assert settings(config) == settings(Config())


def test_the_file_named_by_the_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("disable-require = true")
    monkeypatch.setenv("GPUHOOK_CONFIG", str(file))
    assert load().disable_require
    assert load().path == str(file)
    other = tmp_path / "other.toml"
    other.write_text("")
    assert not load(str(other)).disable_require


@pytest.mark.parametrize("by_variable", [True, False])
def test_named_file_must_exist(by_variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_variable:
        monkeypatch.setenv("GPUHOOK_CONFIG", "/nonexistent.toml")
    with pytest.raises(ConfigError, match=r"'/nonexistent\.toml' does not exist"):
        load(None if by_variable else "/nonexistent.toml")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    fifo, big, latin, link = (tmp_path / name for name in ("fifo", "big", "latin", "link"))
    os.mkfifo(fifo)
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    latin.write_bytes(b"# \xff")
    link.symlink_to(link)
    for path, problem in (
        (fifo, "not a regular file"),
        (tmp_path, "not a regular file"),
        (big, "larger than"),
        (latin, "utf-8"),
        (link, "symbolic links"),
        (Path("/dev/zero"), "larger than"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load(str(path))


def test_the_largest_allowed_file_and_dev_null_are_accepted(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"#" * MAX_BYTES)
    assert load(str(big)).mode == "hook"
    assert load("/dev/null").mode == "hook"


HEAVY = (
    "argparse", "collections", "dataclasses", "enum", "functools", "json", "logging", "pathlib",
    "re", "shutil", "subprocess", "tempfile", "tomlkit", "tomllib", "typing",
)  # fmt: skip


@pytest.mark.parametrize("text", [None, uncommented(default_text()), NVIDIA_FILE])
def test_reading_a_plain_file_imports_nothing_heavy(text: str | None, tmp_path: Path) -> None:
    """The whole path from an OCI spec to a selection of devices imports no heavy module."""
    file = tmp_path / "config.toml"
    file.write_text(text or "")
    source = str(Path(loads.__code__.co_filename).parents[3])
    program = f"""
import sys
sys.path.insert(0, {source!r})
from gpuhook.base.config.loader import load
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia import names
from gpuhook.vendors.nvidia.vendor import VENDOR
from gpuhook.core.contract import Grant
from gpuhook.core.inventory.selection import select
from gpuhook.core.request.reader import SpecReader
env = ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_REQUIRE_CUDA=cuda>=12.2 brand=tesla,driver>=470"]
request = SpecReader({{"process": {{"env": env}}}}, load({str(file)!r})).read(names, VENDOR)
inventory = NvidiaInventory("/", "580.65.06", "13.0", (), (), ())
VENDOR.check(Grant(VENDOR, request, inventory, select(request.selectors, inventory, names)))
print(*sys.modules)
"""
    command = [sys.executable, "-I", "-S", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) & set(HEAVY) == set()


def test_documentation_has_every_mode() -> None:
    text = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
    for word in MODES:
        assert f"`{word}`" in text


# --- lines ---


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a = 1", "a", 1),
        ("b = 1\na=1", "a", 2),
        ("# a = 1\na = 1", "a", 2),
        ("[t]\na = 1\n[u]\na = 2", "u.a", 4),
        ("  [ t . 'u' ] # x\n\t\"a\" = 1", "t.u.a", 2),
        ("t.u.a = 1", "t.u.a", 1),
        ("[t]\nu.a = 1", "t.u.a", 2),
        ("\nt = { u = { a = 1 } }", "t.u.a", 2),
        ("[[t]]\na = 1", "t", 1),
        ("a = 1", "b", None),
        ("", "b", None),
    ],
)
def test_the_line_of_a_key_is_found(text: str, key: str, line: int | None) -> None:
    assert line_of(text, key) == line


# --- the host's ldconfig, and SUSE ---


def test_host_ldconfig_prefers_the_real_program(tmp_path: Path) -> None:
    plain, real = tmp_path / "ldconfig", tmp_path / "ldconfig.real"
    config = Config()
    for setting in (plain, real):
        config.ldconfig = f"@{setting}"
        assert config.host_ldconfig() == ""
    plain.touch(mode=0o755)
    for setting in (plain, real):
        config.ldconfig = f"@{setting}"
        assert config.host_ldconfig() == str(plain)
    real.touch(mode=0o755)
    for setting in (plain, real):
        config.ldconfig = f"@{setting}"
        assert config.host_ldconfig() == str(real)


def test_ldconfig_of_an_image_is_never_run() -> None:
    config = Config()
    config.ldconfig = "/bin/sh"
    assert config.host_ldconfig() == ""


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ('ID_LIKE="suse opensuse"', "root:video"),
        ("ID_LIKE=suse", "root:video"),
        ("ID=x\nID_LIKE='opensuse'\n", "root:video"),
        ("ID=suse", ""),
        ('ID_LIKE="rhel suseful"', ""),
        ("", ""),
    ],
)
def test_the_default_user_depends_on_the_distribution(text: str, user: str, tmp_path: Path) -> None:
    file = tmp_path / "os-release"
    file.write_text(text)
    assert default_user(str(file)) == user
    assert default_user(str(tmp_path / "missing")) == ""
