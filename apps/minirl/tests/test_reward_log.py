"""What a reward function printed, where it cannot be kept."""

from pathlib import Path

from minirl import reward_log as module
from minirl.reward_log import reward_log


def test_a_log_that_cannot_be_moved_ends_no_run(monkeypatch):
    told = []
    monkeypatch.setattr(module._logger, "warning", lambda *parts: told.append(parts))
    with reward_log() as log:
        log.path.write_text("printed")
        log.target = Path("/dev/null/reward.log")
    assert len(told) == 1
    assert not log.path.exists()
