"""The files of packaging/ that name every vendor of the registry.

usage: .venv/bin/python scripts/lib/vendor_files.py

This script writes the lists in udev's rule and in the chart's values, and the chart's
DeviceClasses. Then it writes the manifests that Helm renders from the chart.
tests/unit/packaging/test_vendor_files.py fails if a file differs.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import render_manifests

from gpuhook.cluster.vendors import slices
from gpuhook.cluster.vendors.slices import DeviceClass, Slices
from gpuhook.vendors.registry import BUILT_IN

PACKAGING = Path(__file__).parents[2] / "packaging"
_OWN_LABEL = "gpuhook.io/node"
_CLASSES = """\
{{- /* Made by scripts/lib/vendor_files.py of every vendor; don't edit. */}}
{{- if and (eq .Values.mode "dra") .Values.dra.deviceClasses }}
# As `gpuhook dra --dry-run` prints them. From Kubernetes 1.36 on, pods without a claim that request
# a class's resource get its devices. A class has no resource if its devices may have several.
"""


def rules(text: str) -> str:
    """Return udev's rules with the words for all drivers, and all PCI vendors."""
    words = [f"*{word}*" for names in BUILT_IN.values() for word in names.DRIVER_WORDS]
    ids = [f"{names.PCI_VENDOR.upper()}:*" for names in BUILT_IN.values() if names.PCI_VENDOR]
    text = re.sub(r'(?<=KERNEL==")[^"]*', "|".join(words), text)
    return re.sub(r'(?<=ENV\{PCI_ID\}==")[^"]*', "|".join(ids), text)


def values(text: str) -> str:
    """Return the chart's values with every vendor's node labels and taints."""
    labels = {_OWN_LABEL: ""}
    for each in _every_slices():
        for label in each.cluster.node_labels():
            labels.setdefault(label, f" # {each.names.TITLE}")
    resources = [name for each in _every_slices() for name in each.cluster.all_resources()]
    taints = [f"{{key: {name}, operator: Exists}}" for name in resources]
    text = _with_list(text, "nodeLabels", [f"{label}{title}" for label, title in labels.items()])
    return _with_list(text, "tolerations", taints)


def classes(_: str) -> str:
    """Return the chart's template of DeviceClasses."""
    found = [
        _class(one)
        for each in _every_slices()
        for one in each.classes(each.driver, slices.only(each.cluster.all_resources()))
    ]
    return _CLASSES + "---\n".join(found) + "{{- end }}\n"


# File in packaging/ -> function that makes its new text from the old one.
FILES: dict[str, Callable[[str], str]] = {
    "udev/70-gpuhook-cdi-refresh.rules": rules,
    "helm/gpuhook/values.yaml": values,
    "helm/gpuhook/templates/device-classes.yaml": classes,
}


def _every_slices() -> Iterator[Slices]:
    return map(slices.of, BUILT_IN.values())


def _with_list(text: str, key: str, items: list[str]) -> str:
    """Return a YAML text in which the items of a top-level list are replaced."""
    lines = "".join(f"  - {item}\n" for item in items)
    made, count = re.subn(rf"(?m)(?<=^{key}:\n)(?:  - .*\n)+", lambda _: lines, text)
    if count != 1:
        raise ValueError(f"there are {count} lists {key}")
    return made


def _class(each: DeviceClass) -> str:
    lines = [
        "apiVersion: resource.k8s.io/v1",
        "kind: DeviceClass",
        f"metadata:\n  name: {each.name}",
        f"spec:\n  selectors:\n    - cel: {{expression: '{each.expression}'}}",
    ]
    if each.resource:
        lines.append(f"  extendedResourceName: {each.resource}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write all files again."""
    for name, made in FILES.items():
        path = PACKAGING / name
        path.write_text(made(path.read_text() if path.exists() else ""))
    render_manifests.main()


if __name__ == "__main__":
    main()
