"""Options of simulate: accepted values, refused values, and the error messages."""

from typing import Any

import pytest

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.vendors.nvidia.models import MODELS, Model, find_model
from gpuhook_simulate.vendors.nvidia.options import (
    Failure,
    Options,
    cuda_number,
    parse_failure,
    parse_mig,
    parse_numbers,
)

GOOD: list[dict[str, Any]] = [
    {},
    {"gpus": 0},
    {"gpus": 64},
    {"gpus": 2, "models": ("H200", "T4")},
    {"gpus": 3, "minors": (2, 0, 253)},
    {"driver_version": "535.309.01", "cuda_version": "12.2"},
    {"driver_version": "470.57"},
    {"library_dir": "/usr/lib64"},
    {"init_seconds": 0.006},
    {"gpus": 2, "unplugged": frozenset({1})},
    {"failure": Failure.NOT_LOADED},
    {"gpus": 2, "lost": frozenset({1})},
    {"driver_files": "/srv/driver"},
    {"imex_channels": 3, "features": frozenset({"gds", "nvswitch"})},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"gpus": -1}, "-1 GPUs can't be simulated"),
    ({"gpus": 65}, "65 GPUs can't be simulated"),
    ({"gpus": 3, "models": ("H200", "T4")}, "2 models are given for 3 GPUs"),
    ({"gpus": 2, "minors": (1,)}, "1 minor numbers are given for 2 GPUs"),
    ({"gpus": 2, "minors": (1, 1)}, "the same minor number"),
    ({"minors": (254,)}, "254 can't be the minor number"),
    ({"driver_version": "latest"}, "'latest' is not a driver version"),
    ({"driver_version": "535.1\n"}, "is not a driver version"),
    ({"cuda_version": "12"}, "'12' is not a CUDA version"),
    ({"library_dir": "lib"}, "'lib' can't be the library folder"),
    ({"library_dir": '/usr/"lib'}, "can't be the library folder"),
    ({"library_dir": "/usr/../lib"}, "can't be the library folder"),
    ({"init_seconds": -1.0}, "can't take -1 seconds"),
    ({"init_seconds": float("nan")}, "can't take nan seconds"),
    ({"imex_channels": -1}, "-1 IMEX channels"),
    ({"features": frozenset({"rdma"})}, "There is no feature 'rdma'"),
    ({"mig": {1: ()}}, "There is no GPU 1 among 1"),
    ({"unplugged": frozenset({4})}, "There is no GPU 4 among 1"),
    ({"lost": frozenset({1})}, "There is no GPU 1 among 1"),
    ({"driver_files": "/srv/driver", "driver_version": "535.1"}, "decide the driver version"),
    ({"driver_files": "/srv/driver", "library_dir": "/usr/lib64"}, "decide the driver version"),
    ({"driver_files": "/srv/driver", "compat32": True}, "not with driver files"),
]


@pytest.mark.parametrize("fields", GOOD)
def test_valid_options_are_accepted(fields: dict[str, Any]) -> None:
    Options(root="/x", **fields).check()


@pytest.mark.parametrize(("fields", "words"), BAD)
def test_invalid_options_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SimulateError, match=words):
        Options(root="/x", **fields).check()


@pytest.mark.parametrize(
    ("words", "mig"),
    [
        ((), {}),
        (("0:3g.71gb,1g.18gb",), {0: ("3g.71gb", "1g.18gb")}),
        (("2:", "0: 7g.141gb "), {2: (), 0: ("7g.141gb",)}),
    ],
)
def test_mig_options_are_parsed(words: tuple[str, ...], mig: dict[int, tuple[str, ...]]) -> None:
    assert parse_mig(words) == mig


@pytest.mark.parametrize("words", [("3g.71gb",), ("x:1g.18gb",), ("-1:",), ("0:", "0:1g.18gb")])
def test_malformed_mig_options_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SimulateError, match="doesn't describe a GPU's MIG devices"):
        parse_mig(words)


@pytest.mark.parametrize(
    ("word", "failure"),
    [
        ("", None),
        ("not-loaded", Failure.NOT_LOADED),
        ("version-mismatch", Failure.VERSION_MISMATCH),
    ],
)
def test_failure_options_are_parsed(word: str, failure: Failure | None) -> None:
    assert parse_failure(word) == failure


@pytest.mark.parametrize("word", ["lost", "not-loaded:1", "gpu-lost:1"])
def test_unknown_failures_are_refused(word: str) -> None:
    with pytest.raises(SimulateError, match="is not a failure"):
        parse_failure(word)


def test_number_lists_are_parsed_and_other_text_refused() -> None:
    assert parse_numbers("", "--minors") == ()
    assert parse_numbers("3, 1,0", "--minors") == (3, 1, 0)
    with pytest.raises(SimulateError, match="'a' is not a number in --minors"):
        parse_numbers("3,a", "--minors")


@pytest.mark.parametrize(
    ("driver", "cuda", "number"),
    [
        ("535.309.01", "", 12020),
        ("580.65.06", "", 13000),
        ("553.1", "", 12040),  # between two known branches, so the older one's version
        ("340.108", "", 11000),
        ("999.1", "", 13040),
        ("535.309.01", "12.4", 12040),
    ],
)
def test_the_cuda_version_follows_the_driver_unless_given(
    driver: str, cuda: str, number: int
) -> None:
    assert cuda_number(Options(root="/x", cuda_version=cuda), driver) == number


@pytest.mark.parametrize("name", ["rtx 4090", "NVIDIA RTX4090", "RTX_4090", "rtx4090"])
def test_models_are_found_by_any_spelling(name: str) -> None:
    assert find_model(name).name == "NVIDIA GeForce RTX 4090"


def test_an_unknown_model_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(SimulateError, match="H200, H100, A100") as caught:
        find_model("Z9")
    assert caught.value.code == "simulate"


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_mig_profiles_of_models_are_consistent(model: Model) -> None:
    for profile in model.mig:
        assert profile.memory <= model.memory
        assert profile.multiprocessors <= model.multiprocessors
        assert profile.instances * profile.slices <= 7
        assert len(profile.starts) >= profile.instances
    assert len({profile.name for profile in model.mig}) == len(model.mig)


def test_mig_profile_names_are_known_and_others_refused() -> None:
    a100 = find_model("A100-40GB")
    assert [profile.name for profile in a100.mig] == [
        "1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb",
    ]  # fmt: skip
    with pytest.raises(SimulateError, match=r"no MIG profile '1g.6gb'"):
        a100.profile("1g.6gb")
    with pytest.raises(SimulateError, match="has no MIG"):
        find_model("T4").profile("1g.6gb")
