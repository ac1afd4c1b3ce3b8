"""gpuhook explain: reasons for doing nothing, missing parts, and words without effect."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal

import own
import pytest
from click.testing import CliRunner, Result
from machines import asked, gpu, granted, machine, mig

from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.core.plan.operations import Symlink
from gpuhook.core.request.reader import Request
from gpuhook.core.resolve import Allocation
from gpuhook.tools.cli import _image_checks, cli
from gpuhook.tools.cli._explanation import ApplyDocument, Explanation, Row
from gpuhook.tools.cli._suggest import programs
from gpuhook.tools.cli._summary import rows
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.model import NvidiaInventory


def explain(folder: Path, *words: str, config: str = "") -> Result:
    path = folder / "config.toml"
    path.write_text(config)
    return CliRunner().invoke(cli, ["explain", "--config", str(path), *words])


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("PATH=/bin", "NVIDIA_VISIBLE_DEVICES isn't set"),
        ("NVIDIA_VISIBLE_DEVICES=", "NVIDIA_VISIBLE_DEVICES is empty"),
        ("NVIDIA_VISIBLE_DEVICES= ,", "NVIDIA_VISIBLE_DEVICES is empty"),
        ("NVIDIA_VISIBLE_DEVICES=0,void", "void is among the names in NVIDIA_VISIBLE_DEVICES"),
        ("NVIDIA_VISIBLE_DEVICES=Void", "void is among the names in NVIDIA_VISIBLE_DEVICES"),
        ("SWARM=void", "void is among the names in SWARM"),
    ],
)
def test_explain_gives_the_reason_if_no_device_is_requested(
    tmp_path: Path, word: str, reason: str
) -> None:
    done = explain(tmp_path, "-e", word, config='swarm-resource = "SWARM"\n')
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "The container requests no GPU: it stays unchanged.",
        f"Because:         {reason}",
    ]
    done = explain(tmp_path, "-e", word, "-v", config='swarm-resource = "SWARM"\n')
    assert done.stdout.splitlines()[-1] == f"Because: {reason}"


@pytest.mark.protects(
    "explained-line",
    "control characters in the output of gpuhook explain are escaped",
    instead='return "\\n".join(lines)',
)
def test_control_characters_in_an_explanation_are_escaped() -> None:
    """An image, a host or a CDI spec may contain such characters; JSON has them unchanged."""
    hostile = "\x1b]0;x\x07\x9b2J\u202e\nError (x): y\r\u2028\x85"
    explanation = Explanation()
    facts = SimpleNamespace(to_json=dict, facts=lambda: [("Capabilities", hostile), (hostile, "x")])
    explanation.progress.requests = [
        Request("nvidia", hostile, (hostile,), options=facts, ignored=((hostile, hostile),))
    ]
    inventory = machine(gpu(0, 0))
    inventory.root = hostile
    explanation.progress.inventories = [inventory]
    explanation.resolved = Allocation([], Config(), registry.BUILT_IN, absent=(hostile,))
    explanation.mode = "hook"
    explanation.operations = [ApplyDocument(hostile, hostile, {}, hostile)]
    explanation.undone = [Symlink(hostile, hostile, replace=False, reason=hostile)]
    explanation.left_out, explanation.hints = [hostile], [hostile]
    explanation.circumstances = [Row(hostile, hostile)]
    explanation.error = GpuhookError(hostile, hostile)
    text = explanation.to_text()
    assert [line for line in text.split("\n") if not line.isprintable()] == []
    assert [line for line in text.split("\n") if line.startswith("Error (x)")] == []
    assert explanation.to_json()["hints"] == [hostile]


EVERY = [name for names in registry.BUILT_IN.values() for name in names.VARIABLES]


@pytest.mark.parametrize("variable", EVERY)
@pytest.mark.parametrize(
    "change", [lambda n: n[:-1], str.lower, lambda n: n.replace("VISIBLE", "VISABLE"),
               lambda n: n.replace("_", "-"), lambda n: n[:4] + n[5:], lambda n: f"{n}S"],
)  # fmt: skip
def test_a_misspelt_variable_yields_a_hint(
    tmp_path: Path, variable: str, change: Callable[[str], str]
) -> None:
    word = change(variable)
    hint = f"No vendor reads {word}. Did you mean {variable}?"
    done = explain(tmp_path, "-e", f"{word}=0")
    assert lines_of(done.stdout, "Hint") == [hint]
    assert hint in explain(tmp_path, "-e", f"{word}=0", "-v").stdout
    found = json.loads(explain(tmp_path, "-e", f"{word}=0", "--format=json").stdout)
    assert found["hints"] == [hint]


@pytest.mark.parametrize(("variable", "vendor"), programs(registry.BUILT_IN).items())
def test_a_variable_that_only_selects_among_devices_yields_a_hint(
    tmp_path: Path, variable: str, vendor: ModuleType
) -> None:
    asking = next(iter(vendor.VARIABLES))
    [hint] = lines_of(explain(tmp_path, "-e", f"{variable}=0").stdout, "Hint")
    assert hint.startswith(f"{variable} only selects among the ")
    assert hint.endswith(f"adds none: set {asking}")


def test_explain_of_a_root_folder_names_gpuhook_apply(
    tmp_path: Path, found: Callable[[NvidiaInventory], None]
) -> None:
    found(machine(gpu(0, 0)))
    (tmp_path / "root").mkdir()
    words = ("--rootfs", str(tmp_path / "root"), "-e", "NVIDIA_VISIBLE_DEVICES=0")
    done = explain(tmp_path, *words)
    assert done.exit_code == 0, done.output
    [how] = lines_of(done.stdout, "How")
    assert how == "gpuhook apply does it, before a program is started there"


def test_a_selecting_variable_beside_a_request_yields_no_hint(
    tmp_path: Path, found: Callable[[NvidiaInventory], None]
) -> None:
    found(machine(gpu(0, 0)))
    asks = ("-e", "NVIDIA_VISIBLE_DEVICES=0")
    assert lines_of(explain(tmp_path, *asks, "-e", "CUDA_VISIBLE_DEVICES=0").stdout, "Hint") == []
    misspelt = explain(tmp_path, *asks, "-e", "NVIDIA_VISIBLE_DEVICE=0")
    assert len(lines_of(misspelt.stdout, "Hint")) == 1


def test_common_image_variables_give_no_misspelling_hint(tmp_path: Path) -> None:
    words = ("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", "NVIDIA_MIG_CONFIG_DEVICES",
             "NVIDIA_MIG_MONITOR_DEVICES", "NVIDIA_IMEX_CHANNELS", "NVIDIA_PRODUCT_NAME",
             "ASCEND_RUNTIME_OPTIONS", "CUDA_DEVICE_ORDER", "CUDA_VERSION", "ROCM_VERSION",
             "ASCEND_VNPU_SPECS", "NVIDIA_DISABLE_REQUIRE", "SWARM")  # fmt: skip
    every = [part for word in words for part in ("-e", f"{word}=1")]
    assert lines_of(explain(tmp_path, *every).stdout, "Hint") == []


SEPARATED = ["0 1", "0;1", "0 ; 1", '"0,1"', "[0, 1]", "0|1", "'0' '1'"]


@pytest.mark.parametrize("value", [*SEPARATED, "../1", "0 ../1", "*", "'"])
def test_wrong_separators_and_invalid_device_names_are_refused(tmp_path: Path, value: str) -> None:
    done = explain(tmp_path, "-e", f"NVIDIA_VISIBLE_DEVICES={value}")
    assert done.exit_code == 1
    answer = "Did you mean 0,1? " if value in SEPARATED else "Ask for devices by index"
    assert f" can't be the name of a device. {answer}" in done.stdout


def test_requests_for_more_gpus_than_exist_are_explained(
    tmp_path: Path, found: Callable[[NvidiaInventory], None]
) -> None:
    found(machine(*(gpu(n, n) for n in range(8))))
    for words in (("--gpus=9",), ("-e", "NVIDIA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7,8")):
        done = explain(tmp_path, *words)
        assert "asks for 9 GPUs, 0 to 8, and this host has 8. Ask for fewer" in done.stdout
    for value in ("8", "0,8", "1,8"):
        done = explain(tmp_path, "-e", f"NVIDIA_VISIBLE_DEVICES={value}")
        assert "This host has no GPU or MIG device '8': it has 0" in done.stdout


def test_an_ignored_variable_is_explained_with_its_reason(tmp_path: Path) -> None:
    config = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    done = explain(tmp_path, "-e", "NVIDIA_VISIBLE_DEVICES=0", config=config)
    assert "Ignored:         from environment: the container is not privileged" in done.stdout
    assert "Because" not in done.stdout


@pytest.mark.parametrize("word", ["=0", ""])
def test_an_environment_option_without_a_name_is_refused(tmp_path: Path, word: str) -> None:
    done = explain(tmp_path, "-e", word)
    assert done.exit_code == 2
    assert f"-e takes NAME=VALUE or NAME, not {word!r}" in done.stderr


@pytest.mark.parametrize(
    "words",
    [(), ("web", "--privileged"), ("web", "-e", "A=1"), ("--bundle=.", "--gpus=all"),
     ("--spec=x", "--bundle=."), ("--image=x", "web")],
)  # fmt: skip
def test_explain_without_exactly_one_container_is_refused(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = explain(tmp_path, *words)
    assert done.exit_code == 2
    assert "Give one of CONTAINER" in done.stderr


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[NvidiaInventory], None]:
    """A function that sets the inventory that gpuhook finds."""
    return lambda what: monkeypatch.setattr(
        "gpuhook.core.inventory.cache.get_inventory", lambda *_, **__: what
    )


def devices(folder: Path, *words: str) -> list[str]:
    report = json.loads(explain(folder, *words, "--format", "json").stdout)
    asked_for: list[str] = report["request"]["devices"]
    return asked_for


def test_a_variable_name_alone_is_read_from_the_environment(
    tmp_path: Path, found: Callable[[NvidiaInventory], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found(machine(gpu(0, 0), gpu(1, 1)))
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "1")
    assert devices(tmp_path, "-e", "NVIDIA_VISIBLE_DEVICES") == ["1"]
    assert devices(tmp_path, "-e", "NVIDIA_VISIBLE_DEVICES", "-e", "NVIDIA_VISIBLE_DEVICES=0") == [
        "0"
    ]
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES")
    done = explain(tmp_path, "-e", "NVIDIA_VISIBLE_DEVICES=0", "-e", "NVIDIA_VISIBLE_DEVICES")
    assert "NVIDIA_VISIBLE_DEVICES isn't set" in done.stdout


def test_the_gpus_option_overrides_the_environment(
    tmp_path: Path, found: Callable[[NvidiaInventory], None]
) -> None:
    found(machine(*(gpu(n, n) for n in range(4))))
    assert devices(tmp_path, "-e", "NVIDIA_VISIBLE_DEVICES=0", "--gpus", "2") == ["0", "1"]
    assert devices(tmp_path, "--gpus", '"device=1,3"') == ["1", "3"]
    text = explain(tmp_path, "--gpus", "all,capabilities=video").stdout
    assert "Warning:         video lacks libnvcuvid" in text
    refused = explain(tmp_path, "--gpus", "many")
    assert (refused.exit_code, "takes all or a number" in refused.stderr) == (2, True)


def lines_of(text: str, title: str) -> list[str]:
    lines = [line.partition(":") for line in text.splitlines()]
    return [rest.strip() for before, _, rest in lines if before == title]


def test_explain_summarizes_requests_devices_nodes_and_files(
    tmp_path: Path, found: Callable[[NvidiaInventory], None]
) -> None:
    found(machine(gpu(0, 3), gpu(1, 2)))
    text = explain(tmp_path, "-e", "NVIDIA_VISIBLE_DEVICES=1").stdout
    assert lines_of(text, "Requests") == ["NVIDIA 1, from its environment"]
    assert lines_of(text, "Gets") == [
        "GPU 1 (GPU-00000001-0000-0000-0000-000000000000); NVIDIA H200"
    ]
    [nodes] = lines_of(text, "Nodes")
    assert nodes == "4: /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia-uvm-tools, /dev/nvidia2"
    [files] = lines_of(text, "Files")
    assert files.startswith(f"7, from {own.FOLDER} (4), /usr/bin (2)")
    assert text.endswith("-v shows every step with its reason\n")
    for reason in ("in order:", "because:"):
        assert reason not in text
        assert reason in explain(tmp_path, "-e", "NVIDIA_VISIBLE_DEVICES=1", "-v").stdout


def test_lost_gpus_are_shown_for_every_request(
    tmp_path: Path, found: Callable[[NvidiaInventory], None]
) -> None:
    there = machine(gpu(0, 3))
    there.lost = (1, 2)
    found(there)
    for word in ("0", "all"):
        for verbose in ((), ("-v",)):
            text = explain(tmp_path, "-e", f"NVIDIA_VISIBLE_DEVICES={word}", *verbose).stdout
            assert lines_of(text, "Lost") == ["GPUs 1, 2 have fallen off the bus (lost)"]
            assert text.count("fallen off") == 1 or verbose


@pytest.mark.parametrize("asks", ["all", "0:0,99", "0-15"])
def test_a_summary_of_many_devices_has_at_most_30_lines(
    tmp_path: Path, found: Callable[[NvidiaInventory], None], asks: str
) -> None:
    """The host has 112 MIG devices, and the terminal has 80 columns."""
    migs = tuple(mig(n, n, 12 + n, 21 + n) for n in range(7))
    there = machine(*(gpu(n, n, migs) for n in range(16)))
    there.lost = tuple(range(16, 60))
    found(there)
    text = explain(tmp_path, "-e", f"NVIDIA_VISIBLE_DEVICES={asks}").stdout
    assert 0 < len(text.splitlines()) <= 30
    assert sum(1 + (len(line) - 17) // 63 for line in text.splitlines()) <= 30


def test_a_summary_of_many_messages_is_cut_with_a_note() -> None:
    explanation = Explanation()
    explanation.error = GpuhookError("All is wrong", "Do something")
    explanation.progress.requests = [asked(str(n), capabilities=("video",)) for n in range(20)]
    explanation.circumstances = [Row("Was given", str(n)) for n in range(20)]
    found = rows(explanation)
    assert len(found) == 30
    assert found[-1].text == "Error (error): All is wrong. Do something."
    assert found[0].text == "0"
    assert "more lines with -v" in found[-2].text


def test_warnings_are_in_the_text_and_in_the_json() -> None:
    explanation = Explanation()
    assert explanation.to_json()["warnings"] == []
    grant = granted(asked("all", capabilities=("video",)), machine(gpu(0, 0)))
    explanation.progress.requests.append(grant.request)
    explanation.progress.inventories.append(grant.inventory)
    explanation.resolved = Allocation([grant], Config(), registry.BUILT_IN)
    assert explanation.to_json()["warnings"] == ["video lacks libnvcuvid"]
    assert "Warning:         video lacks libnvcuvid" in explanation.to_text().splitlines()
    assert Row("Warning", "video lacks libnvcuvid", "poor") in rows(explanation)


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_explain_lists_the_operations_of_the_configured_mode(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine(gpu(0, 3))
    monkeypatch.setattr("gpuhook.core.inventory.cache.get_inventory", lambda *_, **__: found)
    config = f'nvidia-container-runtime.mode = "{mode}"\n'
    words = ("-e", "NVIDIA_VISIBLE_DEVICES=0")
    text = explain(tmp_path, *words, "-v", config=config).stdout
    report = json.loads(explain(tmp_path, *words, "--format", "json", config=config).stdout)
    assert report["mode"] == mode
    undone = {op["kind"] for op in report["undone"]}
    done = {op["kind"] for op in report["operations"]}
    if mode == "hook":
        assert "Steps of the hook, in order:" in text
        assert "mount the device node /dev/nvidia3 (195:3)" in text
        assert undone == set()
        assert done >= {"allow-device", "proc-driver", "device", "bind", "symlink", "ldcache"}
    else:
        assert "gpu-py writes into config.json (mode spec), in order:" in text
        assert "make the device node /dev/nvidia3 (195:3)" in text
        assert "Skipped, because config.json can't express it:" in text
        assert "add 5 libraries to /etc/ld.so.cache" in text.partition("Skipped")[2]
        assert undone == {"proc-driver", "ldcache"}
        assert done == {"allow-device", "device", "bind"}


def test_a_spec_that_gpu_py_refuses_is_explained_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine(gpu(0, 3))
    monkeypatch.setattr("gpuhook.core.inventory.cache.get_inventory", lambda *_, **__: found)
    spec = tmp_path / "config.json"
    spec.write_text('{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}}')
    done = explain(tmp_path, "--spec", str(spec))
    assert done.exit_code == 1
    assert "Error (spec): " in done.stdout
    assert "no mount namespace of its own" in done.stdout


# Images for other machines -------------------------------------------------------------------

OTHER = {"x86_64": ("aarch64", 183, "arm64"), "aarch64": ("x86_64", 62, "amd64")}[own.MACHINE]


def program_of(number: int, wide: bool = True, little: bool = True) -> bytes:
    """Return the header of a program for an architecture, as elf.h defines it."""
    order: Literal["little", "big"] = "little" if little else "big"
    head = b"\x7fELF" + bytes([1 + wide, 2 - little, 1]) + bytes(9)
    return (head + (2).to_bytes(2, order) + number.to_bytes(2, order)).ljust(64, b"\0")


def warned(
    folder: Path, files: dict[str, bytes], *args: str, env: str = "NVIDIA_VISIBLE_DEVICES=0"
) -> list[str]:
    """Return the warnings about a bundle with these files."""
    for name, data in files.items():
        path = folder / "rootfs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "rootfs").mkdir(exist_ok=True)
    spec = {
        "process": {"env": [env], "args": [*args]},
        "root": {"path": "rootfs"},
        "linux": {"namespaces": [{"type": "mount"}]},
    }
    (folder / "config.json").write_text(json.dumps(spec))
    report = json.loads(explain(folder, "--bundle", str(folder), "--format", "json").stdout)
    assert report["error"] is None
    return [text for text in report["warnings"] if text.startswith("The image is for ")]


@pytest.mark.parametrize(
    ("files", "args", "machine_of_it"),
    [
        ({"bin/sh": program_of(OTHER[1])}, (), OTHER[0]),
        ({"usr/bin/busybox": program_of(243)}, (), "riscv64"),
        ({"bin/sh": program_of(22, little=False)}, (), "s390x"),
        ({"bin/sh": program_of(21), "usr/bin/env": program_of(own.ELF[0])}, (), "ppc64le"),
        # Images without a distribution; the command may also be a script.
        ({"server": program_of(OTHER[1])}, ("/server",), OTHER[0]),
        ({"bin/sh": b"#!/x\n", "bin/bash": program_of(OTHER[1])}, ("/bin/sh",), OTHER[0]),
        ({"bin/sh": program_of(4711)}, (), "architecture number 4711 of elf.h"),
    ],
)
def test_an_image_for_another_architecture_yields_a_warning(
    tmp_path: Path,
    found: Callable[[NvidiaInventory], None],
    files: dict[str, bytes],
    args: tuple[str, ...],
    machine_of_it: str,
) -> None:
    found(machine(gpu(0, 3)))
    [text] = warned(tmp_path, files, *args)
    start = f"The image is for {machine_of_it} and this host is {own.MACHINE}: "
    assert text.startswith(start)
    nothing = "NVIDIA_VISIBLE_DEVICES=void"
    assert warned(tmp_path, {}, env=nothing) == []


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"bin/sh": program_of(own.ELF[0])},
        {"bin/sh": program_of(own.ELF32[0], wide=False)},  # this host also runs 32-bit programs
        {"bin/sh": b"#!/bin/busybox sh\n"},
        {"bin/sh": b"\x7fELF"},
        {"bin/sh": b""},
    ],
)
def test_an_image_for_this_architecture_yields_no_warning(
    tmp_path: Path, found: Callable[[NvidiaInventory], None], files: dict[str, bytes]
) -> None:
    found(machine(gpu(0, 3)))
    assert warned(tmp_path, files, "server") == []


def test_the_engines_architecture_counts_if_image_files_are_missing(tmp_path: Path) -> None:
    """Some containerd storage drivers keep the image's files elsewhere, so they aren't visible."""
    warning = _image_checks.other_machine([str(tmp_path / "none")], OTHER[2], "")
    assert warning.startswith(f"The image is for {OTHER[0]} and this host is {own.MACHINE}: ")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").write_bytes(program_of(own.ELF[0]))
    assert _image_checks.other_machine([str(tmp_path)], OTHER[2], "") == ""
    for same in ("", {"x86_64": "amd64", "aarch64": "arm64"}[own.MACHINE]):
        assert _image_checks.other_machine([], same, "") == ""
