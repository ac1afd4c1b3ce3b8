"""Safety of --prefix: the folder's content affects nothing outside of it, whatever its origin."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuhook.base.errors import CdiError, EngineError, GpuhookError
from gpuhook.tools.cli import cli
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.prefix import below, checked
from gpuhook.tools.vendors.nvidia import program_links

UNIT = "etc/systemd/system/gpuhook-cdi-refresh.service"
STATE = "var/lib/gpuhook"
# An engine, a file that its installation writes or reads below the prefix, and further options.
PLACES = (
    ("docker", "etc/docker/daemon.json"),
    ("docker", f"{STATE}/nvidia-names.json", "--gpus"),
    ("docker", f"{STATE}/engines/lock"),
    ("docker", f"{STATE}/cdi.json", "--cdi"),
    ("docker", UNIT, "--cdi"),
    ("docker", "var/run/cdi/nvidia.com-gpu.yaml", "--cdi"),
    ("containerd", "etc/containerd/config.toml"),
    ("containerd", "etc/containerd/conf.d/99-gpuhook.toml"),
    ("containerd", "etc/containerd/conf.d/10.toml"),
    ("crio", "etc/crio/crio.conf"),
    ("crio", "etc/crio/crio.conf.d/99-gpuhook.conf"),
    ("crio", "etc/crio/crio.conf.d/10.conf"),
    ("podman", "etc/containers/containers.conf"),
    ("podman", "etc/containers/containers.conf.d/99-gpuhook.conf"),
    ("podman", "etc/containers/containers.conf.d/10.conf"),
    ("podman", "etc/containers/oci/hooks.d/gpuhook.json", "--hook=prestart"),
    ("enroot", "etc/enroot/hooks.d/98-gpuhook.sh"),
    ("enroot", "etc/enroot/hooks.d/98-nvidia.sh"),
    ("charliecloud", "etc/profile.d/gpuhook-charliecloud.sh"),
)


def to_the_file(path: Path, host: Path) -> None:
    path.symlink_to(host / path.name)


def to_a_file_that_is_not_there(path: Path, host: Path) -> None:
    (host / path.name).unlink()
    path.symlink_to(host / path.name)


def to_the_folder(path: Path, host: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.symlink_to(host)


def up_and_out(path: Path, host: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.symlink_to(os.path.relpath(host, path.parent.parent))


def by_another_link(path: Path, host: Path) -> None:
    path.with_name("way").symlink_to(host)
    path.symlink_to(f"way/{path.name}")


KINDS = (to_the_file, to_a_file_that_is_not_there, to_the_folder, up_and_out, by_another_link)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    made = tmp_path / "host"
    made.mkdir()
    return made


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An unpacked image with files of Docker, containerd and enroot."""
    made = tmp_path / "image"
    texts = {
        "etc/docker/daemon.json": "{}\n",
        "etc/containerd/config.toml": 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n',
        "etc/enroot/hooks.d/98-nvidia.sh": "nvidia's\n",
    }
    for name, text in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (path.read_text() if path.is_file() else "", path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


def call(word: str, image: Path, *words: str) -> None:
    programs = ["--runtime-path=/opt/bin/gpu-py"] if word == "install" else []
    options = [word, f"--prefix={image}", *programs, *words]
    done = CliRunner().invoke(cli, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.protects(
    "prefix-links",
    "a link below an installation prefix can't lead out of the prefix",
    instead="if links > _LINKS:",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(place[:2]))
def test_installing_through_a_link_out_of_the_prefix_is_refused(
    image: Path, host: Path, place: tuple[str, ...], kind: Callable[[Path, Path], None]
) -> None:
    engine, name, *words = place
    path = image / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    (host / path.name).write_text(text)
    path.unlink(missing_ok=True)
    kind(path, host)
    before = contents(host)
    with pytest.raises(EngineError, match=r"leads through the link .* out of .*/image, which"):
        call("install", image, f"--engine={engine}", *words)
    assert contents(host) == before


def test_nspawn_files_through_a_link_out_of_the_prefix_are_refused(image: Path, host: Path) -> None:
    (image / "etc/systemd").symlink_to(host)
    ask = EngineRequest(
        (), prefix=str(image), units=(("/etc/systemd/nspawn/box.nspawn", "[Files]\n"),)
    )
    with pytest.raises(EngineError, match="leads through the link"):
        ENGINES["nspawn"].install(ask)


@pytest.mark.parametrize("option", ["config", "drop-in-config"])
def test_a_named_file_linked_out_of_the_prefix_is_refused(
    image: Path, host: Path, option: str
) -> None:
    (image / "named").symlink_to(host / "file")
    with pytest.raises(EngineError, match="leads through the link"):
        call("install", image, "--engine=podman", f"--{option}={image}/named")


@pytest.mark.parametrize("link", ["etc/docker/daemon.json", "etc/docker", "etc"])
def test_a_link_inside_the_prefix_is_followed(image: Path, link: str) -> None:
    path = image / "real" / Path(link).name
    path.parent.mkdir()
    (image / link).rename(path)
    (image / link).symlink_to(os.path.relpath(path, (image / link).parent))
    call("install", image, "--engine=docker")
    assert "gpu-py" in (image / "etc/docker/daemon.json").read_text()
    call("uninstall", image)
    assert (image / "etc/docker/daemon.json").read_text() == "{}\n"
    assert (image / link).is_symlink()


def record_of(place: Path, **more: object) -> dict[str, object]:
    path = str(place)
    return {"engine": "docker", "path": path, "syntax": "json", "config": path, **more}


def naming_a_file(image: Path, host: Path) -> None:
    place = image / STATE / "engines/x"
    place.mkdir(parents=True)
    (place / "record.json").write_text(json.dumps(record_of(host / "file")))
    (place / "original").write_text("theirs")


def naming_a_folder(image: Path, host: Path) -> None:
    (host / "empty").mkdir()
    place = image / STATE / "engines/x"
    place.mkdir(parents=True)
    folders = [str(host / "empty")]
    record = record_of(image / "etc/docker/daemon.json", folders=folders)
    (place / "record.json").write_text(json.dumps(record))


def listing_a_folder(image: Path, host: Path) -> None:
    (host / "empty").mkdir()
    call("install", image, "--engine=docker")  # so that there is something to uninstall
    (image / STATE / "folders.json").write_text(json.dumps([str(host / "empty")]))


def naming_a_link(image: Path, host: Path) -> None:
    (host / "link").symlink_to("file")
    (image / STATE).mkdir(parents=True)
    names = json.dumps({str(host / "link"): "file"})
    (image / STATE / "nvidia-names.json").write_text(names)


def naming_a_folder_of_documents(image: Path, host: Path) -> None:
    kept = {"folder": "/../host", "config": None, "format": "yaml", "engines": ["docker"]}
    (image / STATE).mkdir(parents=True)
    (image / STATE / "cdi.json").write_text(json.dumps({**kept, "hook": "/x"}))


def with_a_link_in_it(image: Path, host: Path) -> None:
    call("install", image, "--engine=docker")
    [original] = (image / STATE).glob("engines/*/original")
    original.unlink()
    original.symlink_to(host / "file")


REMEMBERED = (
    naming_a_file,
    naming_a_folder,
    listing_a_folder,
    naming_a_link,
    naming_a_folder_of_documents,
    with_a_link_in_it,
)


@pytest.mark.protects(
    "prefix-records", "records stored below a prefix can't cause changes outside the prefix"
)
@pytest.mark.parametrize("command", ["install", "uninstall"])
@pytest.mark.parametrize("remembered", REMEMBERED)
def test_records_shipped_in_an_image_change_nothing_outside_the_prefix(
    image: Path, host: Path, remembered: Callable[[Path, Path], None], command: str
) -> None:
    (host / "file").write_text("{}\n")
    remembered(image, host)
    before = contents(host)
    words = ("--engine=docker", "--gpus") if command == "install" else ()
    said = r"leads .*out of|isn't below|is ambiguous below|isn't an absolute path"
    with pytest.raises((CdiError, EngineError), match=said):
        call(command, image, *words)
    assert contents(host) == before


COMMANDS = ("install --engine=docker", "install --engine=docker --dry-run", "uninstall")
COMMANDS_OF_DOCUMENTS = (
    *COMMANDS,
    "install --engine=docker --cdi",
    "install --engine=docker --no-cdi",
    "uninstall --dry-run",
    "cdi refresh",
)
PATHS_OUT = (
    "../host",
    "x/../../host",
    "-x/../../host",
    "/../host",
    "/etc/../../host",
    "/\0",
    "",
    5,
)
KEPT = {
    "folder": "/etc/cdi",
    "config": None,
    "format": "yaml",
    "engines": ["docker"],
    "hook": "/opt/bin/gpuhook-cdi-hook",
    "units": [],
    "made": [],
}
HOSTILE = {
    "folder": PATHS_OUT,
    "config": (5, ["/x"], "IMAGE/evil.toml", "../image/evil.toml", "/\0"),
    "format": ("yaml/../../../host/gpu", "../host/x", "toml", "", 5, None, ["yaml"]),
    "engines": ("docker", 5, [5], [["docker"]], {"docker": 1}, None),
    "hook": PATHS_OUT,
    "units": (*([f"{path}/file"] for path in PATHS_OUT if path), [5], [None], 5, "/x", {"/x": 1}),
    "made": (*([f"{path}/empty"] for path in PATHS_OUT if path), [5], [None], 5, "/x", {"/x": 1}),
}


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the host's configuration, which has a state folder of its own."""
    path = tmp_path / "config.toml"
    (tmp_path / "drivers").mkdir()
    path.write_text(
        f'[nvidia-container-cli]\nroot = "{tmp_path}/drivers"\n'
        f'[gpuhook]\nstate-dir = "{tmp_path}/state"\n'
    )
    monkeypatch.setenv("GPUHOOK_CONFIG", str(path))
    return path


@pytest.mark.protects(
    "prefix-configuration", "state stored below a prefix doesn't choose the configuration file"
)
@pytest.mark.protects(
    "kept-paths", "recorded CDI state is accepted only with absolute paths without .. in them"
)
@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("command", COMMANDS_OF_DOCUMENTS)
@pytest.mark.parametrize("field", HOSTILE)
def test_hostile_cdi_state_changes_nothing_outside_the_prefix(
    image: Path, host: Path, field: str, command: str
) -> None:
    """gpuhook must not read a configuration that the state names: root would run its driver."""
    (host / "file").write_text("# Written by `gpuhook install`; `gpuhook uninstall` takes it back.")
    (host / "empty").mkdir()
    (image / "evil.toml").write_text(
        f'[nvidia-container-cli]\nroot = "{image}/etc"\nuser = "root:root"\n'
        f'[gpuhook]\nstate-dir = "{host}/state"\n'
    )
    before = contents(host)
    words = command.split()
    programs = ["--runtime-path=/opt/bin/gpu-py"] if words[0] == "install" else []
    for value in HOSTILE[field]:
        remembered = json.dumps({**KEPT, field: value}).replace("IMAGE", str(image))
        (image / STATE).mkdir(parents=True, exist_ok=True)
        (image / STATE / "cdi.json").write_text(remembered)
        done = CliRunner().invoke(cli, [*words, f"--prefix={image}", *programs])
        assert done.exception is None or isinstance(done.exception, GpuhookError), remembered
        assert field == "config" or done.exit_code == 1, (remembered, done.output)
        assert contents(host) == before, remembered
        others = {"image", "host", "config.toml", "drivers", "state"}
        assert {path.name for path in image.parent.iterdir()} <= others, remembered


@pytest.mark.usefixtures("configured")
def test_a_later_install_below_a_prefix_reuses_its_saved_settings(image: Path) -> None:
    """An image's builder installs, later adds an engine, and then uninstalls everything."""
    before = contents(image)
    for words in (("--engine=docker", "--cdi"), ("--engine=podman",), ("--engine=docker",)):
        call("install", image, *words)
        kept = json.loads((image / STATE / "cdi.json").read_text())
        assert kept["hook"] == "/opt/bin/gpuhook-cdi-hook"
        assert kept["engines"] == ["docker"]
    done = CliRunner().invoke(cli, ["cdi", "refresh", f"--prefix={image}"])
    assert "CDI specs are written once there is a driver" in done.output
    call("uninstall", image)
    left = {path for path in contents(image) if f"/{STATE}" not in path and "/var" not in path}
    assert left == before.keys()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "more",
    [
        *({"path": f"IMAGE{path}"} for path in ("/../host/file", "/x\0")),
        *({name: value} for name in ("path", "config") for value in ("../host/file", 5, None)),
        *({"folders": value} for value in (["../host/empty"], [5], 5, "/x", None)),
        *({"owned": value} for value in ([5], 5, [[5]], [[["x"]]], "x", None)),
        *({"syntax": value} for value in ("x", 5, ["json"], None)),
        {"engine": 5},
        {"engine": ["docker"]},
    ],
    ids=str,
)
def test_hostile_records_change_nothing_outside_the_prefix(
    image: Path, host: Path, more: dict[str, object], command: str
) -> None:
    (host / "file").write_text("{}\n")
    (host / "empty").mkdir()
    place = image / STATE / "engines/x"
    place.mkdir(parents=True)
    text = json.dumps(record_of(image / "etc/docker/daemon.json", **more))
    (place / "record.json").write_text(text.replace("IMAGE", str(image)))
    before = contents(host)
    word, *words = command.split()
    with pytest.raises(EngineError):
        call(word, image, *words)
    assert contents(host) == before


@pytest.mark.parametrize("command", [COMMANDS[0] + " --gpus", *COMMANDS[1:]])
@pytest.mark.parametrize(
    "links",
    [{"../host/link": "x"}, {"IMAGE/../host/link": "x"}, {"IMAGE/a/x\0": "y"}, {"IMAGE/x": 5}, [5]],
    ids=str,
)
def test_hostile_nvidia_link_records_change_nothing_outside_the_prefix(
    image: Path, host: Path, links: object, command: str
) -> None:
    (host / "link").symlink_to("x")
    (image / STATE).mkdir(parents=True)
    text = json.dumps(links).replace("IMAGE", str(image))
    (image / STATE / "nvidia-names.json").write_text(text)
    word, *words = command.split()
    with pytest.raises(EngineError):
        call(word, image, *words)
    assert (host / "link").is_symlink()


@pytest.mark.protects(
    "prefix-plain", "a path below a prefix must start at / and contain no .. components"
)
@pytest.mark.parametrize("path", ["etc", "x/../y", "", "/..", "/a/../b", "/a/..", "/\0"])
def test_ambiguous_paths_below_a_prefix_are_refused(image: Path, path: str) -> None:
    for function, way in ((below, path), (checked, path), (checked, f"{image}{path}/..")):
        with pytest.raises(EngineError, match="is ambiguous below"):
            function(str(image), way)
    assert checked("", path) == path


def test_a_config_outside_the_prefix_requires_a_state_dir(image: Path, host: Path) -> None:
    path = host / "daemon.json"
    with pytest.raises(EngineError, match=r"isn't below .* --state-dir"):
        call("install", image, "--engine=docker", f"--config={path}")
    state = f"--state-dir={host}/state"
    call("install", image, "--engine=docker", f"--config={path}", f"--bin-dir={host}", state)
    assert "gpu-py" in path.read_text()
    call("uninstall", image, state)
    assert contents(host) == {}


def test_nvidia_program_links_out_of_the_prefix_are_refused(image: Path, host: Path) -> None:
    (image / "usr/local").mkdir(parents=True)
    (image / "usr/local/bin").symlink_to(host)
    with pytest.raises(EngineError, match="leads through the link"):
        call("install", image, "--engine=docker", "--gpus")
    assert program_links.LINKS.keys() & {path.name for path in host.iterdir()} == set()


@pytest.mark.parametrize("text", ["[", "5", '"/x"', "[5]", '["../host/empty"]', '{"/x": 1}'])
def test_a_damaged_list_of_folders_is_refused(image: Path, host: Path, text: str) -> None:
    (host / "empty").mkdir()
    call("install", image, "--engine=docker")
    (image / STATE / "folders.json").write_text(text)
    with pytest.raises(EngineError, match=r"folders\.json is damaged|isn't below"):
        call("uninstall", image)
    assert (host / "empty").is_dir()


STEERING = "\x1b[2J\x9b31m\u202e\r\x07\u2028"


@pytest.mark.protects(
    "said-line",
    "control characters in an installation's names and files are escaped in output",
    instead="click.echo(text, err=err)",
)
@pytest.mark.protects(
    "diff-lines", "control characters in a displayed diff are escaped", instead="return text"
)
@pytest.mark.usefixtures("configured")
def test_control_characters_of_an_images_names_and_files_are_escaped(image: Path) -> None:
    """Printed paths contain the folder's name, and a diff contains lines of the image's files."""
    image = image.rename(image.with_name(f"image{STEERING}"))
    text = "".join(char for char in STEERING if char >= " ")  # JSON forbids those below a space
    (image / "etc/docker/daemon.json").write_text(f'{{\n\t"debug": true,\n\t"x": "{text}"\n}}\n')
    words = ("--engine=docker", "--engine=podman", "--cdi", "--gpus")
    program = "--runtime-path=/opt/bin/gpu-py"
    said = ""
    for command in (
        ("install", "--dry-run", program, *words),
        ("install", program, *words),
        ("install", program, *words),
        ("cdi", "refresh"),
        ("uninstall", "--dry-run"),
        ("uninstall", "--engine=docker"),
        ("uninstall",),
    ):
        done = CliRunner().invoke(cli, [*command, f"--prefix={image}"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        said += done.output
    assert '\n \t"debug"' in said  # tabs aren't escaped, so that the diff stays valid
    assert [line for line in said.split("\n") if not line.replace("\t", "").isprintable()] == []


@pytest.mark.protects(
    "said-line",
    "control characters in an installation's names and files are escaped in output",
    instead="click.echo(text, err=err)",
)
@pytest.mark.protects(
    "diff-lines", "control characters in a displayed diff are escaped", instead="return text"
)
@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("command", [["uninstall", "--engine=docker"], ["cdi", "refresh"]])
def test_control_characters_in_saved_cdi_state_are_escaped(image: Path, command: list[str]) -> None:
    (image / STATE).mkdir(parents=True)
    steering = {"engines": ["docker", STEERING], "folder": f"/{STEERING}", "hook": f"/{STEERING}"}
    (image / STATE / "cdi.json").write_text(json.dumps({**KEPT, **steering}))
    done = CliRunner().invoke(cli, [*command, f"--prefix={image}"], catch_exceptions=False)
    assert [line for line in done.output.split("\n") if not line.isprintable()] == []
