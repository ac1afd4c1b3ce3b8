"""Command lines and specs for the launcher, as property tests and the fuzzer make them up."""

import random

from hypothesis import strategies as st

GLOBALS = (
    "--root", "--log", "--log-format", "--log-level", "--rootless", "--criu", "--cgroup-manager",
    "--debug", "--systemd-cgroup", "-root", "--unknown", "--root=/x", "--log=create", "-v",
)  # fmt: skip
OPTIONS = (
    "--bundle", "-b", "--bundle=/b", "-b=/b", "-b/b", "--pid-file", "--pid-file=/p", "--detach",
    "--console-socket", "--no-pivot", "--config", "-f", "--preserve-fds", "-d", "--keep", "--",
)  # fmt: skip
VERBS = ("create", "run", "start", "delete", "state", "exec", "kill", "restore", "what")
WORDS = ("", "a", "create", "start", "two words", "new\nline", "*", "$(id)", "--bundle", "é", "\\")
_any = st.lists(st.sampled_from((*GLOBALS, *OPTIONS, *VERBS, *WORDS)), max_size=9)
_likely = st.builds(
    lambda before, verb, after: [*before, verb, *after],
    st.lists(st.sampled_from((*GLOBALS, "/x")), max_size=4),
    st.sampled_from(VERBS),
    st.lists(st.sampled_from((*OPTIONS, *WORDS, "/b")), max_size=5),
)
command_lines = _any | _likely


def escaped(text: str, seed: int) -> str:
    """Write a JSON string with unnecessary escapes."""
    chance = random.Random(seed)  # noqa: S311 - to spell, not to hide
    result = ""
    for char in text:
        kind = chance.choice(("plain", "plain", "lower", "upper"))
        if kind == "plain" and char not in '"\\':
            result += "\\/" if char == "/" and chance.random() < 0.3 else char
        else:
            number = f"{ord(char):04x}"
            result += "\\u" + (number.upper() if kind == "upper" else number)
    return f'"{result}"'


names = st.sampled_from(
    ("NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION", "DOCKER_RESOURCE_GPU", "other", "PATH", "NVIDIA_VI")
)
values = st.sampled_from(("all", "0", "12.2", "void", "", "nvidia.com/gpu=0"))
destinations = st.sampled_from(
    ("/var/run/nvidia-container-devices/all", "/var/run/./nvidia-container-devices//0", "/x")
)
annotations = st.sampled_from(("cdi.k8s.io/x", "a.b/c-d", "x/y", "cdi.k8s"))


@st.composite
def _specs(draw: st.DrawFn) -> str:
    """Return the text of a config.json with a few places where devices can be asked for."""
    seed = draw(st.integers(0, 1 << 32))
    env = draw(st.lists(st.tuples(names, values), max_size=3))
    mounts = draw(st.lists(destinations, max_size=2))
    notes = draw(st.lists(annotations, max_size=2))
    entries = ",".join(escaped(f"{name}={value}", seed) for name, value in env)
    points = ",".join(
        f'{{"source":{escaped("/dev/null", seed)},"destination":{escaped(point, seed)}}}'
        for point in mounts
    )
    pairs = ",".join(f'{escaped(key, seed)}:"nvidia.com/gpu=0"' for key in notes)
    return f'{{"process":{{"env":[{entries}]}},"mounts":[{points}],"annotations":{{{pairs}}}}}'


specs = _specs()
