"""Bad input fails with one clear sentence and leaves nothing behind."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle
from harness.commands import Result, path_of
from harness.docker import Docker, dockerd
from harness.driver import Driver, simulate
from harness.engines import Engine
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left, tree

from gpuhook.base.oci.jsontext import surely_broken

DEBIAN = image("debian")


@dataclass(frozen=True)
class Broken:
    """A config.toml with which no GPU container starts, and words that its error must contain."""

    config: Path
    words: tuple[str, ...]


def broken_configs(folder: Path, installation: Installation, driver: Driver) -> dict[str, Broken]:
    """Make one configuration for each error below ``folder``."""
    (folder / "empty").mkdir(parents=True)
    unloaded = simulate(installation, folder / "unloaded", "--fail=not-loaded")
    older = simulate(installation, folder / "older", "--fail=version-mismatch")
    texts = {
        "no TOML": ("[nvidia-container-cli\nroot = 1\n", ("TOML",)),
        "wrong type": ("[nvidia-container-runtime]\nruntimes = 7\n", ("runtimes",)),
        "wrong mode": ('[nvidia-container-runtime]\nmode = "magic"\n', ("mode", "magic")),
    }
    found = {
        "missing driver": Broken(
            write_config(folder / "missing", folder / "empty", ["runc"]), ("driver",)
        ),
        "driver not loaded": Broken(
            write_config(folder / "not-loaded", unloaded.root, ["runc"]), ("driver", "not loaded")
        ),
        "version mismatch": Broken(
            write_config(folder / "mismatch", older.root, ["runc"]), ("version",)
        ),
        "no low-level runtime": Broken(
            write_config(folder / "no-runtime", driver.root, ["no-such", "/no/such"]),
            ("no-such", "/no/such"),
        ),
    }
    for name, (text, words) in texts.items():
        config = folder / f"{name.replace(' ', '-')}.toml"
        config.write_text(text)
        found[name] = Broken(config, (*words, str(config)))
    return found


CONFIGS = [
    "missing driver",
    "driver not loaded",
    "version mismatch",
    "no low-level runtime",
    "no TOML",
    "wrong type",
    "wrong mode",
]
REQUESTS = {
    "unknown index": (["NVIDIA_VISIBLE_DEVICES=0,8"], ["8"]),
    "unknown UUID": (
        ["NVIDIA_VISIBLE_DEVICES=GPU-00000000-0000-0000-0000-000000000000"],
        ["GPU-00000000-0000-0000-0000-000000000000"],
    ),
    "a path": (["NVIDIA_VISIBLE_DEVICES=../../etc"], ["../../etc"]),
    "unknown channel": (["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_IMEX_CHANNELS=one"], ["one"]),
    "unmet requirement": (
        ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_REQUIRE_CUDA=cuda>=99.0"],
        ["99.0"],
    ),
}


@pytest.fixture(scope="session")
def broken(workspace: Path, installation: Installation, driver: Driver) -> dict[str, Broken]:
    return broken_configs(workspace / "broken", installation, driver)


@pytest.fixture(scope="session")
def reconfigured(
    workspace: Path, host: Namespace, installation: Installation, archive: Path
) -> Iterator[tuple[Docker, Path]]:
    """A dockerd, and the link to config.toml that its gpu-py reads."""
    link = workspace / "reconfigured.toml"
    runtimes = {"gpu-py": installation.runtime}
    env = {"GPUHOOK_CONFIG": str(link)}
    with dockerd(workspace / "reconfigured", host, runtimes, archive, env) as engine:
        yield engine, link


def assert_one_clear_error(done: Result, *words: str) -> None:
    """Assert that the container failed with one message that contains all ``words``."""
    done.failed()
    assert "Traceback" not in done.stderr, done
    assert [word for word in words if word.lower() not in done.stderr.lower()] == [], done
    # podman puts the runtime's path before the runtime's message.
    assert len(re.findall(r"(?<!/)\b(gpu-py|gpuhook-prestart): ", done.stderr)) == 1, done


@pytest.mark.parametrize("name", ["driver not loaded", "no TOML"])
def test_docker_prints_an_error_of_the_machine(
    reconfigured: tuple[Docker, Path], broken: dict[str, Broken], driver: Driver, name: str
) -> None:
    engine, link = reconfigured
    link.unlink(missing_ok=True)
    link.symlink_to(broken[name].config)
    with nothing_left(driver.root, pid=engine.pid):
        done = engine.run(DEBIAN, "true", env=["NVIDIA_VISIBLE_DEVICES=0"])
    words = [word for word in broken[name].words if "/" not in word or "such" in word]
    assert_one_clear_error(done, *words)


def test_every_engine_prints_an_error_of_the_request(
    engine: Engine, driver: Driver, configs: dict[str, Path]
) -> None:
    env, words = REQUESTS["unknown index"]
    with nothing_left(driver.root, pid=engine.pid):
        done = engine.run(DEBIAN, "true", env=env).failed()
    if engine.shows_errors_of_hooks:
        assert_one_clear_error(done, *words)
    else:
        kept = configs["runc"].parent / "state/errors.log"
        last = kept.read_text().splitlines()[-1]
        assert [word for word in words if word not in last] == []


@pytest.mark.parametrize(("env", "words"), REQUESTS.values(), ids=REQUESTS.keys())
@ONE
def test_a_bundle_is_unchanged_after_a_bad_request(
    bundle: GpuBundle, driver: Driver, env: list[str], words: list[str]
) -> None:
    bundle.environ(*env)
    before = bundle.config.read_bytes()
    upper = bundle.path / "upper"
    with nothing_left(driver.root, upper, pid=bundle.namespace.pid):
        done = bundle.start()
    assert_one_clear_error(done, *words)
    assert bundle.config.read_bytes() == before
    assert sorted(path.name for path in bundle.path.iterdir()) == [
        "config.json", "rootfs", "upper", "work",
    ]  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@ONE
def test_log_file_gets_the_error_as_json(
    bundle: GpuBundle, broken: dict[str, Broken], tmp_path: Path, name: str
) -> None:
    """containerd reads the error of a failed create from the file that --log names."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    log = tmp_path / "log.json"
    words = ["--log", str(log), "--log-format", "json", "create", "--bundle", str(bundle.path)]
    env = {"GPUHOOK_CONFIG": str(broken[name].config)}
    done = bundle.call(bundle.gpu_py, *words, bundle.name, env=env).failed()
    [line] = log.read_text().splitlines()
    entry = json.loads(line)
    assert entry["level"] == "error"
    assert entry["time"]
    assert [word for word in broken[name].words if word.lower() not in entry["msg"].lower()] == []
    assert entry["msg"] in done.stderr


@ONE
def test_a_log_file_that_cannot_be_opened_causes_no_further_error(
    bundle: GpuBundle, broken: dict[str, Broken]
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    words = ["--log", "/no/such/folder/log.json", "create", "--bundle", str(bundle.path)]
    env = {"GPUHOOK_CONFIG": str(broken["missing driver"].config)}
    done = bundle.call(bundle.gpu_py, *words, bundle.name, env=env).failed()
    assert "driver" in done.stderr
    assert "Traceback" not in done.stderr


# Ways to change config.json so that no runtime accepts it, or only some runtimes do.
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda text: text[:-20],
    "cut in a string": lambda text: b"".join(text.partition(b"_VISIBLE_DEVICES=")[:2]),
    "cut and NULs": lambda text: text[:-20] + bytes(20),
    "no text": lambda text: text[:-20] + b"\xff\xfe" * 10,
    "letters": lambda _: b'{NVIDIA_VISIBLE_DEVICES": 0}',
    "nothing": lambda _: b"",
    "NULs": lambda text: bytes(len(text)),  # as after a power failure
}
UNCLEAR: dict[str, Callable[[bytes], bytes]] = {
    "list": lambda _: b'["NVIDIA_VISIBLE_DEVICES=0"]',
    "deep": lambda _: b'{"NVIDIA_VISIBLE_DEVICES":' * 100_000,
    "followed by text": lambda text: text + b"}",  # runc reads only the first value
    "commented": lambda text: b"/* crun skips this */" + text,
}


def same_words(text: str) -> str:
    """Return what a runtime printed, with all times replaced by one word."""
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-][\d:]+)", "TIME", text)


@dataclass(frozen=True)
class Both:
    """gpu-py and the low-level runtime itself, on a bundle that asks for a GPU."""

    bundle: Bundle
    ours: tuple[Path, dict[str, str]]
    theirs: Path

    def compare(self, *words: str, log: Path | None = None) -> None:
        """Assert that both programs print and do the same for a command line."""
        before = tree(self.bundle.path)
        printed = []
        for program, env in (self.ours, (self.theirs, {})):
            logging = ["--log", str(log), "--log-format", "json"] if log else []
            done = self.bundle.call(program, *logging, *words, env=env)
            logged = log.read_text() if log and log.exists() else ""
            if log:
                log.unlink(missing_ok=True)
            texts = [same_words(text) for text in (done.stdout, done.stderr, logged)]
            printed.append((done.status, *texts))
            assert tree(self.bundle.path) == before
        assert printed[0] == printed[1]


@pytest.fixture
def both(bundle: GpuBundle) -> Both:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    return Both(bundle, (bundle.gpu_py, bundle.env), path_of(bundle.runtime))


@pytest.mark.parametrize("how", [*BROKEN, "missing", "folder"])
@pytest.mark.parametrize("verb", ["create", "run"])
@RUNTIMES
def test_an_invalid_config_json_is_refused_with_the_runtimes_message(
    both: Both, tmp_path: Path, how: str, verb: str
) -> None:
    config = both.bundle.config
    if how in BROKEN:
        config.write_bytes(BROKEN[how](config.read_bytes()))
    else:
        config.unlink()
    if how == "folder":
        config.mkdir()
    words = [verb, "--bundle", str(both.bundle.path), both.bundle.name]
    both.compare(*words)
    both.compare(*words, log=tmp_path / "log.json")


@pytest.mark.parametrize(
    "line",
    [
        "create", "run", "create --bundle", "create --bundle {bundle}", "create one two",
        "create --bundle {bundle} one two", "create --bundle /no/such/bundle id",
        "create --bundle {bundle}/config.json id", "create --help", "run --help", "--help", "-h",
        "--root", "--what", "--what state id", "what", "", "state no-such-container",
    ],
)  # fmt: skip
@RUNTIMES
def test_an_invalid_command_line_is_refused_with_the_runtimes_message(
    both: Both, line: str
) -> None:
    both.compare(*line.format(bundle=both.bundle.path).split())


@RUNTIMES
def test_low_level_runtimes_refuse_a_config_that_gpuhook_finds_broken(bundle: Bundle) -> None:
    """After gpuhook's check, the runtime reads the same file and must not create the container."""
    bundle.command("echo", "started")
    good = bundle.config.read_text()
    assert "started" in bundle.run(bundle.runtime).ok().stdout
    chance = random.Random(12)  # noqa: S311 - to spoil, not to hide
    tried = 0
    while tried < 60:
        place = chance.randrange(len(good))
        rest = chance.choice(("", chance.choice("abxyz") + good[place:]))
        text = good[:place] + rest
        if surely_broken(text):
            bundle.config.write_text(text)
            done = bundle.run(bundle.runtime).failed()
            assert "started" not in done.stdout, text
            tried += 1


@pytest.mark.protects(
    "might-take",
    "an invalid config.json that some runtime might accept isn't passed to the runtime",
    instead="return True",
)
@pytest.mark.parametrize("how", UNCLEAR)
@ONE
def test_a_doubtful_config_json_is_refused_with_one_error(
    bundle: GpuBundle, driver: Driver, how: str
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    bundle.config.write_bytes(UNCLEAR[how](bundle.config.read_bytes()))
    before = tree(bundle.path)
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        done = bundle.start()
    assert_one_clear_error(done, "config.json")
    assert tree(bundle.path) == before


@pytest.mark.parametrize("text", ["", "[]", "{", "\0"])
@RUNTIMES
def test_an_invalid_config_json_without_a_gpu_is_left_to_the_runtime(
    bundle: GpuBundle, text: str
) -> None:
    bundle.config.write_text(text)
    ours = bundle.start().failed()
    theirs = bundle.run(bundle.runtime).failed()
    assert ours.status == theirs.status
    assert len(ours.stderr.splitlines()) == len(theirs.stderr.splitlines())
    assert bundle.config.read_text() == text


@RUNTIMES
def test_the_hook_alone_prints_its_error_and_leaves_no_mounts(
    bundle: Bundle, installation: Installation, broken: dict[str, Broken], driver: Driver
) -> None:
    """The hook runs inside create, so its mounts must be gone with the failed container."""
    config = broken["missing driver"].config
    words = [installation.hook.name, "--config", str(config), "prestart"]
    hook = {"path": str(installation.hook), "args": words}
    shown = {"run.oci.hooks.stderr": "/dev/stderr"}  # else crun drops the messages of hooks
    bundle.change(lambda spec: spec.update(hooks={"prestart": [hook]}, annotations=shown))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    upper = bundle.path / "upper"
    with nothing_left(driver.root, upper, pid=bundle.namespace.pid):
        done = bundle.run(bundle.runtime).failed()
    assert "driver" in done.stderr.lower()
    assert "Traceback" not in done.stderr
