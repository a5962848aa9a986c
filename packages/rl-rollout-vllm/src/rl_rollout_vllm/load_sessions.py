"""The two ways of putting tensors into a vLLM model, in an engine worker.

`BracketedSession` opens vLLM's weight-transfer session: every layer is processed once, when all
its weights have come, and copied into the tensors that the engine serves from. `PlainSession`
writes into the model's parameters as a checkpoint loader does; it is for engines without that
session, and sound only where parameters are served as they were loaded.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rl_core.errors import ManifestMismatchError, WeightSyncError
from rl_core.rollout.bucket_receiver import Arrival
from rl_core.rollout.copy_ledger import CopyLedger, Shares
from rl_core.rollout.named_tensors import Named, owned
from rl_rollout_vllm import cpu_patches
from rl_rollout_vllm.server_args import TRANSFER_BACKEND

logger = logging.getLogger(__name__)

LOADER_ERRORS = (KeyError, ValueError, AssertionError, RuntimeError, AttributeError)
"""What vLLM's loaders raise for a name or a shape that does not fit the model."""

try:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    from rl_rollout_vllm import layerwise

    HAS_BRACKET = True
except ImportError:  # an engine older than the weight-transfer API
    HAS_BRACKET = False


if HAS_BRACKET:

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing to agree on before the first update."""

    @dataclass
    class Batch(WeightTransferUpdateInfo):  # type: ignore[misc]
        """Tensors by their Hugging Face names, owned by the receiver."""

        tensors: Iterable[tuple[str, Tensor]] = ()

    class StreamedWeights(WeightTransferEngine[InitInfo, Batch]):  # type: ignore[misc]
        """Loads batches layer by layer; the stream itself is read by the worker extension."""

        init_info_cls = InitInfo
        update_info_cls = Batch

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            """No connection outlives an update."""

        def start_weight_update(self) -> None:
            """Put the layers on the meta device, waiting for their weights."""
            cpu_patches.before_update(self.model)
            layerwise.begin(self.model)

        def receive_weights(self, update_info: Batch) -> None:
            """Load one batch; a layer that is complete is processed and copied into place."""
            self.model.load_weights(update_info.tensors)

        def finish_weight_update(self) -> None:
            """Process the layers that wait to the end."""
            layerwise.finish(self.model, self.model_config)
            cpu_patches.after_update(self.model)

        def shutdown(self) -> None:
            """Nothing is held."""

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, StreamedWeights)


class BracketedSession:
    """One vLLM weight-transfer session."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model: nn.Module = worker.model_runner.model

    def begin(self) -> None:
        """Open the session."""
        self._seen: set[str] = set()
        self._shares = _shares(self._worker)
        self._biases = layerwise.never_on_meta(self._model)
        self._worker.start_weight_update()

    def load(self, arrivals: Sequence[Arrival]) -> None:
        """Load some tensors, copied if lent.

        vLLM keeps references to them until their layer is complete, which is longer than a
        transfer buffer stays as it is.

        Errors: ManifestMismatchError naming a tensor that does not fit the model.
        """
        batch = [(arrival.meta.name, owned(arrival)) for arrival in arrivals]
        self._seen.update(name for name, _ in batch)
        named = Named(batch)
        with CopyLedger(batch, meta_only=True, direct=self._biases) as ledger:
            try:
                self._worker.update_weights({"tensors": named})
            except LOADER_ERRORS as error:
                raise named.refusal(error, _parameters(self._model)) from error
        self._shares.check(batch, ledger)

    def finish(self) -> None:
        """Close the session.

        Errors: ManifestMismatchError naming a layer that did not get all of its elements, which
        vLLM would leave old or finalise as garbage.
        """
        missing = layerwise.unfinished(self._model)
        if missing:
            raise _too_few(self._model, missing, self._seen)
        self._worker.finish_weight_update()

    def abandon(self) -> None:
        """Put the old tensors back where new ones did not arrive, and close the session."""
        restored = layerwise.roll_back(self._model)
        logger.warning("update abandoned; %d layers keep their former weights", restored)
        # vLLM closes a session itself only when one of its own calls raised.
        self._worker._weight_update_active = False
        self._worker.weight_transfer_engine.reset_weight_update_target()


class PlainSession:
    """Writes into the parameters in place."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model: nn.Module = worker.model_runner.model
        self._loaded: set[str] | None = set()

    def begin(self) -> None:
        """WeightSyncError where parameters are not served as they were loaded."""
        packed = cpu_patches.packed_layers(self._model)
        if packed:
            msg = (
                f"the plain load path cannot update {packed[0]!r}, which vLLM's CPU build serves "
                "from a packed copy; use rollout.load_path=bracketed"
            )
            raise WeightSyncError(msg)
        self._loaded = set()
        self._shares = _shares(self._worker)

    def load(self, arrivals: Sequence[Arrival]) -> None:
        """Load some tensors."""
        batch = [(arrival.meta.name, owned(arrival)) for arrival in arrivals]
        named = Named(batch)
        with CopyLedger(batch, meta_only=False) as ledger:
            try:
                loaded = self._model.load_weights(named)
            except LOADER_ERRORS as error:
                raise named.refusal(error, _parameters(self._model)) from error
        self._shares.check(batch, ledger)
        if loaded is None:
            self._loaded = None
        elif self._loaded is not None:
            self._loaded |= loaded

    def finish(self) -> None:
        """Compare what the model says it loaded with the parameters that it has."""
        if self._loaded is None:
            logger.warning("this model does not tell which parameters it loaded; not checked")
            return
        wanted = {name for name, _ in self._model.named_parameters()}
        missing = sorted(wanted - self._loaded)
        if missing:
            msg = f"{len(missing)} parameters got no weights; the first is {missing[0]!r}"
            raise ManifestMismatchError(msg)

    def abandon(self) -> None:
        """Nothing to undo: parameters keep what was written."""


def _parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _too_few(
    model: nn.Module, missing: Sequence["layerwise.Unfinished"], seen: set[str]
) -> ManifestMismatchError:
    first = missing[0]
    absent = layerwise.never_came(model, first, seen)
    hint = f"; never came: {', '.join(map(repr, absent))}" if absent else ""
    return ManifestMismatchError(
        f"{len(missing)} layers of the engine got too few weights; the first is {first.name!r} "
        f"with {first.loaded} of {first.expected} elements{hint}"
    )


def _shares(worker: Any) -> Shares:
    hf_config = worker.model_config.hf_text_config
    tied = getattr(hf_config, "tie_word_embeddings", False)
    ranks = worker.parallel_config.tensor_parallel_size
    layers = worker.model_runner.model.modules()
    vocabularies = [layer for layer in layers if isinstance(layer, VocabParallelEmbedding)]
    return Shares(vocabularies, ranks, ["lm_head.weight"] if tied else [])
