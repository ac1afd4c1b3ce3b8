"""The device plugin: hands this machine's accelerators to a Kubernetes cluster.

Two processes of one service. The *supervisor* (``service``) looks at the machine, asks drivers in
children of its own, and writes what there is as a ``state.State`` into a pipe whenever it changes;
it has no threads and imports no gRPC, so it may fork. The *server* (``server``), its child,
speaks with the kubelet over gRPC and answers from the last state that it read.

Nothing here is imported by the runtime or the hook. It needs ``gpuhook[kubernetes]``.
"""

INSTALL = (
    "Install both: pip install grpcio protobuf, with the pip beside gpuhook, or the packages "
    "python3-grpcio and python3-protobuf"
)
