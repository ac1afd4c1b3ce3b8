"""Code that services and commands share: host, kubelet, drivers' errors, child processes."""

INSTALL = (
    "Install both: pip install grpcio protobuf, with gpuhook's pip, or the packages "
    "python3-grpcio and python3-protobuf"
)
DRIVER_ROOT_IN_POD = "/driver-root"  # where a service in a pod has the host's driver root
