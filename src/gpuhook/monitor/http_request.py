"""HTTP/1.0 and 1.1 requests, as far as an exporter needs them: bytes in, responses out. Pure."""

import re

MAX_BYTES = 1 << 14  # bytes of a request
END = re.compile(rb"\r?\n\r?\n")  # RFC 9112, 2.2: a lone line feed may end a line
_VERSION = re.compile(rb"HTTP/1\.[0-9]", re.IGNORECASE)
_VISIBLE = bytes(range(0x21, 0x7F))
_BEFORE_HOST = b"http://"

PLAIN = "text/plain; charset=utf-8"
_DENIED = "401 Unauthorized"
Answer = tuple[str, str, bytes]  # status, content type, body
DENIAL: Answer = _DENIED, PLAIN, b"This needs a valid user name and password.\n"
FAILURE: Answer = (
    "500 Internal Server Error",
    PLAIN,
    b"The metrics could not be read; the service's log has the reason.\n",
)


def refusal(request: bytes) -> Answer | None:
    """Return the error response if the received bytes aren't a valid request, else None."""
    if len(request) > MAX_BYTES:
        return "431 Request Header Fields Too Large", PLAIN, b"This request is too long.\n"
    if first(request) is None:
        return "400 Bad Request", PLAIN, b"This isn't an HTTP/1.0 or 1.1 request.\n"
    return None


def elsewhere(request: bytes) -> Answer | None:
    """Return the error response to a request for anything but the metrics, else None."""
    method, path = first(request) or (b"", b"")
    if method not in (b"GET", b"HEAD"):
        return "405 Method Not Allowed", PLAIN, b"This only answers GET.\n"
    if path.partition(b"?")[0] != b"/metrics":
        return "404 Not Found", PLAIN, b"The metrics are at /metrics.\n"
    return None


def written(answer: Answer, *, with_body: bool) -> bytes:
    """Encode a response."""
    status, content_type, body = answer
    head = (
        f"HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n"
    )
    if status == _DENIED:
        head += 'WWW-Authenticate: Basic realm="gpuhook", charset="UTF-8"\r\n'
    return f"{head}\r\n".encode() + (body if with_body else b"")


def has_body(request: bytes) -> bool:
    """Tell whether the response to a request has a body."""
    return not request.startswith(b"HEAD ")


def is_whole(request: bytes) -> bool:
    """Tell whether enough of a request was received for a response."""
    if len(request) > MAX_BYTES or END.search(request):
        return True
    return b"\n" in request and first(request) is None


def first(request: bytes) -> tuple[bytes, bytes] | None:
    """Return the method and the path of a request line, None if it is invalid.

    The path may be preceded by the host (RFC 9112, 3.2.2).
    """
    line, end, _ = request.partition(b"\n")
    words = line.removesuffix(b"\r").split(b" ")
    if not end or len(words) != 3 or not _VERSION.fullmatch(words[2]):
        return None
    method, path, _ = words
    if not method or (method + path).translate(None, _VISIBLE):
        return None
    if path[: len(_BEFORE_HOST)].lower() == _BEFORE_HOST:
        _, slash, rest = path[len(_BEFORE_HOST) :].partition(b"/")
        path = slash + rest
    return method, path


def header(request: bytes, name: bytes) -> str:
    """Return the values of a header, joined by commas."""
    lines = [line.partition(b":") for line in END.split(request, 1)[0].split(b"\n")[1:]]
    values = [value.strip() for key, _, value in lines if key.lower() == name]
    return b",".join(values).decode("latin-1")
