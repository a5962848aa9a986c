import shutil
import subprocess

import pytest

from minirl import ray_watch
from minirl.ray_launcher import MemberDiedError, ready


@pytest.fixture
def head(tmp_path):
    """A living process with the name of Ray's."""
    program = tmp_path / "gcs_server"
    program.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([program, "60"]) as process:
        yield process
        process.kill()
    ray_watch.forget()


def test_whoever_waits_hears_that_ray_is_gone(head):
    """A whole run whose Ray was killed ended so; Ray alone would have said nothing for a minute."""
    ray_watch.watch()
    assert ray_watch.dead() is None
    head.kill()
    head.wait()
    assert ray_watch.dead() == "gcs_server"
    with pytest.raises(MemberDiedError, match="Ray's gcs_server died"):
        ready([], 1.0)
    ray_watch.forget()
    assert ray_watch.dead() is None
