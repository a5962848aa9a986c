"""The section `checkpoint_engine.debug`: how far a weight sync is checked."""

from dataclasses import dataclass


@dataclass
class DebugConfig:
    """Checks of the weight sync."""

    verify_light_transfer: bool = False
    """Digests travel with the tensors and are recomputed just before loading."""
    verify_live_weights: bool = False
    """After loading, what each engine rank computes with is compared with what the trainer has."""
    verify_every: int = 1
    """Live verification of every n-th sync; the first one always."""
    verify_replicas: str = "first"
    """Live verification of the `first` replica that takes part in a sync, or of `all`."""
    strict: bool = False
    """What the layout table does not cover is an error, not only counted as unverifiable."""
    keep_last: int = 10
    """Reports of live verifications kept, of each replica."""
    perturb_before_sync: bool = False
    """From the second sync on: change every weight, sync and verify, restore, sync and verify."""
    perturb_delta: float = 0.001
    """What is added to every weight; where rounding would lose it, one step of the dtype."""
