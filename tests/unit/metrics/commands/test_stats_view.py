"""Snapshots as gpuhook stats draws them, on terminals of all sizes, and as JSON."""

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console

from gpuhook.metrics.commands.stats_view import ORDERS, History, View, as_json, filtered, tables
from gpuhook.metrics.model import Accelerator, Container, DeviceProcess, Snapshot, Usage
from gpuhook.tools.cli._screen import show

GIB = 1 << 30
GPU = Accelerator(
    "nvidia", "GPU-1", "0", 3, model="NVIDIA H200", memory_total_bytes=100 * GIB,
    memory_used_bytes=75 * GIB, utilization=0.6, temperature_celsius=40, power_watts=70.4,
    power_limit_watts=700.0, clock_mhz=1980,
    xids={13: 1, 79: 2},
)  # fmt: skip
PART = Accelerator("nvidia", "MIG-1", "1:0", model="NVIDIA H200 MIG 1g.18gb", parent="GPU-2")
POD = Container("c1", "kubernetes", pod="train", namespace="team", container="main",
                devices=("GPU-1",))  # fmt: skip
NAMED = Container("f" * 64, "docker", "web\x1b[2J", devices=("MIG-1",))
LOOK = Snapshot(
    (GPU, PART),
    (NAMED, POD, Container("e" * 64, "podman")),
    (
        Usage("c1", "GPU-1", 25 * GIB, 0.5, 2),
        Usage("e" * 64, "GPU-1", GIB, 0.05, 1),
        Usage("", "GPU-1", 2 * GIB, 0.0, 1),
        Usage("", "MIG-1", 0, None, 0),
    ),
)
MANY = replace(LOOK, devices=tuple(replace(GPU, id=f"GPU-{n}", label=str(n)) for n in range(40)))


def drawn(look: Snapshot, width: int, height: int = 30, *, colours: bool = False) -> list[str]:
    """Return the lines of a live view."""
    file = io.StringIO()
    system: Literal["standard"] | None = "standard" if colours else None
    console = Console(
        file=file, width=width, height=height, force_terminal=colours, color_system=system,
        _environ={},
    )  # fmt: skip
    console.print(View(look, "12:00:00, every 2 s"))
    return file.getvalue().splitlines()


def printed(look: Snapshot, width: int = 200) -> list[list[str]]:
    """Return the words of the lines that are written to a pipe."""
    file = io.StringIO()
    Console(file=file, width=width, _environ={}).print(*tables(look, width, bars=False), sep="\n")
    return [line.split() for line in file.getvalue().splitlines()]


def test_unnamed_containers_are_labelled_by_engine_and_id() -> None:
    every = (Container("slurm:41234567", "slurm"), Container("f" * 64, "docker"),
             Container("a-name-of-20-letters", "containerd"), Container("box"))  # fmt: skip
    look = replace(LOOK, containers=tuple(replace(each, devices=("GPU-1",)) for each in every))
    words = [word for line in printed(look) for word in line]
    expected = ["slurm:41234567", "docker:ffffffffffff", "containerd:a-name-of-20-letters", "box"]
    assert {*expected} <= {*words}


def test_the_table_lists_devices_and_their_use_by_containers() -> None:
    lines = printed(LOOK)
    assert lines[0] == [
        "GPU", "MODEL", "UTIL", "MEMORY", "TEMP", "CLOCK", "POWER", "XIDS"
    ]  # fmt: skip
    words = "0 NVIDIA H200 60% 75.00 / 100 GiB 40 C 1980 MHz 70 / 700 W 13, 79 (2 times)"
    assert lines[1] == words.split()
    assert lines[2] == ["1:0", "NVIDIA", "H200", "MIG", "1g.18gb", "-", "-", "-", "-", "-"]
    assert lines[5:] == [
        ["podman:eeeeeeeeeeee", "0", "5%", "1.00", "GiB", "1"],
        ["team/train/main", "0", "50%", "25.00", "GiB", "2"],
        ["web\\x1b[2J", "1:0", "-", "-", "-"],
        ["(in", "no", "container)", "0", "0%", "2.00", "GiB", "1"],
    ]


def test_a_pod_known_only_from_the_kubelet_is_listed() -> None:
    pod = Container("", "kubernetes", pod="p", namespace="n", container="c", devices=("GPU-1",))
    look = replace(LOOK, containers=(pod, POD))
    words = [line[:3] for line in printed(look)[4:]]
    assert words[1:] == [
        ["n/p/c", "0", "-"],
        ["team/train/main", "0", "50%"],
        ["(in", "no", "container)"],
    ]
    names = [(each["id"], each["pod"]) for each in as_json(look, 0.0)["containers"]]
    assert names == [("", "p"), ("c1", "train"), ("", "")]


def test_a_snapshot_without_devices_shows_one_message() -> None:
    assert printed(Snapshot()) == [["No", "devices."]]
    assert len(printed(Snapshot((GPU,)))) == 2


def test_bars_show_the_use_of_the_device() -> None:
    lines = [line for line in drawn(LOOK, 130, colours=True) if "H200  " in line]
    assert "\x1b[32m━━━━━━━" in lines[0]  # 60 % used
    assert "\x1b[33m━━━━━━━━━" in lines[0]  # 75 % full
    assert "\x1b[" not in "".join(drawn(LOOK, 130))


@pytest.mark.parametrize("width", [1, 7, 20, 44, 72, 110, 300])
@pytest.mark.parametrize("height", [1, 12, 60])
def test_the_view_fits_every_terminal_size(width: int, height: int) -> None:
    for look in (LOOK, MANY, replace(LOOK, problems=("The driver hangs",))):
        lines = drawn(look, width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= height or min(width, height) < 12


def test_rows_that_do_not_fit_are_counted() -> None:
    lines = drawn(MANY, 120, 20)
    shown = [line for line in lines if "H200" in line]
    assert (
        lines[-1]
        == f"{40 - len(shown)} more: Up and Down scroll, gpuhook stats --no-stream shows all"
    )
    assert any("podman:" in line for line in lines)
    assert "more:" not in "".join(drawn(LOOK, 120, 20))


def test_problems_are_shown_below_the_table() -> None:
    look = replace(LOOK, problems=("NVIDIA: the driver hangs in GPU-1",))
    assert drawn(look, 80)[-1] == "NVIDIA: the driver hangs in GPU-1."
    assert "hangs" not in str(printed(look))


PROCESSES = replace(
    LOOK,
    processes=(
        DeviceProcess(7, "GPU-1", "c1", 0, "python", GIB, 0.5, 3723.0, 1.5, 4 * GIB),
        DeviceProcess(8, "GPU-1", "", 4_000_000, "bad\x1b[2J", 2 * GIB, None, 5.0),
        DeviceProcess(9, "GPU-9", "gone"),
    ),
)


def test_processes_are_listed_and_written_as_json() -> None:
    """The process with the largest use comes first; a user unknown to the host is a number."""
    header = "PID USER GPU SM MEMORY CPU HOST MEMORY TIME COMMAND CONTAINER"
    assert [" ".join(line) for line in printed(PROCESSES)[-4:]] == [
        header,
        "8 4000000 0 - 2.00 GiB - - 0:00:05 bad\\x1b[2J -",
        "7 root 0 50% 1.00 GiB 150% 4.00 GiB 1:02:03 python team/train/main",
        "9 - GPU-9 - - - - - - gone",
    ]
    assert [line.split()[0] for line in drawn(PROCESSES, 60)[-3:]] == ["8", "7", "9"]
    [first, *_] = as_json(PROCESSES, 0.0)["processes"]
    assert first == {
        "pid": 7, "uid": 0, "command": "python", "container": "c1", "device": "GPU-1",
        "memory_used_bytes": GIB, "sm_utilization": 0.5, "cpu_seconds": 3723.0,
        "cpu_utilization": 1.5, "host_memory_bytes": 4 * GIB,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("order", "processes", "containers"),
    [
        ("name", "879", ["podman", "team", "web"]),
        ("memory", "879", ["team", "podman", "web"]),
        ("load", "789", ["team", "podman", "web"]),
        ("time", "789", ["podman", "team", "web"]),
    ],
)
def test_rows_are_sorted_in_the_chosen_order(
    order: str, processes: str, containers: list[str]
) -> None:
    """The largest values come first, unknown ones last, and use outside containers at the end."""
    assert order in ORDERS.values()
    with redirect_stdout(io.StringIO()) as file:
        show(tables(PROCESSES, 200, bars=False, order=order))
    lines = file.getvalue().splitlines()
    starts = [re.split(r"\W", line)[0] for line in lines[4:8]]
    assert starts == ["CONTAINER", *containers]
    assert lines[8].startswith("(in no container)")
    assert "".join(line[0] for line in lines[-3:]) == processes


@pytest.mark.parametrize(
    ("containers", "gpus", "devices", "names"),
    [
        ([], ["0"], ["0"], ["", "c1", "e" * 64]),
        ([], ["1"], ["1:0"], ["f" * 64]),
        ([], ["1:0"], ["1:0"], ["f" * 64]),
        ([], ["MIG-1", "GPU-1"], ["0", "1:0"], ["", "c1", "e" * 64, "f" * 64]),
        ([], ["GPU-2"], ["1:0"], ["f" * 64]),
        (["train"], [], ["0"], ["c1"]),
        (["team/train/main"], [], ["0"], ["c1"]),
        (["eeee"], [], ["0"], ["e" * 64]),
        (["web\x1b[2J", "c1"], [], ["0", "1:0"], ["c1", "f" * 64]),
        (["web\x1b[2J"], ["0"], [], []),
        (["none", ""], [], [], []),
        ([], ["9"], [], []),
    ],
)
def test_filters_select_devices_containers_and_processes(
    containers: list[str], gpus: list[str], devices: list[str], names: list[str]
) -> None:
    look = filtered(PROCESSES, containers, gpus)
    assert [each.label for each in look.devices] == devices
    found = {each["id"] for each in as_json(look, 0.0)["containers"]}
    assert sorted(found) == sorted({*names} if devices else set())
    assert {each.container for each in look.processes} <= {*names, "gone"}


def test_scrolling_shows_every_row() -> None:
    """Scrolling stops at the last row."""
    file = io.StringIO()
    console = Console(file=file, width=120, height=20, _environ={})
    view = View(MANY, "")
    seen: set[str] = set()
    for step in (0, 1, 10, 10, 10, 10, 10, -1, -100):
        view = view.scrolled(console, step)
        file.truncate(file.seek(0))
        console.print(view)
        lines = file.getvalue().splitlines()
        assert len(lines) <= 20
        labels = [line.split()[0] for line in lines if "H200" in line]
        assert len(labels) == 12 or len(labels) > 5
        seen.update(labels)
        if step == -100:
            assert labels[0] == "0"
        if step == -1:
            assert labels[-1] == "38"
    assert seen == {str(number) for number in range(40)}


LONG = replace(
    PROCESSES,
    devices=(
        replace(GPU, power_watts=100.0, clock_mhz=1980, model="NVIDIA H100 80GB HBM3"),
        replace(PART, model="NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        replace(PART, id="MIG-2", label="1:1", model="NVIDIA H100 80GB HBM3 MIG 2g.20gb"),
    ),
    containers=(*LOOK.containers, replace(POD, id="c2", pod="a-training-job-of-a-team-" * 4)),
)


@pytest.mark.parametrize("width", [*range(40, 90), 100, 120, 150, 200])
def test_each_device_takes_one_line_at_any_width(width: int) -> None:
    """No line is too long on a terminal or in a pipe, and models of MIG devices stay distinct."""
    with redirect_stdout(io.StringIO()) as file:
        show(tables(LONG, width, bars=True))
    for lines in (drawn(LONG, width)[1:], file.getvalue().splitlines()):
        assert max(map(len, lines)) <= width
        assert [line.split()[0] for line in lines[:4]] == ["GPU", "0", "1:0", "1:1"]
        assert lines[4] == ""
        if "MODEL" in lines[0]:
            assert "1g.10gb" in lines[2]
            assert "2g.20gb" in lines[3]
        titles = [title for title in ("XIDS", "TEMP", "POWER", "MODEL") if title in lines[0]]
        assert len(titles) == 1 + (width >= 51) + (width >= 64) + ("MODEL" in titles)
        assert "MODEL" in titles or width < 82


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_names_in_printed_tables_are_not_truncated(width: int) -> None:
    with redirect_stdout(io.StringIO()) as file:
        show(tables(PROCESSES, width, bars=True))
    words = file.getvalue().split()
    assert {"podman:eeeeeeeeeeee", "team/train/main", "web\\x1b[2J", "bad\\x1b[2J"} <= {*words}


def test_the_history_shows_recent_utilization() -> None:
    history = History()
    for number in range(40):
        history.add(replace(LOOK, devices=(replace(GPU, utilization=number / 39), PART)))
    assert history.line("GPU-1") == "▆▇▇▇▇▇▇███"
    assert history.line("MIG-1") == " " * 10
    history.add(replace(LOOK, devices=(PART,)))
    assert history.line("GPU-1") == ""
    look = replace(LOOK, devices=(GPU,))
    history.add(look)
    file = io.StringIO()
    Console(file=file, width=130, _environ={}).print(View(look, "", history))
    assert "HISTORY" in file.getvalue()
    assert " ▅ " in file.getvalue()


def test_a_snapshot_as_json_has_all_values() -> None:
    found = json.loads(json.dumps(as_json(replace(LOOK, problems=("?",)), 1.23456)))
    assert (found["time"], found["problems"]) == (1.235, ["?"])
    gpu, part = found["devices"]
    assert (gpu["index"], gpu["utilization"], gpu["xids"]) == (0, 0.6, {"13": 1, "79": 2})
    assert (part["parent"], part["utilization"]) == ("GPU-2", None)
    names = [each["name"] or each["pod"] or each["engine"] for each in found["containers"]]
    assert names == ["podman", "train", "web\x1b[2J", ""]
    assert found["containers"][1]["devices"] == [
        {
            "vendor": "nvidia", "id": "GPU-1", "uuid": None, "index": 0, "label": "0",
            "assigned": True, "memory_used_bytes": 25 * GIB,
            "memory_limit_bytes": None, "memory_source": "driver",
            "sm_utilization": 0.5, "processes": 2,
        }
    ]  # fmt: skip
    [unused] = found["containers"][2]["devices"]
    assert unused["assigned"]
    assert unused["memory_used_bytes"] is unused["processes"] is None
