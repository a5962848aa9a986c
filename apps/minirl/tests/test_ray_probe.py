import socket

import pytest

from minirl import ray_probe
from minirl.config import ClusterConfig
from rl_core.errors import ConfigError


def test_a_listener_that_is_no_ray_cluster_is_given_up(monkeypatch):
    """Ray alone would wait for it for minutes."""
    monkeypatch.setattr(ray_probe, "PROBE_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}: no Ray cluster answered within 2 s"):
            ray_probe.check_cluster(ClusterConfig(ray_address=address), "minirl_slot", 3)


def test_a_run_that_starts_its_own_ray_asks_nobody():
    ray_probe.check_cluster(ClusterConfig(), "minirl_slot", 3)
