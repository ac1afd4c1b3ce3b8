"""The chart in packaging/helm as Helm renders it."""

from pathlib import Path

import yaml

from harness.commands import Result, run
from harness.images import REPOSITORY
from harness.manifests import Document

CHART = REPOSITORY / "packaging/helm/gpuhook"


def fetch() -> Path:
    """Return the path of the program helm, which is downloaded if it is missing."""
    return Path(run([REPOSITORY / "scripts/lib/helm"], timeout=600.0).ok().stdout.strip())


def helm(action: str, *words: str | Path) -> Result:
    """Run a helm command on the chart, for a release with the same name as its namespace."""
    release = ["gpuhook"] if action == "template" else []
    return run(
        [fetch(), action, *release, CHART, "--namespace=gpuhook", "--set=image.local=true", *words]
    )


def rendered(*words: str | Path) -> list[Document]:
    """Return the objects that Helm renders from the chart, without its hooks.

    A warning is an error.
    """
    return _documents("--no-hooks", *words)


def hooks(*words: str | Path) -> list[Document]:
    """Return the objects that Helm creates only for its test and before it uninstalls."""
    every = _documents(*words)
    return [each for each in every if "helm.sh/hook" in str(each["metadata"].get("annotations"))]


def _documents(*words: str | Path) -> list[Document]:
    done = helm("template", *words).ok()
    assert done.stderr == ""
    return [each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each]
