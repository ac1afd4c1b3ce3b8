"""`gpuhook config`: one setting changes, and the rest of the file is unchanged."""

import codecs
import os
import stat
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuhook.base.config.loader import load, loads
from gpuhook.base.config.model import FEATURE_PREFIX, FEATURES, KEYS, Config
from gpuhook.base.config.source import BOOL, LIST, NUMBER, PAUSE, SECONDS, STRING, flatten
from gpuhook.base.errors import ConfigError, GpuhookError
from gpuhook.base.host import files as host_files
from gpuhook.tools.cli import cli
from gpuhook.tools.config.edit import parse_assignment, set_value

Case = dict[str, Any]
DEFAULT = (resources.files("gpuhook") / "tools/config/config.toml").read_text()
LIVE = """\
# head

swarm-resource = "A"   # behind

[nvidia-container-runtime] # the runtime
  # inside
  runtimes = [
    "runc", # first
    "crun",
  ]
mode = 'auto'

[nvidia-container-runtime.modes.cdi]
# nothing here

[features] # off
"""
ALL_KEYS = [*KEYS, *(FEATURE_PREFIX + name for name in FEATURES)]
SPECIAL = {
    "nvidia-container-cli.ldconfig": "@/x/ldconfig",
    "nvidia-container-runtime.mode": "spec",
    "nvidia-container-runtime.modes.cdi.default-kind": "a.b/c",
    "supported-driver-capabilities": "compute",
    "gpuhook.driver-roots": ["acme=/x"],
    "gpuhook.cdi-kinds-from-environment": ["vendor.example/nic", "k8s.gpu.vendor.example/claim"],
    "gpuhook.exclusive": ["acme.example/npu"],
    "gpuhook.missing-driver": "ignore",
    "gpuhook.limits.device-memory": "50%",
    "gpuhook.limits.most-device-memory": "8GiB",
    "gpuhook.containers.memlock": "8GiB",
    "gpuhook.containers.stack": "unlimited",
    "gpuhook.containers.shm-size": "50%",
    "gpuhook.mps.device-memory": "8GiB",
    "gpuhook.mps.version": "2",
}
OF_KIND: dict[str, Any] = {
    BOOL: True,
    STRING: "/a b\"'#\\é",
    LIST: ["/x", "/#"],
    SECONDS: 2.5,
    PAUSE: 0,
    NUMBER: 7,
}


def sample(key: str) -> Any:
    return SPECIAL.get(key, OF_KIND[KEYS[key][1] if key in KEYS else BOOL])


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUHOOK_CONFIG", raising=False)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["config", *arguments])
    if isinstance(result.exception, GpuhookError):
        raise result.exception
    return result


# --- one assignment ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.toml"


@pytest.mark.vectors("config", "config.set_flag")
def test_config_set_flags_match_the_shared_cases(case: Case) -> None:
    key, value = parse_assignment(case["input"]["set"], case["input"]["separator"])
    assert (key, value) == (case["expected"]["key"], case["expected"]["value"])


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("disable-require", True),
        ("disable-require=f", False),
        ("disable-require=TRUE", True),
        ("features.ignore-imex-channel-requests", True),
        ("features.ignore-imex-channel-requests=nil", None),
        ("swarm-resource=", ""),
        ("nvidia-container-runtime.runtimes=a:b,c", ["a", "b,c"]),
        ("nvidia-container-runtime.runtimes=a, b", ["a", "b"]),
        ("nvidia-container-runtime.runtimes=", []),
        ("gpuhook.nvml-timeout=1e1", 10.0),
    ],
)
def test_valid_assignments_are_parsed(assignment: str, value: object) -> None:
    assert parse_assignment(assignment)[1] == value


@pytest.mark.parametrize(
    "assignment",
    [
        "", "=x", "nope=1", "nvidia-container-cli=1", "nvidia-container-cli.nope=1",
        "nvidia-container-cli.path=/x", "features.nope=true", "swarm-resource",
        "nvidia-container-runtime.runtimes", "disable-require=yes", "disable-require=",
        "disable-require=nil", "gpuhook.nvml-timeout=soon",
    ],
)  # fmt: skip
def test_invalid_assignments_are_refused(assignment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_assignment(assignment)
    assert assignment.split("=", maxsplit=1)[0][:20] in caught.value.cause


# --- the text ---


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("mode", "Did you mean nvidia-container-runtime.mode?"),
        ("gpuhook.mode", "Did you mean nvidia-container-runtime.mode?"),
        ("root", "Did you mean nvidia-container-cli.root or gpuhook.root?"),
        ("nvidia-container-runtime.moed", "Did you mean nvidia-container-runtime.mode?"),
        ("log_level", "Did you mean nvidia-container-runtime.log-level?"),
        (
            "features.no-additional-gid",
            "Did you mean features.no-additional-gids-for-device-nodes?",
        ),
        ("swarm-resorce", "Did you mean swarm-resource?"),
        ("quux", "Take one from"),
        ("nvidia-ctk.path", "nvidia-ctk.path would have no effect: "),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(key: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_assignment(f"{key}=x")
    assert answer in str(caught.value)


@pytest.mark.parametrize("key", ALL_KEYS)
@pytest.mark.parametrize("text", ["", DEFAULT, LIVE], ids=["empty", "default", "live"])
def test_setting_each_key_leaves_other_keys_and_comments_unchanged(text: str, key: str) -> None:
    changed = set_value(text, key, sample(key))
    expected = {**flatten(tomllib.loads(text)), key: sample(key)}
    assert flatten(tomllib.loads(changed)) == expected
    comments = [line for line in text.splitlines() if line.lstrip().startswith("# ")]
    assert [line for line in changed.splitlines() if line in comments] == comments


@pytest.mark.parametrize("key", ALL_KEYS)
def test_a_commented_default_is_set_in_place(key: str) -> None:
    before, after = DEFAULT.splitlines(), set_value(DEFAULT, key, sample(key)).splitlines()
    name = key.rpartition(".")[2]
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    assert changed[0][0].startswith(f"#{name} = ")
    assert changed[0][1].startswith(f"{name} = ")


def test_a_comment_after_a_value_is_kept() -> None:
    assert 'swarm-resource = "B"   # behind\n' in set_value(LIVE, "swarm-resource", "B")


def test_a_new_key_is_written_below_its_header() -> None:
    changed = set_value(LIVE, "nvidia-container-runtime.modes.cdi.default-kind", "a.b/c")
    assert '[nvidia-container-runtime.modes.cdi]\ndefault-kind = "a.b/c"\n# nothing' in changed
    changed = set_value(LIVE, "features.ignore-imex-channel-requests", True)
    assert changed.endswith("[features] # off\nignore-imex-channel-requests = true\n")


@pytest.mark.parametrize("header", ["[gpuhook]", "[ gpuhook ] # ours"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_new_key_has_the_line_end_of_its_header(header: str, end: str) -> None:
    text = f"{header}{end}# kept{end}accept-annotations = true{end}"
    changed = set_value(text, "gpuhook.state-dir", "/a")
    assert changed == text.replace("# kept", f'state-dir = "/a"{end}# kept')


def test_a_commented_key_of_another_section_is_unchanged() -> None:
    text = '[nvidia-container-runtime]\n#debug = "x"\n[nvidia-container-cli]\n#debug = "y"\n'
    changed = set_value(text, "nvidia-container-cli.debug", "/z")
    assert changed == text.replace('#debug = "y"', 'debug = "/z"')


@pytest.mark.parametrize(
    "text",
    [
        'nvidia-container-cli.root = "/a"\n',
        'nvidia-container-cli = { root = "/a", user = "b" }\n',
        "[nvidia-container-cli]\nroot = '''/a'''\n[other]\nx = 1\n",
        '["nvidia-container-cli"]\r\n"root" = "/a"\r\n',
        'x = """\n[nvidia-container-cli]\n#root = "/a"\n"""\n',
        "[nvidia-container-cli.sub]\nx = 1\n",
        "[[array]]\nx = 1\n",
        "# no newline at the end",
    ],
)
def test_a_key_is_set_in_unusual_toml_layouts(text: str) -> None:
    changed = set_value(text, "nvidia-container-cli.root", "/new")
    expected = {**flatten(tomllib.loads(text)), "nvidia-container-cli.root": "/new"}
    assert flatten(tomllib.loads(changed)) == expected


def test_features_can_be_removed() -> None:
    key = "features.ignore-imex-channel-requests"
    text = set_value(LIVE, key, True)
    assert set_value(text, key, None) == LIVE
    assert set_value(LIVE, key, None) == LIVE


def test_invalid_text_or_values_are_refused_by_set() -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        set_value("a = ", "swarm-resource", "B")
    with pytest.raises(ConfigError, match="must be one of"):
        set_value("", "nvidia-container-runtime.mode", "B")
    with pytest.raises(ConfigError, match="by hand"):
        set_value("nvidia-container-cli = 1", "nvidia-container-cli.root", "/x")


@pytest.mark.vectors("config", "config.format")
def test_comments_are_unchanged_by_set(case: Case) -> None:
    """NVIDIA's writer removes the blanks around a #; gpuhook changes no comment."""
    text = case["input"]["text"].replace("some\n", "a = 1\n").replace("other", "b = 2") + "\n"
    assert set_value(text, "disable-require", True) == f"disable-require = true\n{text}"


# --- the commands ---


def test_set_creates_the_file_from_the_commented_default(tmp_path: Path) -> None:
    file = tmp_path / "new" / "config.toml"
    assert run("set", "--config", str(file), "disable-require").exit_code == 0
    assert file.read_text() == DEFAULT.replace("#disable-require = false", "disable-require = true")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_set_changes_all_given_keys_or_none(file: Path) -> None:
    file.write_text(LIVE)
    wanted = ["nvidia-container-runtime.mode=spec", "nvidia-container-runtime.runtimes=crun"]
    assert run("set", "--config", str(file), *wanted).exit_code == 0
    config = load(str(file))
    assert (config.mode, config.runtimes) == ("spec", ("crun",))
    before = file.read_bytes()
    with pytest.raises(ConfigError):
        run("set", "--config", str(file), "disable-require", "nope=1")
    assert file.read_bytes() == before


def test_set_keeps_a_byte_order_mark(file: Path) -> None:
    file.write_bytes(codecs.BOM_UTF8 + LIVE.encode())
    assert run("validate", str(file)).exit_code == 0
    assert run("set", "--config", str(file), "nvidia-container-runtime.mode=spec").exit_code == 0
    assert load(str(file)).mode == "spec"
    changed = file.read_bytes()
    assert changed.startswith(codecs.BOM_UTF8)
    assert changed.count(codecs.BOM_UTF8) == 1


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_a_utf16_byte_order_mark_is_an_error(file: Path, mark: bytes) -> None:
    file.write_bytes(mark + LIVE.encode("utf-16-le"))
    before = file.read_bytes()
    for words in (("validate", str(file)), ("set", "--config", str(file), "disable-require")):
        with pytest.raises(ConfigError, match="byte order mark of UTF-16"):
            run(*words)
    assert file.read_bytes() == before


def test_set_keeps_mode_owner_and_link(tmp_path: Path) -> None:
    file, link = tmp_path / "c.toml", tmp_path / "link"
    file.write_text(LIVE)
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 1, 2)
    link.symlink_to("c.toml")
    before = file.stat()
    run("set", "--config", str(link), "disable-require")
    assert link.is_symlink()
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.toml", "link"]


def test_set_dry_run_prints_and_writes_nothing(file: Path) -> None:
    result = run("set", "--config", str(file), "--dry-run", "swarm-resource=X")
    assert loads(result.stdout).swarm_resource == "X"
    assert not file.exists()


def test_set_fails_where_the_file_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="can't be written"):
        run("set", "--config", "/proc/config.toml", "disable-require")
    assert run("set", "--list-separator", "", "disable-require").exit_code == 2


def test_default_prints_the_commented_file() -> None:
    assert run("default").stdout == DEFAULT


def test_show_prints_the_effective_settings(tmp_path: Path, file: Path) -> None:
    file.write_text(LIVE + "ignore-imex-channel-requests = true\n")
    result = run("show", "--config", str(file))
    assert result.stdout.startswith(f"# {file}\n")
    shown, read = loads(result.stdout), load(str(file))
    for attribute in Config.__annotations__:
        if attribute not in ("path", "given"):
            assert getattr(shown, attribute) == getattr(read, attribute)
    empty = tmp_path / "empty.toml"
    empty.touch()
    assert loads(run("show", "--config", str(empty)).stdout).mode == "hook"


@pytest.mark.parametrize("by_argument", [True, False])
def test_validate_lists_all_errors_and_warnings(by_argument: bool, file: Path) -> None:
    where = [str(file)] if by_argument else ["--config", str(file)]
    file.write_text(LIVE)
    result = run("validate", *where)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{file} is valid\n", "")
    file.write_text("disable-require = 1\nfoo = 2\n[nvidia-container-cli]\nroot = 3\npath = 4\n")
    result = run("validate", *where)
    assert result.exit_code == 1
    errors = result.stderr.splitlines()
    assert [line.split(": ")[0] for line in errors] == ["warning", "warning", "error", "error"]
    for number, key in ((2, "foo"), (5, "cli.path"), (1, "disable-require"), (4, "cli.root")):
        assert any(f"line {number}: " in line and key in line for line in errors)


def test_validate_suggests_names_for_misspelt_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("moed = 1\nquux = 1\n[nvidia-container-cli]\npath = 'x'\n")
    done = CliRunner().invoke(cli, ["config", "validate", str(file)])
    assert done.exit_code == 0
    lines = {line.partition(", ")[2].split()[2]: line for line in done.stderr.splitlines()}
    assert lines["moed"].endswith("this key. Did you mean nvidia-container-runtime.mode?")
    assert lines["quux"].endswith("gpuhook doesn't know this key")
    assert "Did you mean" not in lines["nvidia-container-cli.path"]


def test_validate_of_an_invalid_or_missing_file_fails(tmp_path: Path, file: Path) -> None:
    file.write_text("a =")
    with pytest.raises(ConfigError, match="line 1"):
        run("validate", str(file))
    with pytest.raises(ConfigError, match="does not exist"):
        run("validate", str(tmp_path / "missing"))


def test_validate_without_the_default_file_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuhook.tools.cli.config.DEFAULT_PATH", "/nonexistent/c.toml")
    result = run("validate")
    assert result.exit_code == 0
    assert "does not exist" in result.stdout


# --- writing ---


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    file.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("fsync", "rename", "fchmod"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(OSError, match="No space"):
                host_files.replace(str(file), b"new")
        assert file.read_text() == "old"
        assert list(tmp_path.iterdir()) == [file]
    host_files.replace(str(file), b"new")
    assert file.read_text() == "new"


def test_set_accepts_every_line_printed_by_show(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('swarm-resource = "GPU"\n[gpuhook]\nexclusive = ["nvidia.com/gpu", "a.b/c"]\n')
    shown = CliRunner().invoke(cli, ["config", "show", "--config", str(file)]).stdout
    new = tmp_path / "new.toml"
    new.write_text("")
    section = ""
    for line in shown.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif " = " in line:
            key, _, value = line.partition(" = ")
            done = CliRunner().invoke(
                cli, ["config", "set", f"{section}{key}={value}", "--config", str(new)]
            )
            assert done.exit_code == 0, (line, done.output)
    again = CliRunner().invoke(cli, ["config", "show", "--config", str(new)]).stdout
    assert again.splitlines()[1:] == shown.splitlines()[1:]


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("gpuhook.exclusive=x", "gpuhook.exclusive contains 'x', not a CDI kind"),
        ("gpuhook.exclusive=[1]", "gpuhook.exclusive contains '[1]', not a CDI kind"),
        ("nvidia-container-runtime.mode=no", "nvidia-container-runtime.mode must be one of"),
    ],
)
def test_a_refused_new_value_error_states_that_nothing_was_written(
    assignment: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as found:
        set_value("", *parse_assignment(assignment))
    assert found.value.cause.startswith(problem)
    assert found.value.remedy == "Nothing was written: give it another value"


def test_an_earlier_error_in_the_file_must_be_corrected_first() -> None:
    before = 'swarm-resource = "GPU"\n[nvidia-container-runtime]\nmode = "no"\n'
    with pytest.raises(ConfigError, match=r"line 3: .*mode must be one of .*Correct it"):
        set_value(before, "swarm-resource", "X")


@pytest.mark.parametrize("line", ['log-level = "loud"', 'modes.legacy.cuda-compat-mode = "x"'])
def test_validate_suggests_no_other_name_for_a_known_key(tmp_path: Path, line: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[nvidia-container-runtime]\n{line}\n")
    done = CliRunner().invoke(cli, ["config", "validate", str(file)])
    assert done.stderr.startswith("warning: ")
    assert "Did you mean" not in done.stderr
