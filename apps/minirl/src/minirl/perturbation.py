"""The proof that live verification would notice: changed weights arrive, and go away again.

Before a sync every weight is changed, loaded and verified: the engines must hold the changed
weights, and in no tensor what was there before. Then the trainer's weights are put back, and the
sync itself must find exactly what there was before. Changed weights are loaded and never served.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minirl.actors import Actors
from minirl.live_comparison import RankComparison
from minirl.live_member import in_rank_order
from rl_core.errors import MiniRLError, VerificationError
from rl_core.logs import kv
from rl_core.rollout.expectation import Expectation
from rl_core.versions import PolicyVersion

if TYPE_CHECKING:
    from minirl.live_member import Expected

_logger = logging.getLogger(__name__)

PERTURBED = "perturbed"
"""Phase of a sync that carries changed weights."""
_NAMED = 3
_RESTORE_S = 20.0


class Proof:
    """What is to be seen of one change."""

    def __init__(self, delta: float, before: Sequence[Expectation]) -> None:
        """`before` is what the ranks would hold of the weights as they are."""
        self._delta = delta
        self._before = {one.tp_rank: one for one in before}

    def check(self, phase: str, ranks: Sequence[RankComparison]) -> dict[str, Any]:
        """What ranks that hold what they must have shown, for the record.

        Errors: VerificationError naming weights that should differ from before and do not, or,
        after the change was undone, those that should not differ and do.
        """
        changed = phase == PERTURBED
        wrong = [f"{name!r} on rank {rank}" for rank, name in self._same(ranks, not changed)]
        if wrong:
            found = "are what they were before" if changed else "are not what they were before"
            hint = "; if the engine rounds so small a change away, give more perturb_delta"
            msg = f"perturbation by {self._delta}: {len(wrong)} weights {found}: "
            raise VerificationError(msg + ", ".join(wrong[:_NAMED]) + (hint if changed else ""))
        count = sum(1 for rank in ranks for held in rank.expected.tensors.values() if held.sources)
        shown = {"delta": self._delta, "differ" if changed else "restored": count}
        said = "changed weights arrived" if changed else "undone, the weights are as before"
        _logger.info("Perturbation: %s: %s", said, kv(**shown))
        return shown

    def _same(self, ranks: Sequence[RankComparison], different: bool) -> Iterator[tuple[int, str]]:
        """Rank and name of weights whose live digest is that of before; or is not."""
        for rank in ranks:
            before = self._before[rank.check.tp_rank].tensors
            for name, held in rank.expected.tensors.items():
                if held.sources and (rank.live.get(name) != before[name].digest) == different:
                    yield rank.check.tp_rank, name


class Perturbation:
    """Changes the actor's weights for a while."""

    def __init__(self, actors: Actors, run_id: str, delta: float, timeout_s: float) -> None:
        self._actors = actors
        self._run_id = run_id
        self._delta = delta
        self._timeout_s = timeout_s

    @contextmanager
    def in_place(self, version: PolicyVersion) -> Iterator[Proof]:
        """The actor has changed weights in the block, which are `version`, then its own again."""
        answers: list[Expected] = self._call("expect_weights", version, self._run_id)
        proof = Proof(self._delta, in_rank_order(answers))
        self._call("perturb", self._delta)
        try:
            yield proof
        except Exception:
            self._restore_after_failure()
            raise
        self._call("restore")

    def _restore_after_failure(self) -> None:
        """What failed is told, not that an actor which may be gone cannot restore."""
        try:
            self._actors.call("restore", timeout_s=_RESTORE_S)
        except (MiniRLError, TimeoutError) as error:
            _logger.warning("perturbed weights could not be restored: %s", error)

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._actors.call(method, *args, timeout_s=self._timeout_s)
