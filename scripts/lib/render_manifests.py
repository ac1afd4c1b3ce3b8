"""The folders of packaging/kubernetes that Helm renders from the chart.

usage: python3 scripts/lib/render_manifests.py        (writes gpuhook.yaml in each of them, and the
                                                       chart's copy of Prometheus' rules)

The chart is the only source; tests/integration/test_helm.py fails if a file differs from the
output of this script.
"""

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "packaging/helm/gpuhook"
MANIFESTS = REPOSITORY / "packaging/kubernetes"
FILE = "gpuhook.yaml"
# A chart can read only its own files, so it has a copy.
RULES = REPOSITORY / "packaging/prometheus/gpuhook.rules.yml"
COPY = CHART / "files/gpuhook.rules.yml"
HEADER = """\
# Rendered from packaging/helm/gpuhook by scripts/lib/render_manifests.py: change the chart, and run
# that.
"""
# The fields of the Kubernetes API depend on this version.
KUBERNETES = "1.34"

_METRICS = (
    "--show-only=templates/service-account.yaml",
    "--show-only=templates/metrics.yaml",
    "--set=metrics.enabled=true",
)
_LABELS = (
    "--show-only=templates/service-account.yaml",
    "--show-only=templates/labels.yaml",
    "--set=labels.enabled=true",
)
# A folder -> Helm's options for it.
FOLDERS: dict[str, tuple[str, ...]] = {
    "base": ("--set=mode=runtime",),
    "overlays/cdi": ("--set=mode=cdi",),
    "overlays/cdi-pod": ("--set=mode=cdi-pod",),
    "overlays/dra": ("--set=mode=dra",),
    "overlays/environment": ("--set=mode=environment",),
    "overlays/labels": _LABELS,
    "overlays/labels-remove": (*_LABELS, "--set=mode=remove"),
    "overlays/metrics": _METRICS,
    "overlays/metrics-operator": (*_METRICS, "--set=metrics.serviceMonitor=true"),
    "overlays/mounts": ("--set=mode=mounts",),
    "overlays/mps": ("--set=mode=runtime", "--set=mps=true"),
    "overlays/nri": ("--set=mode=nri",),
    "overlays/remove": ("--set=mode=remove",),
}


def helm() -> str:
    """Return the path of Helm, which is downloaded if it is missing."""
    words = [str(REPOSITORY / "scripts/lib/helm")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def rendered(program: str, folder: str) -> str:
    """Return the text of a folder's file."""
    words = [program, "template", "gpuhook", str(CHART), "--namespace=gpuhook", "--no-hooks"]
    words += [f"--kube-version={KUBERNETES}", "--set=image.local=true", *FOLDERS[folder]]
    made = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line for line in map(str.rstrip, made.splitlines()) if line]
    lines = [line for line in lines if not line.startswith("# Source: ")]
    return HEADER + "\n".join(lines) + "\n"


def main() -> None:
    """Write all files again."""
    found = helm()
    COPY.write_text(RULES.read_text("utf-8"), "utf-8")
    for each in FOLDERS:
        (MANIFESTS / each / FILE).write_text(rendered(found, each), "utf-8")


if __name__ == "__main__":
    main()
