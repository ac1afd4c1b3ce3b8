"""Memory limits of a container's devices: the grammar, and the sources that count."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests_made import config_of

from gpuhook.base.config.loader import examine
from gpuhook.base.errors import MemoryLimitError
from gpuhook.base.names import MEMORY_ANNOTATION, MEMORY_VARIABLE
from gpuhook.base.sizes import Size, amount, parse_size
from gpuhook.core.request import memory_settings
from gpuhook.core.request.memory_settings import MemorySetting, MemorySettings
from gpuhook.core.request.reader import SpecReader

GIB = 1 << 30
MEMORY = 80 * GIB


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("8192MiB", 8 * GIB),
        ("4KiB", 4096),
        ("1TiB", 1 << 40),
        ("1", 1),
        ("50%", MEMORY // 2),
        ("100%", MEMORY),
        ("1%", MEMORY // 100),
    ],
)
def test_valid_memory_sizes_are_parsed(text: str, number: int) -> None:
    size = parse_size(text)
    assert size is not None
    assert size.of(MEMORY) == number


@pytest.mark.parametrize(
    "text",
    ["", "0", "0%", "0GiB", "8G", "8GB", "-1", "+8", "1.5GiB", "101%", "GiB", "8GiBx", "0x10",
     "8_0", "\N{ARABIC-INDIC DIGIT EIGHT}GiB", "9" * 16, "max"],
)  # fmt: skip
def test_an_invalid_memory_size_is_refused(text: str) -> None:
    assert parse_size(text) is None
    with pytest.raises(MemoryLimitError, match="isn't a memory size"):
        memory_settings.parse(text, MEMORY_VARIABLE)


@pytest.mark.parametrize("text", ["8GiB,4GiB", "0=8GiB,4GiB", "=8GiB", ",", "0=8GiB,", "0=", "0:8"])
def test_an_invalid_list_of_memory_sizes_is_refused(text: str) -> None:
    with pytest.raises(MemoryLimitError):
        memory_settings.parse(text, MEMORY_VARIABLE)


def test_device_names_in_memory_settings_may_contain_equals_signs() -> None:
    found = memory_settings.parse("nvidia.com/gpu=0=8GiB, 1 = 50%", MEMORY_VARIABLE)
    assert [(name, size.of(MEMORY)) for name, size in found] == [
        ("nvidia.com/gpu=0", 8 * GIB),
        ("1", MEMORY // 2),
    ]


@given(st.text())
def test_any_text_is_parsed_as_sizes_or_refused(text: str) -> None:
    try:
        found = memory_settings.parse(text, MEMORY_VARIABLE)
    except MemoryLimitError:
        return
    assert all(size.number > 0 for _, size in found)
    assert len(found) == 1 or all(name for name, _ in found)


@given(st.integers(min_value=1, max_value=10**14))
def test_a_printed_amount_is_parsed_back_to_the_same_size(number: int) -> None:
    size = parse_size(amount(number).removesuffix(" bytes"))
    assert size is not None
    assert size.of(1) == number


def words(
    env: str = "", annotation: Any = None, *, privileged: bool = False, **settings: Any
) -> MemorySettings:
    bounding = ["CAP_SYS_ADMIN"] if privileged else []
    spec: dict[str, Any] = {
        "process": {
            "env": [f"{MEMORY_VARIABLE}={env}"] if env else [],
            "capabilities": {"bounding": bounding},
        },
        "annotations": {} if annotation is None else {MEMORY_ANNOTATION: annotation},
    }
    return memory_settings.read(SpecReader(spec, config_of(**settings)))


def decided(
    env: str = "", annotation: Any = None, *, privileged: bool = False, **settings: Any
) -> int | None:
    """Return the limit in GiB."""
    said = words(env, annotation, privileged=privileged, **settings)
    about = [(word, size) for word in said.said for _, size in word.entries]
    config = config_of(**settings)
    found = memory_settings.decide(about, MEMORY, config, "GPU 0", privileged=said.privileged)
    return None if found is None else found[0] // GIB


def test_no_memory_setting_gives_no_limit() -> None:
    assert decided() is None


def test_the_containers_requested_size_is_its_limit() -> None:
    assert decided("8GiB") == 8


def test_the_smaller_of_two_requested_limits_applies() -> None:
    assert decided("8GiB", "16GiB", accept_annotations=True) == 8
    assert decided("16GiB", "8GiB", accept_annotations=True) == 8


@pytest.mark.protects(
    "limit-default",
    "a container without a memory request gets the administrator's default limit",
    instead="if default and not said:",
)
def test_the_default_limit_applies_only_without_a_request() -> None:
    assert decided(device_memory="8GiB") == 8
    assert decided("16GiB", device_memory="8GiB") == 16
    assert decided("4GiB", device_memory="8GiB") == 4


@pytest.mark.protects(
    "limit-default",
    "a container without a memory request gets the administrator's default limit",
    instead="if default and not said:",
)
def test_an_unaccepted_annotation_can_only_lower_the_limit() -> None:
    assert decided(annotation="16GiB", device_memory="8GiB") == 8
    assert decided(annotation="4GiB", device_memory="8GiB") == 4
    assert decided(annotation="16GiB") == 16
    assert decided(annotation="16GiB", device_memory="8GiB", accept_annotations=True) == 16


@pytest.mark.protects(
    "limit-default",
    "a container without a memory request gets the administrator's default limit",
    instead="if default and not said:",
)
def test_an_unaccepted_variable_can_only_lower_the_limit() -> None:
    distrusted: dict[str, Any] = {"accept_envvar_unprivileged": False, "device_memory": "8GiB"}
    assert decided("16GiB", **distrusted) == 8
    assert decided("4GiB", **distrusted) == 4
    assert decided("16GiB", privileged=True, **distrusted) == 16


@pytest.mark.protects(
    "limit-most",
    "an unprivileged container never gets more device memory than the administrator allows",
    instead="if most and not said:",
)
def test_the_maximum_caps_larger_and_missing_requests() -> None:
    assert decided("16GiB", most_device_memory="8GiB") == 8
    assert decided(most_device_memory="8GiB") == 8
    assert decided(most_device_memory="8GiB", device_memory="16GiB") == 8
    assert decided(most_device_memory="8GiB", device_memory="4GiB") == 4
    assert decided("2GiB", most_device_memory="8GiB") == 2


def test_a_privileged_container_may_request_more_than_the_maximum() -> None:
    assert decided("16GiB", most_device_memory="8GiB", privileged=True) == 16
    assert decided(most_device_memory="8GiB", privileged=True) == 8


def test_an_administrators_size_above_the_device_memory_is_capped() -> None:
    assert decided(device_memory="100GiB") == 80
    assert decided("16GiB", most_device_memory="100GiB") == 16


def test_a_request_for_more_than_the_device_memory_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match="81GiB for GPU 0, which has 80GiB"):
        decided("81GiB", most_device_memory="8GiB")


def test_an_annotation_that_is_no_text_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match="isn't a text"):
        words(annotation=8)


@pytest.mark.parametrize("privileged", [False, True])
def test_privileges_do_not_raise_limits_set_by_nvidias_variables(*, privileged: bool) -> None:
    size = Size("8GiB", 8 * GIB)
    about = [
        (MemorySetting("NVIDIA_GPU_MEMORY_LIMIT", (("", size),), widens=False, exceeds=True), size)
    ]
    config = config_of(most_device_memory="4GiB")
    found = memory_settings.decide(about, MEMORY, config, "GPU 0", privileged=privileged)
    assert found is not None
    assert found[0] == 4 * GIB


SIZES = st.integers(min_value=1, max_value=80).map(lambda number: f"{number}GiB")
WIDE = st.integers(min_value=1, max_value=200).map(lambda number: f"{number}GiB")


@pytest.mark.protects(
    "limit-most",
    "an unprivileged container never gets more device memory than the administrator allows",
    instead="if most and not said:",
)
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=3), WIDE, WIDE | st.just(""))
def test_no_request_without_privileges_exceeds_the_administrators_limit(
    said: list[tuple[str, bool]], most: str, default: str
) -> None:
    about = []
    for text, widens in said:
        size = parse_size(text)
        assert size is not None
        about.append((MemorySetting("word", (("", size),), widens), size))
    config = config_of(most_device_memory=most, device_memory=default)
    found = memory_settings.decide(about, MEMORY, config, "GPU 0", privileged=False)
    assert found is not None
    bounds = [size for _, size in about] + [Size("", min(_gib(most), MEMORY))]
    if default and not any(widens for _, widens in said):
        bounds.append(Size("", min(_gib(default), MEMORY)))
    assert found[0] == min(size.of(MEMORY) for size in bounds)


def _gib(text: str) -> int:
    return int(text.removesuffix("GiB")) * GIB


@pytest.mark.parametrize("key", ["device-memory", "most-device-memory"])
@pytest.mark.parametrize("value", ["0", "8G", "0=8GiB", "half"])
def test_a_limit_setting_that_is_no_size_is_an_error(key: str, value: str) -> None:
    _, errors = examine(f'[gpuhook.limits]\n{key} = "{value}"\n')
    assert [f"gpuhook.limits.{key} must be a size" in str(error) for error in errors] == [True]
