"""Requirements: the grammar, the evaluation, and the error messages."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import asked, granted
from yardstick import of_this_process

from gpuhook.base.errors import GpuhookError, RequirementError
from gpuhook.vendors.nvidia import requirements, variables
from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory

Case = dict[str, Any]
FACTS = {"cuda": "12.2", "driver": "535.309.01", "arch": "9.0", "brand": "Tesla"}


def holds(text: str, **facts: str) -> bool:
    return requirements.holds(requirements.parse(text), {**FACTS, **facts})


# --- the shared cases ---


@pytest.mark.vectors("requirements", "requirements.factor")
def test_factors_match_the_vectors(case: Case) -> None:
    if case["expected"].get("error"):
        with pytest.raises(RequirementError):
            requirements.parse(case["input"]["text"])
    else:
        assert requirements.parse(case["input"]["text"]) == ((tuple(case["expected"]["parsed"]),),)


@pytest.mark.vectors("requirements", "requirements.entry")
def test_requirement_entries_match_the_vectors(case: Case) -> None:
    parsed = requirements.parse(case["input"]["text"])
    assert as_tree(parsed) == case["expected"]["tree"]


def as_tree(parsed: "requirements.Alternatives") -> object:
    """Return the notation of the vectors, where a single member has no and/or around it."""
    terms = [["".join(factor) for factor in factors] for factors in parsed]
    tree = [term[0] if len(term) == 1 else {"and": term} for term in terms]
    if not tree:
        return None
    return tree[0] if len(tree) == 1 else {"or": tree}


@pytest.mark.vectors("requirements", "requirements.logic")
def test_and_or_logic_matches_the_vectors(case: Case) -> None:
    """Requirements that hold or fail stand for true and false."""
    words = ["cuda>=1" if operand else "cuda>=99" for operand in case["input"]["operands"]]
    assert holds(",".join(words)) is case["expected"]["and"]
    if words:  # an empty OR is false, but a text without requirements holds
        assert holds(" ".join(words)) is case["expected"]["or"]


# --- the grammar ---


@pytest.mark.parametrize(
    "text",
    [
        "cuda", "cuda>=", ">=12", "=", "!", "cuda!12", "cuda==12", "cuda=>12", "cuda=<12",
        "cuda<>12", "cuda>=12x", "cuda>=v12", "cuda>=-1", "cuda>=1..2", "driver>=abc",
        "arch=sm_90", "brand>tesla", "brand<=tesla", "brand==tesla", "brand=", "cuda>=12 bogus",
        "cuda>=12,bogus", "cuda>=99,bogus", "foo", "foo=",
    ],
)  # fmt: skip
def test_malformed_requirements_are_refused(text: str) -> None:
    with pytest.raises(RequirementError) as caught:
        requirements.parse(text)
    assert "NVIDIA_DISABLE_REQUIRE" in caught.value.remedy
    assert caught.value.code == "requirement"


def test_malformed_part_of_a_long_text_is_named_with_the_whole() -> None:
    with pytest.raises(RequirementError, match="'driver>=' in the requirement 'cuda>=12 driver>='"):
        requirements.parse("cuda>=12 driver>=")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", True),
        ("  ,, , ", True),
        ("foo=bar", True),
        ("foo=bar,cuda>=99", False),
        ("foo=bar cuda>=99", False),
        ("foo=bar cuda>=12", True),
        ("CUDA>=12,Driver>=535", True),
        ("cuda>=12.2", True),
        ("cuda>=12.10", False),
        ("cuda>=9.9", True),
        ("cuda=12.2.0", True),
        ("cuda=12.02", True),
        ("cuda!=12.2", False),
        ("cuda!=12.3", True),
        ("cuda>12.2", False),
        ("cuda>12.1.9", True),
        ("cuda<12.2", False),
        ("cuda<=12.2", True),
        ("cuda<12.2.1", True),
        ("driver=535.309.1", True),
        ("driver>535.309.0", True),
        ("driver<535.310", True),
        ("driver>=1000", False),
        ("arch>=8.6", True),
        ("arch=9", True),
        ("arch>=10.0", False),
        ("brand=tesla", True),
        ("brand!=TESLA", False),
        ("brand=grid", False),
        ("brand!=grid", True),
        ("cuda>=99  cuda>=12", True),
        ("cuda>=99\tcuda>=12", True),
        ("cuda>=99 cuda>=12,driver>=600", False),
        (
            "cuda>=13.0 brand=unknown,driver>=470,driver<471 brand=tesla,driver>=535,driver<536",
            True,
        ),
    ],
)
def test_requirements_hold_or_fail_as_expected(text: str, result: bool) -> None:
    assert holds(text) is result


@pytest.mark.parametrize("name", ["cuda", "driver", "arch", "brand"])
@pytest.mark.parametrize("unknown", ["", "N/A", "unreadable.x"])
def test_requirements_on_unknown_values_hold(name: str, unknown: str) -> None:
    if name == "brand" and unknown:
        assert not holds("brand=grid", brand=unknown)
    else:
        value = "grid" if name == "brand" else "99"
        assert holds(f"{name}={value}", **{name: unknown})
        assert holds(f"{name}!={value}", **{name: unknown})


def test_long_text_takes_linear_time() -> None:
    def seconds(count: int) -> float:
        text = "cuda>=99,driver>=1 " * count

        def read() -> None:
            assert not holds(text)

        return of_this_process(read)

    # The text is ten times as long; quadratic time would be a hundred times as long.
    assert seconds(100_000) < 50 * max(seconds(10_000), 0.01)


# --- the environment ---


@pytest.mark.parametrize(
    ("env", "result"),
    [
        ({}, ()),
        ({"NVIDIA_REQUIRE_CUDA": ""}, ()),
        ({"NVIDIA_REQUIRE_A": " ", "NVIDIA_REQUIRE_B": "x=1"}, ("x=1",)),
        ({"NVIDIA_REQUIRE_B": "b=1", "NVIDIA_REQUIRE_A": "a=1", "NVIDIA_REQUIRE_C": "b=1"},
         ("a=1", "b=1")),
        ({"NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS": "x", "NVIDIA_REQUIREX": "y"}, ()),
        ({"NVIDIA_REQUIRE_": "z=1"}, ("z=1",)),
        ({"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_CUDA": "cuda>=8"}, ("cuda>=8",)),
        ({"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_DRIVER": "driver>=1"}, ("cuda>=9.0", "driver>=1")),
    ],
)  # fmt: skip
def test_requirements_are_read_from_variables(env: dict[str, str], result: tuple[str, ...]) -> None:
    assert variables.asked_requirements(env) == result


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0", "0.0"),
        ("8", "8.0"),
        ("9.0.116", "9.0"),
        ("v11.6", "11.6"),
        ("12.2.1-rc1", "12.2"),
        ("12.2.1+build.7", "12.2"),
        ("12.2.1-rc.1+build-7", "12.2"),
        ("4294967295.4294967295.4294967295", "4294967295.4294967295"),
    ],
)
def test_major_and_minor_version_are_read(text: str, version: str) -> None:
    assert variables.major_minor(text) == version


@pytest.mark.parametrize(
    "text",
    [
        "foo", "foo.5.10", "9.0.116.50", "9.0.116foo", "7.foo", "9.0.bar", "9.4294967296",
        "4294967296.0", "9.0.116.", "9..0", "9.", ".5.10", "-9", "+9", "-9.1.116", "-9.-1.-116",
        "", "v", "vv9", "9-", "9+", "9-é", " 9", "9 ", "²", "9" * 5000,
    ],
)  # fmt: skip
def test_text_that_is_no_cuda_version_is_refused(text: str) -> None:
    with pytest.raises(RequirementError, match="CUDA_VERSION"):
        variables.major_minor(text)


# --- the check ---


def gpu(index: int, architecture: str = "9.0", brand: str = "Nvidia") -> Gpu:
    return Gpu(index, index, f"GPU-{index}", f"0:{index}:0.0", "x", architecture, brand, False, ())


MACHINE = NvidiaInventory("/", "535.309.01", "12.2", (gpu(0), gpu(1, "7.5", "Tesla")), (), ())


def check(*texts: str, gpus: tuple[Gpu, ...] = MACHINE.gpus) -> None:
    selectors = [str(gpu.index) for gpu in gpus]
    requirements.check(granted(asked(*selectors, requirements=texts), MACHINE))


def test_all_requirements_hold_for_all_selected_gpus() -> None:
    check()
    check("cuda>=12", "driver>=535", "arch>=7.0")
    check("arch>=8.0 brand=tesla")
    check("arch>=8.0", gpus=MACHINE.gpus[:1])
    with pytest.raises(RequirementError):
        check("cuda>=12", "arch>=8.0")


def test_without_a_gpu_only_driver_and_cuda_count() -> None:
    check("arch>=99", "brand=grid", gpus=())
    with pytest.raises(RequirementError):
        check("cuda>=12.3", gpus=())


def test_equal_gpus_and_alternatives_are_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host and the image determine their number, and all tenants share the time."""
    gpus = tuple(gpu(index, *(("7.5", "Tesla") if index % 2 else ())) for index in range(8))
    machine = NvidiaInventory("/", "535.309.01", "12.2", gpus, (), ())
    looks: list[Any] = []
    look = requirements._factor_holds

    def counted(factor: Any, *rest: Any) -> bool:
        looks.append(factor)
        return look(factor, *rest)

    monkeypatch.setattr(requirements, "_factor_holds", counted)
    text = "cuda<1 " * 50 + "arch<1 cuda>=12"
    requirements.check(granted(asked("all", requirements=(text,)), machine))
    assert len(looks) == 2 * 3


def test_a_failure_names_requirement_facts_and_remedy() -> None:
    with pytest.raises(RequirementError) as caught:
        check("cuda>=13.0 brand=grid,driver>=580")
    message = str(caught.value)
    for part in ("'cuda>=13.0 brand=grid,driver>=580'", "cuda 12.2", "driver 535.309.01"):
        assert part in caught.value.cause
    for part in ("Update the driver", "CUDA 12.2 or older", "NVIDIA_DISABLE_REQUIRE=true"):
        assert part in message


def test_failure_about_one_gpu_names_it() -> None:
    with pytest.raises(RequirementError, match=r"arch 7\.5, brand Tesla \(GPU 1\)") as caught:
        check("arch>=8.0")
    assert "driver" not in caught.value.remedy


# --- properties ---

RELATIONS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
VERSION = st.lists(st.integers(0, 2000), min_size=1, max_size=4)


@given(st.sampled_from(sorted(RELATIONS)), VERSION, VERSION)
def test_operators_compare_versions_numerically(
    sign: str, have: list[int], want: list[int]
) -> None:
    text = f"cuda{sign}{'.'.join(map(str, want))}"
    longest = max(len(have), len(want))
    padded = [numbers + [0] * (longest - len(numbers)) for numbers in (have, want)]
    assert holds(text, cuda=".".join(map(str, have))) is RELATIONS[sign](*padded)


FACTOR = st.one_of(
    st.tuples(
        st.sampled_from(["cuda", "driver", "arch", "brand", "other"]),
        st.sampled_from(sorted(RELATIONS)),
        st.sampled_from(["1", "12.2", "99", "tesla", ""]),
    ).map("".join),
    st.text(alphabet="cudabrn<>=!.,9 \t", max_size=8),
)


def outcome(function: Callable[[str], Any], text: str) -> Any:
    """Return the function's result, or the message of its own refusal."""
    try:
        return function(text)
    except GpuhookError as error:
        return str(error)


@given(st.one_of(st.text(), st.lists(FACTOR).map(" ".join), st.lists(FACTOR).map(",".join)))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    parsed = outcome(requirements.parse, text)
    if not isinstance(parsed, str):
        assert requirements.holds(parsed, FACTS) in (True, False)
        assert requirements.holds(parsed, {}) is True


@given(st.text())
def test_any_cuda_version_is_read_or_refused(text: str) -> None:
    version = outcome(variables.major_minor, text)
    assert version.isprintable()


# Versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("9", (9,)),
        ("9.0", (9,)),
        ("9.0.0", (9,)),
        ("12.10", (12, 10)),
        ("580.65.06", (580, 65, 6)),
        ("0", ()),
        *[
            (text, None)
            for text in (
                "", ".", "9.", ".9", "9..0", "-9", "+9", " 9", "9 ", "9_0", "v9", "9.0-rc1", "²",
                "٣.1", "1." * 40 + "1", "9" * 5000,
            )
        ],
    ],
)  # fmt: skip
def test_versions_are_parsed_to_numbers_or_rejected(
    text: str, numbers: tuple[int, ...] | None
) -> None:
    assert requirements.parse_version(text) == numbers


def test_versions_are_compared_as_numbers_not_text() -> None:
    ordered = ["9", "9.0.1", "12.2", "12.10", "99.1", "100"]
    parsed = [requirements.parse_version(text) for text in ordered]
    assert parsed == sorted(parsed, key=lambda numbers: numbers or ())
