"""The passes of the policy over a batch: log-probabilities before the update, reference, update."""

from collections.abc import Sequence
from typing import Any

import msgspec

from minirl.algorithm_config import AlgorithmConfig
from minirl.batching import deal, gather
from minirl.config import MiniRLConfig
from minirl.worker_group import WorkerGroup
from rl_core.trajectory import LogProbs, TrainSample

STEP_TIMEOUT_S = 7200.0


class PolicyPasses:
    """Deals batches out to the actor ranks and puts the results together again."""

    def __init__(self, config: MiniRLConfig, workers: WorkerGroup) -> None:
        self._algorithm = config.algorithm
        self._share_prefixes = config.actor.engine_config.share_prefixes
        self._workers = workers
        self._update_tells: bool | None = None

    def before_update(self, batch: Sequence[TrainSample]) -> list[LogProbs] | None:
        """What the policy says of the samples now; None where the update itself will tell.

        With a single optimizer step the policy that the update differentiates is the one before
        it: a pass of its own would compute the same again (`known_in_update`).
        """
        if known_in_update(self._algorithm, len(batch)) and self._tells():
            return None
        dealt = self._deal(batch)
        return gather(dealt, self._each("compute_log_prob", batch, dealt))

    def with_reference(self, batch: Sequence[TrainSample]) -> list[TrainSample]:
        """Samples with the reference's log-probabilities, if a KL term needs them."""
        if self._algorithm.kl_coef == 0:
            return list(batch)
        dealt = self._deal(batch)
        found = gather(dealt, self._each("compute_ref_log_prob", batch, dealt))
        return [
            msgspec.structs.replace(sample, ref_log_probs=log_probs)
            for sample, log_probs in zip(batch, found, strict=True)
        ]

    def update(
        self, batch: Sequence[TrainSample], old: Sequence[LogProbs] | None
    ) -> tuple[dict[str, float], list[LogProbs]]:
        """Train on the samples; the update's metrics, and what the policy before it says of them.

        Args:
            batch: samples with everything that the loss needs.
            old: of `before_update`; where it is None, what the update tells takes its place, which
                is about tokens in the loss only.
        """
        if old is not None:
            batch = [
                msgspec.structs.replace(sample, old_log_probs=log_probs.log_probs)
                for sample, log_probs in zip(batch, old, strict=True)
            ]
        dealt = self._deal(batch)
        metrics: list[dict[str, float]] = self._each("update_policy", batch, dealt)
        recomputed = {"old_log_probs/recomputed": float(old is not None)}
        if old is None:
            scores = self._workers.call("update_scores", timeout_s=STEP_TIMEOUT_S)
            old = gather(dealt, scores)
        return {**metrics[0], **recomputed}, list(old)

    def _each(
        self, method: str, batch: Sequence[TrainSample], dealt: Sequence[Sequence[int]]
    ) -> list[Any]:
        """A method of all actor ranks, with the samples dealt to each; results in rank order."""
        return self._workers.call_each(
            method,
            lambda rank: ([batch[position] for position in dealt[rank]],),
            timeout_s=STEP_TIMEOUT_S,
        )

    def _tells(self) -> bool:
        """Whether this train engine tells what its update computed."""
        if self._update_tells is None:
            answers = self._workers.call("tells_update_scores", timeout_s=STEP_TIMEOUT_S)
            self._update_tells = all(answers)
        return self._update_tells

    def _deal(self, batch: Sequence[TrainSample]) -> list[list[int]]:
        mini_batch = self._algorithm.ppo_mini_batch_size or len(batch) or 1
        lengths = [sample.num_tokens for sample in batch]
        prompts = [tuple(sample.prompt_ids) for sample in batch] if self._share_prefixes else None
        return deal(lengths, self._workers.world_size, mini_batch, prompts)


def known_in_update(algorithm: AlgorithmConfig, samples: int) -> bool:
    """Whether nothing needs the old log-probabilities before the update that computes them.

    That is so with one optimizer step on all samples, whose ratio is 1 by definition; not with a
    critic, whose values make the advantages, nor with weights of `rollout_correction`.
    """
    one_step = algorithm.ppo_epochs == 1 and samples <= (algorithm.ppo_mini_batch_size or samples)
    needed = algorithm.adv_estimator == "ppo" or algorithm.rollout_correction.rollout_is is not None
    return one_step and not needed and not algorithm.recompute_old_log_probs
