"""Every test of the rollout contract fails for an engine that is broken in its way."""

from dataclasses import replace

import broken_reference as broken
import pytest

from rl_core.errors import ReplicaFencedError
from rl_core.interfaces import PauseMode
from rl_core.testing.reference_adapter import ReferenceAdapter
from rl_core.testing.rollout_case import ColdStart, RolloutCase
from rl_core.testing.rollout_contract import RolloutAdapterContract
from rl_core.testing.rollout_faults import FAULTS

FAULT = {fault.name: fault for fault in FAULTS}


class Held(RolloutAdapterContract):
    """The contract, to be called test by test."""


def bites(test, cls, tp_size=1, **arguments):
    return pytest.param(test, cls, tp_size, arguments, id=f"{cls.__name__}-{test[5:]}")


def wrong(fault, cls):
    param = bites("test_wrong_update_is_refused_and_repaired", cls, fault=FAULT[fault])
    return pytest.param(*param.values, id=f"{cls.__name__}-{fault}")


def bucketed(cls, per_bucket, order):
    test = "test_order_and_bucket_size_do_not_matter"
    return bites(test, cls, per_bucket=per_bucket, order=order)


VARIANTS = [
    bites("test_update_changes_the_answers", broken.SecondLoadDoesNothing),
    bites("test_update_changes_the_answers", broken.WrittenToCopies),
    bites("test_update_changes_the_answers", broken.AcknowledgedWhenEnqueued),
    bites("test_warm_update_equals_cold_start", broken.TiedHeadLeftBehind),
    bites("test_warm_update_equals_cold_start", broken.DerivedBufferStale),
    bites("test_warm_update_equals_cold_start", broken.CacheNotFlushed),
    bites("test_warm_update_equals_cold_start", broken.PrecisionLost),
    bites("test_warm_update_equals_cold_start", broken.WrongSlice, 2),
    bites("test_every_single_tensor_arrives", broken.OneTensorSkipped),
    bites("test_syncing_twice_equals_once", broken.ProcessedTwice),
    bites("test_syncs_without_change_change_nothing", broken.ProcessedTwice),
    bites("test_no_poison_is_left", broken.PoisonBlended),
    bites("test_report_accounts_for_everything", broken.DigestsUnchecked),
    bites("test_directory_equals_stream", broken.DirectoryIgnored),
    bites("test_live_digests_follow_the_weights", broken.StaticDigests),
    bites("test_live_content_is_what_the_digests_are_of", broken.ContentOfACopy),
    bites("test_live_content_is_what_the_digests_are_of", broken.FirstRankContent, 2),
    bites("test_every_rank_holds_what_the_layout_says", broken.WrongSlice, 2),
    bites("test_every_rank_holds_what_the_layout_says", broken.TiedHeadReported),
    bites("test_a_stale_or_swapped_tensor_is_named", broken.DigestsOfACopy),
    bites("test_a_flipped_bit_is_named", broken.DigestsOfACopy),
    bites("test_a_flipped_bit_is_named", broken.FirstRankDigests, 2),
    bucketed(broken.FusedHalfDropped, 1, "forward"),
    bucketed(broken.FusedHalfDropped, 2, "spread"),
    bucketed(broken.BufferReusedTooEarly, 2, "forward"),
    bucketed(broken.OrderAssumed, 7, "backward"),
    wrong("unknown_to_the_engine", broken.UnknownIgnored),
    wrong("missing_in_the_manifest", broken.PartialSetAccepted),
    wrong("corrupted_tensor", broken.DigestsUnchecked),
    wrong("swapped_tensors", broken.DigestsUnchecked),
    wrong("short_stream", broken.ErrorsNotFenced),
    wrong("short_stream", broken.ReasonLost),
    wrong("short_stream", broken.NeverRepaired),
    bites("test_refuses_requests_before_the_first_commit", broken.GateIgnored),
    bites("test_nothing_is_served_between_load_and_commit", broken.GateIgnored),
    bites("test_old_and_repeated_versions_are_refused", broken.VersionsForgotten),
    bites("test_commit_of_another_version_is_refused", broken.AnyCommit),
    bites("test_old_and_repeated_versions_are_refused", broken.LateCommitStamps),
    bites("test_fence_refuses_with_its_reason", broken.ReasonLost),
    bites("test_failing_source_fences", broken.SourceErrorsNotFenced, error=OSError("disk gone")),
    bites("test_stalled_source_ends_by_the_deadline", broken.DeadlineIgnored),
    bites("test_missing_rank_ends_by_the_deadline", broken.FirstRankAcknowledges, 2),
    bites("test_a_rank_that_fails_lets_the_others_end", broken.StreamLeft, 2),
    bites("test_second_sender_never_mixes", broken.AnySender),
    bites("test_commit_flushes_the_prefix_cache", broken.CommitForgetsFlush),
    bites("test_clear_kv_cache_changes_no_answer", broken.ClearForgetsToSay),
    bites("test_versions_are_stamped", broken.VersionNeverChanges),
    bites("test_finish_reasons", broken.EndTokenDropped),
    bites("test_seeds_reproduce", broken.SeedIgnored),
    bites("test_one_request_gives_several_samples", broken.OneSampleOnly),
    bites("test_one_request_gives_several_samples", broken.SameSampleAgain),
    bites("test_log_probs_are_of_the_sampled_distribution", broken.TemperatureIgnored),
    bites("test_pause_queues_new_requests", broken.PauseIgnored),
    bites("test_pause_abort_returns_what_there_is", broken.AbortedAsLength),
    bites("test_pause_wait_lets_requests_finish", broken.WaitAborts),
    bites("test_pause_keep_records_both_versions", broken.VersionReadAfterwards),
    bites("test_pause_keep_records_both_versions", broken.KeptRequestsKeepTheirKV),
    bites("test_pause_in_place_records_both_versions", broken.KeptKVShared),
    bites("test_pause_in_place_records_both_versions", broken.NothingKeptInPlace),
    bites("test_kept_requests_are_not_waited_for", broken.KeptAreWaitedFor, mode=PauseMode.KEEP),
    bites("test_nothing_kept_goes_on_with_what_is_not_committed", broken.KeptAreWaitedFor),
    bites("test_a_pause_that_waits_too_long_holds_nothing", broken.FailedPauseHolds),
    bites("test_continue_ends_a_pause_that_waits", broken.OvertakenPauseSaysNothing),
    bites("test_a_fence_ends_requests_that_a_pause_has_queued", broken.AbortedAsLength),
    bites("test_requests_in_flight_follow_on_update", broken.KeepAborts, mode=PauseMode.KEEP),
    bites("test_requests_in_flight_follow_on_update", broken.WaitAborts, mode=PauseMode.WAIT),
    bites("test_what_has_ended_is_told_before_the_call_ends", broken.NothingToldEarly),
    bites("test_what_has_ended_is_told_before_the_call_ends", broken.EverybodyTold),
    bites("test_what_has_ended_is_told_before_the_call_ends", broken.EndedCallsKept),
    bites("test_no_answer_mixes_versions", broken.RunsIntoUpdates),
    bites("test_released_resumed_updated_replica_serves", broken.ResumedWithoutDerived),
    bites("test_memory_is_freed", broken.FreesNothing, tag="kv_cache"),
    bites("test_released_kv_memory_leaves_the_process", broken.OnlySaysThatItFrees),
    bites(
        "test_nothing_is_served_from_released_memory", broken.ReleasedButAnswering, tag="weights"
    ),
    bites("test_resumed_weights_need_a_sync", broken.ServesEmptyWeights),
    bites("test_weights_released_before_their_commit_are_not_served", broken.ReleaseNotNoticed),
    bites("test_resumed_kv_cache_gives_right_answers_or_none", broken.CacheSurvivesRelease),
    bites("test_unknown_memory_tag_is_refused", broken.TagsIgnored),
]


ATTEMPTS = 4

SHOW_AS_WAITS = (broken.StreamLeft, broken.KeptAreWaitedFor, broken.FailedPauseHolds)


def attempt(test, case, arguments):
    """Some defects are races: whether a request runs into an update is up to the machine."""
    for _ in range(ATTEMPTS):
        getattr(Held(), test)(case, **arguments)


@pytest.mark.parametrize(("test", "cls", "tp_size", "arguments"), VARIANTS)
def test_broken_engine_is_noticed(test, cls, tp_size, arguments, reference, tmp_path):
    adapter = cls if issubclass(cls, ReferenceAdapter) else ReferenceAdapter
    if test == "test_directory_equals_stream":
        arguments = {**arguments, "tmp_path": tmp_path}
    with reference(tp_size=tp_size, server=broken.server_of(cls), adapter=adapter) as given:
        # A defect that shows as a wait need not be waited for long.
        limit = 4.0 if cls in SHOW_AS_WAITS else given.timeout_s
        case = RolloutCase(replace(given, timeout_s=limit))
        with pytest.raises((Exception, pytest.fail.Exception)) as caught:
            attempt(test, case, arguments)
        assert not isinstance(caught.value, pytest.skip.Exception | TypeError | AttributeError)
        case.threads.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("broken_in", [None, broken.DerivedBufferStale, broken.TiedHeadLeftBehind])
def test_a_start_that_was_looked_at_is_compared_too(broken_in, reference):
    """Engines that take long to start are compared with what they were themselves."""
    with reference(server=broken_in and broken.server_of(broken_in)) as given:
        weights = given.weights_a.blended(given.weights_b)
        with given.cold(weights) as adapters:
            answers = RolloutCase(given).fingerprint(adapters)
            cold = ColdStart(
                weights, ReplicaFencedError("no"), answers, adapters[0].live_digests(10)
            )
        case = RolloutCase(replace(given, cold_start=cold))
        if broken_in is None:
            Held().test_warm_update_equals_cold_start(case)
        else:
            with pytest.raises(AssertionError):
                Held().test_warm_update_equals_cold_start(case)


def test_every_test_of_the_contract_bites():
    assert {variant.values[0] for variant in VARIANTS} == Held.promised_tests()
