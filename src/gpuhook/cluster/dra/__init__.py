"""``gpuhook dra``: devices for claims, via Kubernetes' Dynamic Resource Allocation (DRA).

The *supervisor* (``service``) monitors the host, and does each claim's work in a child
(``work``). It has no threads and doesn't import gRPC, so it may fork. The *server* (``server``),
its child, talks to the kubelet; ``publish``, a thread of the server, publishes the devices.
"""
