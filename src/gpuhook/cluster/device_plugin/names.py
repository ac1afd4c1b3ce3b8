"""Valid names of resources, by the rules of the kubelet and of NVIDIA's device plugin."""

import re

from gpuhook.base.errors import shown

_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LONGEST = 63  # characters after the slash
_LONGEST_DOMAIN = 253 - len("requests.")  # quotas put that in front
_OWN_DOMAIN = "kubernetes.io"
_USUAL_DOMAIN = "nvidia.com"


def wrong_name(name: str) -> str:
    """Return why the kubelet rejects a resource of that name, "" if it accepts it."""
    domain, slash, rest = name.partition("/")
    if not slash:
        return "it has no domain before a slash"
    if domain == _OWN_DOMAIN or domain.endswith(f".{_OWN_DOMAIN}"):
        return f"{_OWN_DOMAIN} is Kubernetes' own domain"
    if len(domain) > _LONGEST_DOMAIN or not _DOMAIN.fullmatch(domain):
        return f"{shown(domain)} isn't a domain in lower case"
    if len(rest) > _LONGEST:
        return f"it has more than {_LONGEST} characters after the slash"
    if not _NAME.fullmatch(rest):
        return "after the slash only letters, digits and -_. are allowed, no -_. first or last"
    return ""


def full_name(text: str) -> str:
    """Return the full name of a resource in a file: NVIDIA's, if it names no domain.

    ValueError, with a sentence, for an invalid name. An NVIDIA resource has at most 63 characters
    in all, in lower case.
    """
    name = text if "/" in text else f"{_USUAL_DOMAIN}/{text}"
    domain, _, rest = name.partition("/")
    wrong = wrong_name(name)
    if not wrong and domain == _USUAL_DOMAIN and len(name) > _LONGEST:
        wrong = f"it has more than {_LONGEST} characters"
    if not wrong and domain == _USUAL_DOMAIN and not _DOMAIN.fullmatch(rest):
        wrong = "after the slash only lower-case letters, digits and -. are allowed"
    if wrong:
        raise ValueError(f"{shown(text)} can't be a resource: {wrong}")
    return name
