"""Where seeds do not count one line says so, at the first that is given.

That an engine asks is in test_engine.
"""

from rl_rollout_sglang.seed_notice import SeedNotice


def lines(caplog, honoured, *seeds):
    caplog.clear()
    notice = SeedNotice(lambda: honoured)
    for seed in seeds:
        notice.see(seed)
    return [record.getMessage() for record in caplog.records]


def test_one_line_says_that_seeds_do_not_count(caplog):
    [line] = lines(caplog, False, None, 0, 5, 5)
    assert "ignores the seeds" in line
    assert "enable_deterministic_inference" in line


def test_there_is_no_line_without_a_seed_or_where_they_count(caplog):
    assert lines(caplog, False, None, None) == []
    assert lines(caplog, True, 0, 5) == []
