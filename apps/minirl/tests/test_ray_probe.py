import socket
import tempfile

import pytest

from minirl import ray_probe, socket_room
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


def test_a_temporary_directory_whose_name_is_too_long_for_rays_sockets(monkeypatch):
    """Such as one of 28 bytes, seen with Ray 2.60; one of 24 is not."""
    longest = f"/{'x' * (socket_room.room() - 1)}"
    assert 24 - 2 <= len(longest) < 28
    monkeypatch.setattr(tempfile, "tempdir", longest)
    ray_probe.check_cluster(ClusterConfig(), "minirl_slot", 3)
    monkeypatch.setattr(tempfile, "tempdir", f"{longest}x")
    with pytest.raises(ConfigError, match=f"TMPDIR={longest}x: at most {len(longest)} bytes"):
        ray_probe.check_cluster(ClusterConfig(), "minirl_slot", 3)
