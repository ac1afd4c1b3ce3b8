"""Pages of the documentation that are made from the code, so that they are always up to date.

Each function returns a whole page in Markdown. ``commands`` uses the command line's own help,
and ``settings`` the commented config.toml. ``series`` uses the output of the metrics exporter,
and ``errors`` the classes in gpuhook.base.errors. No function examines the host.
"""

import html
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from importlib import resources

import click
from prometheus_client.core import Metric

from gpuhook.base import errors as gpuhook_errors
from gpuhook.base.config.model import KEYS
from gpuhook.metrics import exporter
from gpuhook.metrics.model import Accelerator, Container, SeriesOptions, Snapshot, Usage
from gpuhook.tools.cli import cli

_KEY = re.compile(r"#([a-z][a-z0-9-]*) = (.*)")
_CODE = re.compile(r"(``.+?``|`[^`]+`)")
_SPECIAL = re.compile(r"([\\*_\[\]|])")


def escaped(text: str) -> str:
    """Return running text with Markdown's characters escaped, except in code between backticks."""
    parts = _CODE.split(" ".join(text.split()))
    plain = [_SPECIAL.sub(r"\\\1", html.escape(part, quote=False)) for part in parts[::2]]
    marked = ["`" + part.strip("`") + "`" for part in parts[1::2]]
    return "".join(word for pair in zip(plain, [*marked, ""], strict=True) for word in pair)


def _code(text: str) -> str:
    """Return a word as code; a bar in it doesn't end a table's cell."""
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def _table(head: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        yield from (head, "|" + " --- |" * (head.count("|") - 1))
        yield from (f"| {' | '.join(row)} |" for row in rows)
        yield ""


# Commands -------------------------------------------------------------------------------------


def commands() -> str:
    """Return the page of all commands that aren't hidden."""
    return "\n".join(_commands())


def _commands() -> Iterator[str]:
    yield from ("# Commands", "")
    yield "This page is made from the command line's own help: `gpuhook COMMAND --help`."
    yield "Every command exits with 0 on success, 1 on failure and 2 on a wrong command line, where"
    yield from ("nothing else is said.", "")
    with click.Context(cli, info_name="gpuhook") as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            if command is not None and not command.hidden:
                yield from _command(command, name, context, "##")


def _command(command: click.Command, name: str, parent: click.Context, mark: str) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=parent) as context:
        yield from (f"{mark} {context.command_path}", "")
        if not isinstance(command, click.Group):
            usage = " ".join(command.collect_usage_pieces(context))
            usage = usage.replace("[OPTIONS]", "[options]")
            yield from ("```", f"{context.command_path} {usage}".strip(), "```", "")
        for text in (command.help, command.epilog):
            yield from _paragraphs(inspect.cleandoc(text or ""))
        yield from _table("| option | meaning |", [*_options(command, context)])
        yield from _examples(getattr(command, "examples", {}))
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                inner = command.get_command(context, each)
                if inner is not None and not inner.hidden:
                    yield from _command(inner, each, context, mark + "#")


def _paragraphs(text: str) -> Iterator[str]:
    """Yield a help text's paragraphs; text after a backspace character is unchanged."""
    for paragraph in text.partition("\f")[0].split("\n\n"):
        first, _, rest = paragraph.strip("\n").partition("\n")
        if first.strip() == "\b":
            yield from ("```", inspect.cleandoc(rest), "```", "")
        elif paragraph.strip():
            yield from (escaped(paragraph), "")


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for option in command.get_params(context):
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None and "--help" not in record[0]:
            yield _code(record[0]), escaped(record[1] or "")


def _examples(examples: dict[str, str]) -> Iterator[str]:
    """Yield a block of command lines, each below a comment with its purpose."""
    if examples:
        yield from ("```sh", *(f"# {what}\n{line}" for line, what in examples.items()), "```", "")


# Settings -------------------------------------------------------------------------------------


def settings() -> str:
    """Return the page of all keys of config.toml, with its comments, types and defaults."""
    return "\n".join(_settings())


def _settings() -> Iterator[str]:
    yield from ("# Settings", "")
    yield "This page is made from the commented file that `gpuhook config default` prints."
    yield from (
        "[Configuration](../configuration.md) says where the file is and how it is read.",
        "",
    )
    lines = (
        (resources.files("gpuhook") / "tools/config/config.toml").read_text("utf-8").splitlines()
    )
    first = lines.index("") + 1  # the text before it describes the file
    yield from ("## Outside of any table", "")
    comments: list[str] = []
    table = ""
    for line in lines[first:]:
        key = _KEY.fullmatch(line)
        if line.startswith("["):
            table = line.strip("[]")
            yield from (f"## {_code(line)}", "")
        elif key:
            yield from _setting(f"{table}.{key[1]}".lstrip("."), key[2], comments)
            comments = []
        elif line.startswith("#"):
            comments.append(line[1:])
        elif comments:
            yield from _comment(comments)
            comments = []


def _setting(key: str, default: str, comments: list[str]) -> Iterator[str]:
    kind = KEYS[key][1] if key in KEYS else "true or false"  # keys outside KEYS are features
    yield from (f"### {_code(key)}", "")
    yield from _comment(comments)
    yield from (f"It is {kind}; the default is {_code(default)}.", "")


def _comment(lines: list[str]) -> Iterator[str]:
    """Yield a comment's text; indented lines in it are unchanged."""
    running: list[str] = []
    kept: list[str] = []
    for line in [*lines, ""]:
        if kept and not line.startswith("   "):
            yield from ("```", inspect.cleandoc("\n".join(kept)), "```", "")
            kept = []
        if line.startswith("   "):
            if running:
                yield from (escaped(" ".join(running)), "")
            running = []
            kept.append(line)
        elif line.strip():
            running.append(line)
    if running:
        yield from (escaped(" ".join(running)), "")


# Series ---------------------------------------------------------------------------------------


def series() -> str:
    """Return the page of all series that ``gpuhook metrics`` can report."""
    return "\n".join(_series())


def _series() -> Iterator[str]:
    yield from ("# Series", "")
    yield "This page is made from the exporter's own list. [Metrics](../metrics.md) says what they"
    yield from ("mean, where they come from, and when one is missing.", "")
    own = _families(SeriesOptions())
    yield from _series_table("gpuhook metrics", own)
    for option, chosen in (
        ("--cadvisor", SeriesOptions(cadvisor=True)),
        ("--dcgm", SeriesOptions(dcgm=True)),
    ):
        new = {name: row for name, row in _families(chosen).items() if name not in own}
        yield from _series_table(f"gpuhook metrics {option}", new)


def _families(options: SeriesOptions) -> dict[str, tuple[str, ...]]:
    """Return the row of each series, by its name, from a snapshot in which every value is known."""
    bare = [each.name for each in _read(options, {}) if not each.samples]
    further = {name.removeprefix("DCGM_FI_").removeprefix("DEV_"): 1.0 for name in bare}
    rows: dict[str, tuple[str, ...]] = {}
    for family in _read(options, further):
        for sample in family.samples:
            about = escaped(family.documentation)
            rows[sample.name] = (
                _code(sample.name), family.type, ", ".join(map(_code, sample.labels)), about
            )  # fmt: skip
    return rows


def _read(options: SeriesOptions, readings: dict[str, float]) -> list[Metric]:
    """Return the metric families of an invented snapshot."""
    device = Accelerator(
        "nvidia", "GPU-0", "0", minor=0, bus_id="0000:1b:00.0", model="H100",
        mig_profile="1g.10gb", gpu_instance=1, memory_total_bytes=2, memory_used_bytes=1,
        memory_reserved_bytes=1, utilization=0.5, temperature_celsius=1.0, power_watts=1.0,
        power_limit_watts=1.0, clock_mhz=1.0, energy_joules=1.0, memory_temperature_celsius=1.0,
        ecc_corrected=1, ecc_uncorrected=1, clock_reasons=("gpu_idle",), recovery="none",
        xids={79: 1}, readings=readings,
    )  # fmt: skip
    container = Container(
        "c", "containerd", "c", pod="p", namespace="n", container="c", pod_uid="u", image="i",
        devices=("GPU-0",),
    )  # fmt: skip
    usage = Usage(
        "c", "GPU-0", memory_bytes=1, sm_utilization=0.5, processes=1, memory_limit_bytes=1
    )
    snapshot = Snapshot(
        devices=(device,),
        containers=(container,),
        usages=(usage,),
        drivers={"nvidia": "580"},
        errors={"timeout": 1},
        durations={"drivers": 1.0},
        mps=True,
    )
    return [*exporter.families(snapshot, options, 1.0)]


def _series_table(title: str, rows: dict[str, tuple[str, ...]]) -> Iterator[str]:
    yield from (f"## {title}", "")
    for labels, group in itertools.groupby(rows.values(), lambda row: row[2]):
        yield from (f"Labels: {labels}" if labels else "Without labels:", "")
        table = [(name, kind, about) for name, kind, _, about in group]
        yield from _table("| series | type | what it says |", table)


# Errors ---------------------------------------------------------------------------------------


def errors() -> str:
    """Return the page of all errors that a user can meet."""
    return "\n".join(_errors())


def _errors() -> Iterator[str]:
    yield from ("# Errors", "")
    yield "This page is made from `gpuhook.base.errors`. An error is a sentence of what is"
    yield "wrong and one of what to do; its code is what `gpuhook explain --format json` prints."
    yield from ("[Troubleshooting](../troubleshooting.md) goes by the message.", "")
    meanings: dict[str, list[str]] = {}
    for each in vars(gpuhook_errors).values():
        if inspect.isclass(each) and issubclass(each, gpuhook_errors.GpuhookError):
            about = inspect.cleandoc(each.__doc__ or "").split("\n\n")[0]
            meanings.setdefault(each.code, []).append(escaped(about))
    del meanings[gpuhook_errors.GpuhookError.code]  # no error has the base class's code
    rows = [(_code(code), " ".join(about)) for code, about in meanings.items()]
    yield from _table("| code | what is wrong |", rows)


PAGES = {
    "reference/commands.md": commands,
    "reference/settings.md": settings,
    "reference/series.md": series,
    "reference/errors.md": errors,
}
