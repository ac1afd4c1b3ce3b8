"""Check that commands and files in the pages about clusters fit the shipped objects."""

import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from harness.commands import run
from harness.helm import fetch
from harness.images import REPOSITORY
from harness.manifests import MANIFESTS, VARIANTS, Document, containers, pod_of, render

DOCS = REPOSITORY / "docs"
NAMESPACE = "gpuhook"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`((?:kubectl|helm) [^`]+)`")
_COMMENT = re.compile(r"(^|\s)#.*$")
_NAMED = re.compile(r"^# ([a-z-]+\.(?:yaml|toml))$", re.MULTILINE)
# Words of a command line that the reader replaces.
_PLACEHOLDER = re.compile(r"[A-Z]+")
KINDS = {
    "daemonset": "DaemonSet", "ds": "DaemonSet", "deployment": "Deployment",
    "runtimeclass": "RuntimeClass", "namespace": "Namespace", "serviceaccount": "ServiceAccount",
    "service": "Service", "pod": "Pod", "pods": "Pod", "node": "Node", "nodes": "Node",
    "events": "Event", "resourceslices": "ResourceSlice", "lease": "Lease",
    "networkpolicy": "NetworkPolicy",
}  # fmt: skip
WITHOUT_NAMESPACE = ("RuntimeClass", "Namespace", "Node", "ResourceSlice")
READERS_OWN = ("Pod", "Node", "Event", "ResourceSlice")  # made by the cluster or by the reader
VALUED = ("-n", "--namespace", "-c", "-k", "-f", "-o", "-l", "--timeout", "--for", "--set")


def pages() -> list[Path]:
    """Return the pages with a kubectl or helm command."""
    found = sorted([*DOCS.glob("**/*.md"), REPOSITORY / "README.md"])
    return [each for each in found if re.search(r"\b(kubectl|helm) ", each.read_text())]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the command lines of a page; a span without a target is only a mention."""
    text = page.read_text()
    for kind, block in _BLOCK.findall(text):
        if kind == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                for part in _COMMENT.sub("", line).split(" | "):
                    words = shlex.split(part)
                    if words[:1] in (["kubectl"], ["helm"]):
                        yield words
    for span in _SPAN.findall(_BLOCK.sub("", text)):
        words = shlex.split(span)
        if len(positional(words)) > 3 or "-k" in words[:-1]:
            yield words


def positional(words: list[str]) -> list[str]:
    """Return a command line without options and their values."""
    found: list[str] = []
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            found.append(word)
        is_value = word in VALUED
    return found


def option(words: list[str], *names: str) -> str | None:
    """Return an option's value."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else words[at + 1]
    return None


@cache
def shipped() -> dict[tuple[str, str], Document]:
    """Return the shipped objects of all folders by kind and name."""
    documents = [each for variant in VARIANTS for each in render(variant)]
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def check_kubectl(words: list[str]) -> None:
    """Fail unless the objects in a command are shipped, in the namespace in the command."""
    mine, _, inner = (list(part) for part in _split(words, "--"))
    verb, *rest = positional(mine)[1:]
    folder = option(mine, "-k")
    if folder is not None:
        # Deleting another folder would delete the namespace and everything in it.
        assert verb != "delete" or os.path.basename(folder) in ("remove", "dra"), folder
        assert (REPOSITORY / folder / "kustomization.yaml").is_file(), folder
        render(os.path.relpath(REPOSITORY / folder, MANIFESTS))
        return
    if verb in ("apply", "delete") and option(mine, "-f"):
        return
    rest = rest[1:] if verb == "rollout" else rest
    if verb in ("logs", "exec"):
        rest = rest if "/" in rest[0] else ["pod", *rest]
    kind, *names = rest[0].split("/") if "/" in rest[0] else rest
    label = option(mine, "-l")
    if label is not None and verb == "delete":
        assert option(mine, "-n", "--namespace") == NAMESPACE, f"-n {NAMESPACE}"
        for each in kind.split(","):
            assert KINDS[each] in _kinds_with(*label.split("=")), f"no {each} has {label}"
        return
    is_namespaced = KINDS[kind] not in WITHOUT_NAMESPACE
    name = names[0] if names else ""
    theirs = option(mine, "-n", "--namespace")
    if KINDS[kind] not in READERS_OWN:
        assert (KINDS[kind], name) in shipped(), f"no {kind} {name}"
        metadata = shipped()[KINDS[kind], name]["metadata"]
        assert metadata.get("namespace") == theirs, f"{kind} {name} is in {metadata}"
    elif _PLACEHOLDER.fullmatch(name) or not name:
        assert (theirs == NAMESPACE) == is_namespaced, f"-n {NAMESPACE}"
    container = option(mine, "-c")
    if container is not None:
        sets = [each for each in shipped().values() if each["kind"] == "DaemonSet"]
        assert container in {name for each in sets for name in containers(pod_of(each))}
    if inner:
        check_program(inner)


def _kinds_with(key: str, value: str) -> set[str]:
    """Return the kinds of shipped objects with a label."""
    return {
        kind
        for (kind, _), each in shipped().items()
        if each["metadata"].get("labels", {}).get(key) == value
    }


def _split(words: list[str], at: str) -> tuple[list[str], list[str], list[str]]:
    index = words.index(at) if at in words else len(words)
    return words[:index], words[index : index + 1], words[index + 1 :]


def check_program(words: list[str]) -> None:
    """Fail unless the image has the program and the program has the options."""
    assert words[0] == "/usr/bin/gpuhook", "the image has no other program of ours, and no shell"
    known = run([REPOSITORY / ".venv/bin/gpuhook", words[1], "--help"]).ok().stdout
    for word in words[2:]:
        assert word.partition("=")[0] in known


def check_helm(words: list[str]) -> None:
    """Fail unless Helm can run the command in the namespace of the manifests."""
    verb, release, *charts = positional(words)[1:]
    assert release == "gpuhook"
    assert option(words, "--namespace", "-n") == NAMESPACE, "--namespace gpuhook"
    if verb in ("install", "upgrade"):
        [chart] = charts
        sets = [f"--set={value}" for value in _values(words, "--set")]
        made = run([fetch(), "template", "gpuhook", REPOSITORY / chart, *sets])
        # The reader must name a registry, or state that the nodes have the image.
        assert made.status == 0 or "no registry has localhost/gpuhook" in made.stderr, made
    else:
        assert (verb, charts) in (("uninstall", []), ("test", []))


def _values(words: list[str], name: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == name]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_documented_commands_are_valid(page: Path) -> None:
    before: list[str] = []
    for words in commands(page):
        check = {"kubectl": check_kubectl, "helm": check_helm}[words[0]]
        try:
            check(words)
            before.append(" ".join(words))
            if words[:2] == ["helm", "install"]:
                made = "kubectl apply -k packaging/kubernetes/namespace"
                assert made in before, "the namespace isn't there, or forbids the pods"
        except Exception as error:
            raise AssertionError(f"{page.name}: {' '.join(words)}: {error}") from error


def test_documented_commands_are_found() -> None:
    found = [" ".join(words) for page in pages() for words in commands(page)]
    assert "kubectl apply -k packaging/kubernetes/overlays/cdi" in found
    assert len(found) > 15


@pytest.mark.parametrize(
    "line",
    [
        "kubectl rollout restart daemonset/gpuhook-dra",
        "kubectl -n gpuhook delete daemonset gpuhook-other",
        "kubectl -n other delete daemonset gpuhook",
        "kubectl -n gpuhook delete runtimeclass gpu-py",
        "kubectl get pods",
        "kubectl -n gpuhook logs POD -c other",
        "kubectl -n gpuhook exec POD -c dra -- /usr/bin/gpuhook device-plugin --never",
        "kubectl apply -k packaging/kubernetes/overlays/other",
        "kubectl delete -k packaging/kubernetes/overlays/metrics",
        "kubectl -n gpuhook delete lease -l app.kubernetes.io/name=gpuhook-metrics",
        "kubectl -n other delete service -l app.kubernetes.io/name=gpuhook-metrics",
        "helm install gpuhook packaging/helm/gpuhook",
        "helm install gpuhook packaging/helm/gpuhook --namespace gpuhook --set mode=other",
    ],
)
def test_wrong_commands_are_detected(line: str) -> None:
    words = shlex.split(line)
    with pytest.raises((AssertionError, KeyError)):
        {"kubectl": check_kubectl, "helm": check_helm}[words[0]](words)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_documented_folders_exist(page: Path) -> None:
    for name in re.findall(r"\b((?:overlays|components)/[a-z0-9-]+)", page.read_text()):
        assert (MANIFESTS / name / "kustomization.yaml").is_file(), name


# Files --------------------------------------------------------------------------------------------


def pods(text: str) -> Iterator[tuple[Document, str]]:
    """Yield the pods of a page, each with the page's text before it."""
    for match in _BLOCK.finditer(text):
        if match[1] == "yaml":
            for each in yaml.safe_load_all(match[2]):
                if isinstance(each, dict) and "containers" in (each.get("spec") or ()):
                    yield each, text[: match.end()]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_documented_runtime_classes_exist_when_pods_use_them(page: Path) -> None:
    """The RuntimeClass must be in the folder that the page applied last, or in the page's text."""
    for pod, before in pods(page.read_text()):
        name = pod["spec"].get("runtimeClassName")
        if name is None:
            continue
        applied = re.findall(r"^kubectl apply -k packaging/kubernetes/(\S+)", before, re.MULTILINE)
        objects = render(applied[-1]) if applied else []
        written = f"kind: RuntimeClass\nmetadata:\n  name: {name}\n" in before
        classes = [each for each in objects if each["kind"] == "RuntimeClass"]
        assert written or name in [each["metadata"]["name"] for each in classes], pod


def examples() -> list[tuple[str, str]]:
    """Return the kustomizations of the pages, each with the files up to the next heading."""
    return [
        (f"{page.stem}: {section.splitlines()[0]}", section)
        for page in pages()
        for section in re.split(r"^#+ (?!\w+\.)", page.read_text(), flags=re.MULTILINE)
        if "```yaml\n# kustomization.yaml\n" in section
    ]


@pytest.mark.parametrize(("name", "section"), examples(), ids=lambda value: value[:40])
def test_documented_kustomizations_render(name: str, section: str, tmp_path: Path) -> None:
    """kubectl must print no warning; a file that isn't in the page is replaced by an empty one."""
    assert name
    folder = tmp_path / "overlay"
    folder.mkdir()
    place = os.path.relpath(REPOSITORY, folder)
    for _, block in _BLOCK.findall(section):
        if named := _NAMED.match(block):
            text = block.replace("- gpuhook/packaging", f"- {place}/packaging")
            (folder / named[1]).write_text(text)
    made = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for each in (*made.get("configMapGenerator", []), *made.get("secretGenerator", [])):
        for file in each["files"]:
            (folder / file).touch()
    assert len(render(folder)) > 1


def test_documented_kustomizations_are_found() -> None:
    assert len(examples()) >= 4
