"""A plugin of the engine's (NRI, the Node Resource Interface): pods' devices without a runtime.

The engine asks it about each container that a pod gets, and adds what it answers: no runtime and
no RuntimeClass of ours is needed, and no file of the engine's is changed. Root's process has no
thread; a child without privileges parses what the engine sends (``parser``), and with a gate
another asks the kubelet. ``transport`` is the wire, ``service`` the conversation, ``answer`` what a
container gets.
"""

SOCKET = "/var/run/nri/nri.sock"  # the engines' usual one
PROCESS = "gpuhook-nri"  # what the process calls itself
UNIT = "/etc/systemd/system/gpuhook-nri.service"  # as the page and the installer have it
