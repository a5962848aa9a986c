"""What a weight sync needs to know of the configuration."""

import msgspec


class SyncSettings(msgspec.Struct, frozen=True):
    """The same for all syncs of a run.

    Attributes:
        run_id: of the run; part of every manifest.
        mode: `fused` or `separate`.
        checkpoint_engine: how the log names the way that the weights take.
        timeout_s: deadline of one sync.
        free_cache_engine: free the engines' memory between `release` and `sync` (fused).
        verify_light: digests travel with the tensors and are recomputed before loading.
    """

    run_id: str
    mode: str
    checkpoint_engine: str
    timeout_s: float
    free_cache_engine: bool
    verify_light: bool
