"""The reference engine's KV memory: rows of sequences, which are also its prefix cache."""

from collections.abc import Collection, Sequence

import torch

from rl_core.testing.reference_weights import ReferenceModelConfig


class KVRows:
    """KV memory in rows of one sequence each; a finished row stays as a cached prefix.

    Keyed by tokens alone, not by version: it must be flushed when the weights change.
    """

    def __init__(self, config: ReferenceModelConfig, rows: int, positions: int) -> None:
        self._memory = torch.zeros(rows, config.layers, 2, positions, config.hidden)
        self._nbytes: int = self._memory.untyped_storage().nbytes()
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._idle = list(range(rows))  # least recently used first
        self._private: set[int] = set()

    @property
    def allocated(self) -> bool:
        """Whether there is memory to generate with."""
        return bool(self._memory.untyped_storage().nbytes())

    def take(self, tokens: Sequence[int]) -> int | None:
        """A row for a sequence, holding its longest cached prefix; None if all are in use."""
        if not self._idle:
            return None
        source = max(range(len(self._tokens)), key=lambda row: self._shared(row, tokens))
        shared = self._shared(source, tokens)
        row = self._idle.pop(0)
        if source != row:
            self._memory[row, :, :, :shared] = self._memory[source, :, :, :shared]
        self._tokens[row] = list(tokens[:shared])
        return row

    def give_back(self, row: int) -> None:
        """End the use of a row; its contents stay cached until the row is needed."""
        self._idle.append(row)
        if row in self._private:
            self._private.discard(row)
            self._tokens[row] = []

    def known(self, row: int) -> int:
        """Number of leading positions of a row that hold valid keys and values."""
        return len(self._tokens[row])

    def memory(self, row: int, token: int) -> torch.Tensor:
        """The row's (layers, 2, positions, hidden), about to be extended by `token`."""
        self._tokens[row].append(token)
        return self._memory[row]

    def flush(self, keep: Collection[int] = ()) -> None:
        """Forget everything; sequences that are running compute their keys and values again.

        Those in the rows `keep` go on with what they have, which no other takes over.
        """
        self._tokens = [item if row in keep else [] for row, item in enumerate(self._tokens)]
        self._private = set(keep)

    def release(self) -> int:
        """Free the memory; the bytes freed."""
        freed: int = self._memory.untyped_storage().nbytes()
        self._memory.untyped_storage().resize_(0)
        self.flush()
        return freed

    def resume(self) -> None:
        """Allocate the memory again. Idempotent."""
        if not self.allocated:
            self._memory.untyped_storage().resize_(self._nbytes)
            self._memory.zero_()

    def _shared(self, row: int, tokens: Sequence[int]) -> int:
        # The last token is always computed: its logits are needed.
        known = 0 if row in self._private else len(self._tokens[row])
        limit = min(known, len(tokens) - 1)
        cached = self._tokens[row]
        return next((n for n in range(limit) if cached[n] != tokens[n]), limit)
