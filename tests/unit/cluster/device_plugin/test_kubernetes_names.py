"""Valid names of Kubernetes resources."""

import pytest

from gpuhook.cluster.device_plugin.names import full_name, wrong_name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nvidia.com/gpu", ""),
        ("huawei.com/Ascend910-2c", ""),
        ("a.b/" + "x" * 63, ""),
        ("a.b/" + "x" * 64, "63 characters"),
        ("gpu", "no domain"),
        ("Nvidia.com/gpu", "a domain in lower case"),
        ("kubernetes.io/gpu", "own domain"),
        ("x.kubernetes.io/gpu", "own domain"),
        ("a.b/", "letters, digits"),
        ("a.b/x/y", "letters, digits"),
        ("a.b/x.", "letters, digits"),
        ("a.b/x\n", "letters, digits"),
        (f"{'a' * 250}/x", "a domain in lower case"),
    ],
)
def test_invalid_resource_names_are_refused_with_a_reason(name: str, why: str) -> None:
    wrong = wrong_name(name)
    assert wrong == why if not why else why in wrong


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpu", "nvidia.com/gpu"),
        ("nvidia.com/gpu", "nvidia.com/gpu"),
        ("mig-1g.5gb", "nvidia.com/mig-1g.5gb"),
        ("amd.com/gpu", "amd.com/gpu"),
        ("huawei.com/Ascend910", "huawei.com/Ascend910"),
        ("x" * 52, "nvidia.com/" + "x" * 52),
    ],
)
def test_a_resource_name_without_a_domain_gets_nvidias(text: str, name: str) -> None:
    assert full_name(text) == name


@pytest.mark.parametrize("text", ["", "GPU", "$x$", "a_b", "nvidia.com/", "x" * 53, "a/b/c"])
def test_an_invalid_resource_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="can't be a resource"):
        full_name(text)
