"""The sections `checkpoint_engine.debug` (how far a weight sync is checked) and `debug`."""

from dataclasses import dataclass


@dataclass
class DebugConfig:
    """Checks of the weight sync."""

    verify_light_transfer: bool = False
    """Digests travel with the tensors and are recomputed just before loading."""
    verify_live_weights: bool = False
    """After loading, what each engine rank computes with is compared with what the trainer has."""
    verify_every: int = 1
    """Live verification of every n-th sync; the first one, and who joins late, always."""
    verify_replicas: str = "first"
    """Live verification of the `first` replica in a sync (and of who joins late), or of `all`."""
    strict: bool = False
    """What the layout table does not cover is an error, not only counted as unverifiable."""
    keep_last: int = 10
    """Reports of live verifications that a run keeps, of each replica."""
    perturb_before_sync: bool = False
    """From the second sync on: change every weight, sync and verify, restore, sync and verify."""
    perturb_delta: float = 0.001
    """What is added to every weight; where rounding would lose it, one step of the dtype."""


@dataclass
class LoopDebugConfig:
    """Half of the loop."""

    rollout_only: bool = False
    """Generate and score, train nothing: all samples come from the weights of the beginning."""
    train_only: str | None = None
    """Directory of a run, or a file of trajectories: train on that, without an engine."""
