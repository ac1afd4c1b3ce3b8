"""The pages that the site makes from the code say all that there is, and nothing by accident."""

import inspect
from collections.abc import Iterator

import click
import pytest
import reference

from gpuhook.ground import errors
from gpuhook.ground.config.model import FEATURE_PREFIX, FEATURES, KEYS
from gpuhook.tools.cli import cli


def _commands(group: click.Group, path: str = "gpuhook") -> Iterator[tuple[str, click.Command]]:
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            if not command.hidden:
                yield f"{path} {name}", command
                if isinstance(command, click.Group):
                    yield from _commands(command, f"{path} {name}")


def test_every_command_and_option_is_there() -> None:
    page = reference.commands()
    for name, command in _commands(cli):
        section = page.partition(f"# {name}\n")[2].partition("\n##")[0]
        assert section, name
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert any(option in section for option in parameter.opts), (name, parameter.opts)
        for line in getattr(command, "examples", {}):
            assert line in section, (name, line)


def test_every_setting_is_there_with_its_default() -> None:
    page = reference.settings()
    for key in (*KEYS, *(FEATURE_PREFIX + name for name in FEATURES)):
        section = page.partition(f"### <code>{key}</code>\n")[2].partition("\n##")[0]
        assert "; the default is <code>" in section, key
        assert section.strip().splitlines()[0], key


def test_every_error_code_is_there() -> None:
    page = reference.errors()
    for each in vars(errors).values():
        if inspect.isclass(each) and issubclass(each, errors.GpuhookError):
            assert (f"<code>{each.code}</code>" in page) == (each is not errors.GpuhookError)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("gpuhook_gpu_info", "mig_profile"),
        ("gpuhook_container_gpu_sm_utilization_ratio", "pod"),
        ("gpuhook_gpu_xid_errors_total", "xid"),
        ("gpuhook_metrics_errors_total", "kind"),
        ("container_accelerator_duty_cycle", "acc_id"),
        ("DCGM_FI_DEV_SM_CLOCK", "modelName"),
        ("DCGM_FI_DEV_FB_USED", "UUID"),
    ],
)
def test_a_series_is_there_with_its_labels(name: str, label: str) -> None:
    before, found, _ = reference.series().partition(f"<code>{name}</code>")
    assert found
    assert f"<code>{label}</code>" in before[before.rindex("Labels: ") :]


def test_words_are_no_markup() -> None:
    assert reference.escaped("a <b> *c* d_e_ [f|g] `h_i` ``j``") == (
        r"a &lt;b&gt; \*c\* d\_e\_ \[f\|g\] `h_i` `j`"
    )


def test_a_help_text_keeps_the_lines_that_it_asks_to_keep() -> None:
    command = click.Command("x", help="One.\n\n\b\n  two   three\n  four\n\nFive\nsix.")
    page = "\n".join(reference._paragraphs(inspect.cleandoc(command.help or "")))
    assert page == "One.\n\n```\ntwo   three\nfour\n```\n\nFive six.\n"
