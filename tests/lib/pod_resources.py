"""A kubelet that only reports which pods have devices (PodResources, v1), over real gRPC."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc
from wire import message

Given = tuple[str, str, str, str, tuple[str, ...]]  # namespace, pod, container, resource, ids


class PodResources:
    """A service on ``socket`` that returns ``given``, except while ``hangs`` is true."""

    def __init__(self, socket: Path, *given: Given) -> None:
        self.given = [*given]
        self.asked = threading.Semaphore(0)  # released once for each request
        self.hangs = False
        self._ends = threading.Event()
        handlers = {"List": grpc.unary_unary_rpc_method_handler(self._list)}
        service = grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers)
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix:{socket}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ends.set()
        self._server.stop(0).wait()

    def _list(self, request: bytes, context: Any) -> bytes:
        self.asked.release()
        if self.hangs:
            self._ends.wait()
        return message(*((1, _pod(*each)) for each in self.given))


def _pod(namespace: str, pod: str, container: str, resource: str, ids: tuple[str, ...]) -> bytes:
    devices = message((1, resource), *((2, each) for each in ids))
    return message((1, pod), (2, namespace), (3, message((1, container), (2, devices))))
