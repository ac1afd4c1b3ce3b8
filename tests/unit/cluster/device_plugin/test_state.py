"""The device plugin's states, converted to lines and back."""

from gpuhook.cluster.device_plugin.state import DeviceSpec, PluginState, Resource, Unit


def test_a_state_survives_conversion_to_a_line_and_back() -> None:
    unit = Unit("GPU-1", "0", "nvidia.com/gpu=0", "GPU-1", (DeviceSpec("/a", "/b"),), 1, "Lost.")
    links = {"GPU-1": {"GPU-2": 3}}
    one = Resource("nvidia.com/gpu", "nvidia", "V", "/m", (unit,), 2, True, {"A": "b"}, links)
    state = PluginState((one, Resource("amd.com/gpu", "amd", "W", "", ())))
    assert PluginState.from_line(state.to_line()) == state
    assert state.to_line().count(b"\n") == 1


def test_offers_list_each_unit_or_each_of_its_replicas() -> None:
    units = tuple(Unit(name, name, f"a.b/c={name}", name) for name in ("x", "y"))
    one = Resource("a.b/c", "nvidia", "V", "", units)
    assert list(one.offers()) == ["x", "y"]
    two = Resource("a.b/c", "nvidia", "V", "", units, replicas=2)
    assert list(two.offers()) == ["x::0", "x::1", "y::0", "y::1"]
    assert two.offers()["y::1"] is units[1]
