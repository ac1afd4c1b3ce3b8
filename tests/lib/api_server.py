"""The tests' own API server, with the part of Kubernetes' API that ``gpuhook dra`` uses.

It has real connections with TLS and tokens, versions of objects, watches in chunks, and faults
in all of these. Its rules are those of Kubernetes' API conventions, and not gpuhook's.
"""

import contextlib
import copy
import functools
import json
import queue
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

TOKEN = "a.token-of.a-service-account"  # noqa: S105 - of a test
HANG, CUT, DRIP, GARBAGE = "hang", "cut", "drip", "garbage"
_KINDS = {
    "resourceslices": "ResourceSlice", "resourceclaims": "ResourceClaim", "nodes": "Node",
    "leases": "Lease", "daemonsets": "DaemonSet", "runtimeclasses": "RuntimeClass",
}  # fmt: skip


@dataclass
class Fault:
    """A fault in ``times`` requests of a method whose path contains a word."""

    what: int | str
    method: str = ""
    word: str = ""
    times: int = 1
    retry_after: str = ""

    def meets(self, method: str, path: str) -> bool:
        return self.times > 0 and self.method in ("", method) and self.word in path


@dataclass
class Watcher:
    """A watch: its resource, its node, and the events that are still to be sent."""

    resource: str
    node: str
    end: float  # by ``ApiServer.clock``, which a test can move
    events: "queue.SimpleQueue[bytes | None]" = field(default_factory=queue.SimpleQueue)


class ApiServer:
    """An API server's objects, faults and requests; ``asked`` has (method, path, query)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = {TOKEN}
        self.versions = ["v1"]
        self.release = ("1", "36")
        self.lacking: set[str] = set()  # fields of devices and slices whose feature gates are off
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.released = threading.Event()  # when set, requests that hang continue
        self.objects: dict[tuple[str, str, str], Object] = {}  # keys: resource, namespace, name
        self.version = 100
        self.floor = 0  # older history has been deleted
        self.history: list[tuple[int, str, str, Object]] = []
        self.watchers: list[Watcher] = []
        self.lock = threading.RLock()
        self.clock = 0.0  # seconds; tests move it to let watches end
        self.url = ""
        self._made = 0

    # What a test does -----------------------------------------------------------------------------

    def fail(self, what: int | str, method: str = "", word: str = "", **more: Any) -> Fault:
        """Make matching requests fail."""
        fault = Fault(what, method, word, **more)
        with self.lock:
            self.faults.append(fault)
        return fault

    def add(self, resource: str, name: str, given: Object, namespace: str = "") -> Object:
        """Add an object to the server."""
        kind = {"apiVersion": "v1", "kind": _KINDS[resource]}
        metadata = {"name": name, **given.get("metadata", {})}
        if namespace:
            metadata["namespace"] = namespace
        with self.lock:
            return self._keep(resource, {**kind, **given, "metadata": metadata}, "ADDED")

    def change(self, name: str, change: Callable[[Object], None]) -> None:
        """Change a slice like another client."""
        with self.lock:
            found = copy.deepcopy(self.objects["resourceslices", "", name])
            change(found)
            self._keep("resourceslices", found, "MODIFIED")

    def wipe(self, node: str = "", name: str = "") -> int:
        """Delete a node's slices as a starting kubelet does, or one slice; return how many."""
        with self.lock:
            gone = [
                key
                for key, each in self.objects.items()
                if key[0] == "resourceslices"
                and (each["spec"].get("nodeName") == node or key[2] == name)
            ]
            for key in gone:
                self._remove(key)
            return len(gone)

    def slices(self, node: str = "") -> list[Object]:
        """Return the existing slices, sorted by name."""
        with self.lock:
            found = [
                copy.deepcopy(each)
                for key, each in self.objects.items()
                if key[0] == "resourceslices"
            ]
        found = [each for each in found if not node or each["spec"]["nodeName"] == node]
        return sorted(found, key=lambda each: str(each["metadata"]["name"]))

    def count(self, method: str, word: str = "") -> int:
        """Return the number of requests of a method with a word in the path."""
        return sum(1 for asked in [*self.asked] if asked[0] == method and word in asked[1])

    def cut_watches(self, line: bytes = b"") -> None:
        """End all watches, in the middle of ``line`` if it is given."""
        with self.lock:
            for each in self.watchers:
                if line:
                    each.events.put(line)
                each.events.put(None)
            self.watchers = []

    def bookmark(self) -> None:
        """Send all watches a bookmark with the current version."""
        with self.lock:
            self.version += 1
            for each in self.watchers:
                kind = _KINDS[each.resource]
                given = {"kind": kind, "metadata": {"resourceVersion": str(self.version)}}
                each.events.put(_line("BOOKMARK", given))

    def pass_time(self, seconds: float) -> None:
        """Move the clock: watches whose time is over end, and the others get a bookmark."""
        with self.lock:
            self.clock += seconds
            for each in [*self.watchers]:
                if each.end <= self.clock:
                    each.events.put(None)
                    self.watchers.remove(each)
        self.bookmark()

    def forget(self) -> None:
        """Forget all earlier changes, and report that to the watches."""
        with self.lock:
            self.version += 1
            self.floor, self.history = self.version, []
            for each in self.watchers:
                each.events.put(_line("ERROR", _status(410, "Expired", "too old")))
                each.events.put(None)
            self.watchers = []

    # Objects --------------------------------------------------------------------------------------

    def _keep(self, resource: str, given: Object, what: str) -> Object:
        self.version += 1
        made = copy.deepcopy(given)
        metadata = made["metadata"]
        metadata["resourceVersion"] = str(self.version)
        if "uid" not in metadata:
            self._made += 1
            metadata["uid"] = f"uid-{self._made}"
        key = resource, metadata.get("namespace", ""), metadata["name"]
        self.objects[key] = made
        self._say(resource, what, made)
        return copy.deepcopy(made)

    def _remove(self, key: tuple[str, str, str]) -> None:
        self.version += 1
        gone = self.objects.pop(key)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._say(key[0], "DELETED", gone)

    def _say(self, resource: str, what: str, given: Object) -> None:
        self.history.append((self.version, resource, what, copy.deepcopy(given)))
        line = _line(what, given)
        for each in self.watchers:
            if each.resource == resource and _fits(given, each.node):
                each.events.put(line)

    def create(self, resource: str, given: Object) -> tuple[int, Object]:
        with self.lock:
            metadata = given["metadata"]
            if "name" not in metadata:
                self._made += 1
                base = metadata.pop("generateName")[:58]
                metadata["name"] = f"{base}{self._made:05d}"
            if (resource, "", metadata["name"]) in self.objects:
                return 409, _status(409, "AlreadyExists", "it is there already")
            return 201, self._keep(resource, self._accepted(given), "ADDED")

    def update(
        self, resource: str, name: str, given: Object, namespace: str = ""
    ) -> tuple[int, Object]:
        with self.lock:
            there = self.objects.get((resource, namespace, name))
            if there is None:
                return 404, _status(404, "NotFound", f"{name} not found")
            if given["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
                return 409, _status(409, "Conflict", "the object has been modified")
            if resource != "resourceslices":
                if given["spec"] != there.get("spec") and "generation" in there["metadata"]:
                    given["metadata"]["generation"] = there["metadata"]["generation"] + 1
                return 200, self._keep(resource, given, "MODIFIED")
            for fixed in ("driver", "nodeName"):
                if given["spec"].get(fixed) != there["spec"].get(fixed):
                    return 422, _status(422, "Invalid", f"spec.{fixed} is immutable")
            if given["spec"]["pool"]["name"] != there["spec"]["pool"]["name"]:
                return 422, _status(422, "Invalid", "spec.pool.name is immutable")
            return 200, self._keep(resource, self._accepted(given), "MODIFIED")

    def delete(
        self, resource: str, name: str, options: Object, namespace: str = ""
    ) -> tuple[int, Object]:
        with self.lock:
            there = self.objects.get((resource, namespace, name))
            if there is None:
                return 404, _status(404, "NotFound", f"{name} not found")
            if options.get("preconditions", {}).get("uid") not in (None, there["metadata"]["uid"]):
                return 409, _status(409, "Conflict", "the uid is another")
            self._remove((resource, namespace, name))
            return 200, _status(200, "", "")

    def patch(self, key: tuple[str, str, str], given: Object, manager: str) -> tuple[int, Object]:
        """Merge into a node's metadata, or apply a claim's status as one of several managers."""
        with self.lock:
            there = copy.deepcopy(self.objects.get(key))
            if there is None:
                return 404, _status(404, "NotFound", f"{key[2]} not found")
            if key[0] == "nodes":
                for part, changes in given["metadata"].items():
                    kept = {**(there["metadata"].get(part) or {}), **changes}
                    there["metadata"][part] = {k: v for k, v in kept.items() if v is not None}
                return 200, self._keep(key[0], there, "MODIFIED")
            if given["metadata"].get("uid", there["metadata"]["uid"]) != there["metadata"]["uid"]:
                return 409, _status(409, "Conflict", "the uid in the precondition is another")
            managers = there.setdefault("x-managers", {})
            managers[manager] = given["status"]["devices"]
            if "devices" not in self.lacking:
                every = [each for devices in managers.values() for each in devices]
                there.setdefault("status", {})["devices"] = every
            return 200, self._keep(key[0], there, "MODIFIED")

    def _accepted(self, given: Object) -> Object:
        """Return a slice as the server stores it.

        It lacks the fields whose gates are off, and has the server's spelling.
        """
        made: Object = _plain(copy.deepcopy(given))
        spec = made["spec"]
        if "sharedCounters" in self.lacking:
            spec.pop("sharedCounters", None)
        for each in spec.get("devices", []):
            device = each.get("basic", each)
            for name in self.lacking:
                device.pop(name, None)
            for taint in device.get("taints", []):
                taint.setdefault("timeAdded", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        return made

    def watch(self, resource: str, query: dict[str, str]) -> Watcher | None:
        """Return a watch with all changes since a version; None if they aren't known."""
        since = int(query.get("resourceVersion") or 0)
        with self.lock:
            if since < self.floor:
                return None
            end = self.clock + int(query.get("timeoutSeconds") or 3600)
            watcher = Watcher(resource, _node_of(query), end)
            for version, whose, what, given in self.history:
                if version > since and whose == resource and _fits(given, watcher.node):
                    watcher.events.put(_line(what, given))
            self.watchers.append(watcher)
            return watcher

    def listed(self, resource: str, query: dict[str, str]) -> Object:
        with self.lock:
            found = [
                copy.deepcopy(each)
                for key, each in self.objects.items()
                if key[0] == resource and _fits(each, _node_of(query))
            ]
            for each in found:  # Kubernetes omits both fields in a list's items
                each.pop("kind", None)
                each.pop("apiVersion", None)
            return {"items": found, "metadata": {"resourceVersion": str(self.version)}}


# HTTP ---------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    api: ApiServer
    server: Any

    def handle(self) -> None:
        try:
            self.request.do_handshake()
            super().handle()
        except OSError:  # the client closed the connection, or rejected the certificate
            self.close_connection = True

    def log_message(self, *words: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_PATCH(self) -> None:
        self._serve("PATCH")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        api, parts = self.api, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with api.lock:
            api.asked.append((method, parts.path, query))
            fault = next((each for each in api.faults if each.meets(method, self.path)), None)
            if fault is not None:
                fault.times -= 1
        if not self._may():
            self._answer(401, _status(401, "Unauthorized", "Unauthorized"))
        elif fault is not None:
            self._go_wrong(fault)
        elif query.get("watch") == "true":
            self._watch(parts.path, query)
        else:
            self._answer(*self._done(method, parts.path, query, json.loads(raw or b"{}")))

    def _may(self) -> bool:
        word = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return word in self.api.tokens or bool(self.request.getpeercert())

    def _done(
        self, method: str, path: str, query: dict[str, str], body: Object
    ) -> tuple[int, Object]:
        api = self.api
        if path == "/version":
            return 200, {"major": api.release[0], "minor": api.release[1]}
        if path == "/apis/resource.k8s.io":
            named = [{"version": each} for each in api.versions]
            return (200, {"versions": named}) if named else (404, _status(404, "NotFound", path))
        words = path.strip("/").split("/")
        if words[0] == "apis" and words[2] not in api.versions:
            return 404, _status(404, "NotFound", "the server could not find the requested resource")
        rest = words[3:] if words[0] == "apis" else words[2:]
        namespace = ""
        if rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        resource, name = rest[0], rest[1] if len(rest) > 1 else ""
        key = resource, namespace, name
        if method == "GET" and not name:
            return 200, api.listed(resource, query)
        if method == "GET":
            found = api.objects.get(key)
            return (200, found) if found else (404, _status(404, "NotFound", f"{name} not found"))
        if method == "POST":
            return api.create(resource, body)
        if method == "PUT":
            return api.update(resource, name, body, namespace)
        if method == "PATCH":
            return api.patch(key, body, query.get("fieldManager", ""))
        return api.delete(resource, name, body, namespace)

    def _answer(self, status: int, given: Object, retry_after: str = "") -> None:
        raw = json.dumps(given).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(raw)

    def _go_wrong(self, fault: Fault) -> None:
        if isinstance(fault.what, int):
            given = _status(fault.what, "Broken", f"broken for {self.headers['Authorization']}")
            self._answer(fault.what, given, fault.retry_after)
            return
        self.close_connection = True
        if fault.what == HANG:
            self.api.released.wait(60)
        elif fault.what == CUT:
            self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n{"metadata": {')
        elif fault.what == GARBAGE:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<html><p>")
        else:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not self.api.released.wait(0.05):
                self.wfile.write(b" ")

    def _watch(self, path: str, query: dict[str, str]) -> None:
        watcher = self.api.watch(path.rpartition("/")[2], query)
        if watcher is None:
            self._answer(410, _status(410, "Expired", "too old resource version"))
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        end = time.monotonic() + int(query.get("timeoutSeconds") or 3600)
        self.close_connection = True
        with contextlib.suppress(queue.Empty):
            while event := watcher.events.get(timeout=max(0.01, end - time.monotonic())):
                half = len(event) // 2  # clients must be able to read events in pieces
                for piece in (event[:half], event[half:]):
                    self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if event is None:
                return
        self.wfile.write(b"0\r\n\r\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about clients that have disconnected."""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    """Serve until the end of the block; ``folder`` gets the certificates, and a token's file."""
    shutil.copytree(_certified().name, folder, dirs_exist_ok=True)
    (folder / "token").write_text(f"{TOKEN}\n")
    api = ApiServer(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    handler = type("Bound", (Handler,), {"api": api})
    server = _Server(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    api.url = f"https://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield api
    finally:
        api.released.set()
        api.cut_watches()
        server.shutdown()
        thread.join()
        server.server_close()


@functools.cache
def _certified() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the certificates of all servers of this process, made once."""
    folder = tempfile.TemporaryDirectory(prefix="certificates-")
    certify(Path(folder.name))
    return folder


def certify(folder: Path) -> None:
    """Make an authority (ca), and its certificates for a server at 127.0.0.1 and for a client."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl(
        "req",
        "-x509",
        *key,
        "-days",
        "2",
        "-subj",
        "/CN=authority",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
    )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:kubernetes")
    for name in ("server", "client"):
        openssl(
            "req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"
        )
        words = ["-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
        openssl("x509", "-req", *words, "-days", "2", "-extfile", "names", "-out", f"{name}.crt")


# Small things -------------------------------------------------------------------------------------


def _line(what: str, given: Object) -> bytes:
    return json.dumps({"type": what, "object": given}).encode() + b"\n"


def _status(code: int, reason: str, message: str) -> Object:
    return {"kind": "Status", "code": code, "reason": reason, "message": message}


def _node_of(query: dict[str, str]) -> str:
    return query.get("fieldSelector", "").partition("spec.nodeName=")[2]


def _fits(given: Object, node: str) -> bool:
    return not node or given.get("spec", {}).get("nodeName") == node


def _plain(given: Any) -> Any:
    """Return an object without empty lists and tables, and quantities as Kubernetes writes them."""
    if isinstance(given, list):
        return [_plain(each) for each in given]
    if not isinstance(given, dict):
        return given
    kept = {key: _plain(each) for key, each in given.items() if each not in ([], {}, None)}
    value = kept.get("value")
    if isinstance(value, str) and value.isdigit() and value.endswith("000"):
        kept["value"] = f"{value[:-3]}k"
    return kept
