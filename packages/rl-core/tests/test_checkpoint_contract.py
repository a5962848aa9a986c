"""The contract of checkpoint engines passes the loopback engine, and fails every defect of it."""

import re
from pathlib import Path
from typing import ClassVar

import pytest

from rl_core.testing.channel_contract import ChannelContract
from rl_core.testing.checkpoint_contract import CheckpointCapability, CheckpointEngineContract
from rl_core.testing.checkpoint_defects import Defect
from rl_core.testing.checkpoint_faults import CheckpointFault, FaultHook
from rl_core.testing.protocol_defects import patched
from rl_core.testing.thread_launcher import ThreadLauncher

BACKEND = "rl_core.testing.checkpoint_defects:LOOPBACK"
FAULTS = "rl_core.testing.loopback_faults"
MISCOPY = "rl_core.testing.segment_faults:miscopy"
ONE_PROCESS = "the ranks are threads of one process"


class TestLoopback(CheckpointEngineContract, ChannelContract):
    backend = BACKEND
    lacks: ClassVar = {
        CheckpointCapability.BOUNDED_MEMORY: "every segment is copied into a queue",
    }
    fault_deadline_s = 2.0
    faults: ClassVar = {
        CheckpointFault.MISCOPIED: FaultHook("sender 0", MISCOPY),
        CheckpointFault.CORRUPTED: FaultHook("sender 0", f"{FAULTS}:corrupt"),
        CheckpointFault.TRUNCATED: FaultHook("sender 0", f"{FAULTS}:truncate"),
        CheckpointFault.MISSING: FaultHook("sender 0", f"{FAULTS}:lose"),
    }
    not_applicable: ClassVar = dict.fromkeys(
        [
            "test_sender_dies",
            "test_receiver_dies",
            "test_receiver_dies_in_the_last_lease",
            "test_rank_is_gone_before_the_group_is_built",
            "test_nothing_piles_up",
            "test_shutdown_gives_everything_back",
            "test_listens_on_its_own_interface",
        ],
        ONE_PROCESS,
    )

    @pytest.fixture(scope="class")
    def launcher(self):
        return ThreadLauncher()


FOUND_BY = {
    Defect.ENQUEUED: ("test_weights_arrive_bit_exact[larger_than_a_bucket]", "DigestMismatch"),
    Defect.UNORDERED: ("test_weights_arrive_bit_exact[many_buckets]", "contents|digest"),
    Defect.EARLY_ACK: ("test_sender_ends_after_the_last_reader", "still reading"),
    Defect.LATE_WRITER: (
        "test_lease_is_untouched_until_left",
        "inside an open lease|differs from what was sent",
    ),
    Defect.UNALIGNED: ("test_weights_arrive_bit_exact[every_dtype]", "foreign error|Foreign"),
    Defect.OVERSIZED: ("test_weights_arrive_bit_exact[larger_than_a_bucket]", "raise the bucket"),
    Defect.LOST_METADATA: ("test_weights_arrive_bit_exact[every_dtype]", "deadline|announced"),
    Defect.NOTHING_MOVED: ("test_weights_arrive_bit_exact[every_dtype]", "DigestMismatch"),
    Defect.SWALLOWED: ("test_weights_arrive_bit_exact[many_buckets]", "Error"),
    Defect.IGNORED_STATUS: ("test_weights_arrive_bit_exact[many_buckets]", "DigestMismatch"),
    Defect.XOR_DIGEST: ("test_weights_arrive_bit_exact[every_dtype]", "DigestMismatch"),
    Defect.ANY_VERSION: ("test_old_and_repeated_versions_are_refused", "StaleVersionError"),
    Defect.UNDRAINED: ("test_consumer_fails", "left its stream"),
    Defect.REPEATED: ("test_next_syncs_over_the_same_group", "DigestMismatch"),
    Defect.BARE_TIMEOUT: ("test_damage_on_the_way[missing]", "is not named in"),
    Defect.SHORT_READ: ("test_damage_on_the_way[truncated]", "the connection broke off"),
    Defect.UNSIGNED: ("test_forged_message_of_a_member[wrongly_signed]", "should have ended"),
    Defect.PATIENT: ("test_only_receiver_stalls", "waited until the receiver woke up"),
    Defect.LATE_DIGEST: ("test_damage_on_the_way[miscopied]", "should have ended"),
    Defect.UNCOUNTED_ACKS: ("test_forged_bucket_of_a_member[ahead]", "should have ended"),
    Defect.UNREAD_CONTENTS: ("test_forged_bucket_of_a_member[other_names]", "should have ended"),
    Defect.ANY_TRAILER: (
        "test_forged_message_of_a_member[other_digest_at_the_end]",
        "should have ended",
    ),
    Defect.ANY_KIND: ("test_forged_message_of_a_member[no_digests]", "should have ended"),
    Defect.MALFORMED: ("test_forged_message_of_a_member[malformed]", "foreign error"),
}

TEMPLATE = """
import pytest
from rl_core.testing.channel_contract import ChannelContract
from rl_core.testing.checkpoint_contract import CheckpointEngineContract
from rl_core.testing.checkpoint_defects import Defect
from rl_core.testing.checkpoint_faults import CheckpointFault, FaultHook
from rl_core.testing.protocol_defects import patched
from rl_core.testing.thread_launcher import ThreadLauncher


class TestDefect(CheckpointEngineContract, ChannelContract):
    backend = "{backend}"
    faults = {{
        CheckpointFault.MISCOPIED: FaultHook("sender 0", "{miscopy}"),
        CheckpointFault.TRUNCATED: FaultHook("sender 0", "{faults}:truncate"),
        CheckpointFault.MISSING: FaultHook("sender 0", "{faults}:lose"),
    }}
    deadline_s = 1.5
    fault_deadline_s = 1.5

    @pytest.fixture(scope="class")
    def options(self):
        with patched(Defect.{defect}):
            yield {{"defect": "{defect}"}}

    @pytest.fixture(scope="class")
    def launcher(self):
        return ThreadLauncher()
"""


class Reports:
    """Collects how the tests of an inner run ended."""

    def __init__(self):
        self.failed, self.passed = {}, []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed[report.nodeid.rpartition("::")[2]] = str(report.longrepr)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid.rpartition("::")[2])


def run_contract(tmp_path: Path, defect: Defect, *tests: str) -> Reports:
    file = tmp_path / f"test_{defect.name.lower()}.py"
    file.write_text(
        TEMPLATE.format(backend=BACKEND, faults=FAULTS, miscopy=MISCOPY, defect=defect.name)
    )
    reports = Reports()
    names = [f"{file}::TestDefect::{test}" for test in tests]
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    with patched(Defect.NONE):
        pytest.main([*quiet, *names], plugins=[reports])
    return reports


def test_every_defect_has_a_test_that_finds_it():
    assert set(FOUND_BY) == set(Defect) - {Defect.NONE}


def test_an_engine_without_a_defect_passes_those_tests(tmp_path):
    tests = sorted({test for test, _ in FOUND_BY.values()})
    reports = run_contract(tmp_path, Defect.NONE, *tests)
    assert not reports.failed
    assert len(reports.passed) == len(tests)


@pytest.mark.parametrize("defect", FOUND_BY, ids=lambda defect: defect.name.lower())
def test_defect_fails_the_contract(tmp_path, defect):
    test, said = FOUND_BY[defect]
    reports = run_contract(tmp_path, defect, test)
    assert list(reports.failed) == [test], f"passed: {reports.passed}"
    assert re.search(said, reports.failed[test]), reports.failed[test][-2000:]
