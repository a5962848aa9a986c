"""Engines of the property matrix: tiny models from a seed, a replica that reads one, its facts."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from minirl.model_directory import edit_json, no_progress_bars
from minirl.tiny_model import build_tiny_model
from rl_core import plugins
from rl_core.interfaces import Launcher, Placement
from rl_core.testing.carried_case import EngineFacts, StartState, Versions
from rl_core.testing.carriers import Carrier, EngineRanks, FusedCarrier, TransferCarrier
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.reference_config import ReferenceConfig
from rl_core.testing.reference_layout import layout_spec
from rl_core.testing.reference_replica import REFERENCE_BACKEND
from rl_core.testing.reference_weights import ReferenceModelConfig, make_weights
from rl_core.testing.rollout_case import Fingerprint, RolloutCase, RolloutUnderTest
from rl_core.testing.started_replica import CALL_S, STOP_S, StartedReplica
from rl_core.testing.thread_launcher import ThreadLauncher
from rl_core.testing.weight_set import WeightSet
from rl_core.torch import dtype_of

PROMPTS = ([5, 6, 7, 8], [40, 41], [9, 9, 30, 12, 13, 70, 4])
POISON = {"vllm": "rl_poison", "sglang": "poison"}
FLIP = {"vllm": "rl_flip", "sglang": "flip"}
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
"""Between log-probs: of one engine in batches of other sizes, and of another program."""


@dataclass(frozen=True, order=True)
class Cell:
    """One engine start, or one row of the matrix.

    Attributes:
        engine: rollout backend; `reference` is the contract kit's, for trying the matrix itself.
        tp_size: tensor-parallel ranks.
        kind: of the embedded model.
        dtype: of weights and engine.
        transport: `fused` or a checkpoint engine; empty for the engine alone.
    """

    engine: str
    tp_size: int
    kind: str
    dtype: str = "float32"
    transport: str = ""

    def by(self, transport: str) -> "Cell":
        """The row of one transport."""
        return replace(self, transport=transport)

    @property
    def impossible(self) -> str:
        """Why there is no such engine; empty if there is."""
        if self.engine == "reference" and self.kind == "moe":
            return "the reference engine has no experts"
        if self.engine == "reference" and self.dtype != "float32":
            return "the reference engine computes in float32"
        return ""

    def __str__(self) -> str:
        return f"{self.engine:9} tp {self.tp_size}  {self.kind:5} {self.dtype:8} {self.transport:8}"


@dataclass(frozen=True)
class RunningEngine:
    """A replica that runs, and what the properties want to know of it.

    Attributes:
        cell: what it is.
        given: for cases.
        facts: for cases; None in place of what the engine does not have.
        ranks: how other processes reach its ranks.
        directory: for files.
    """

    cell: Cell
    given: RolloutUnderTest
    facts: EngineFacts
    ranks: EngineRanks
    directory: Path

    def carrier(self, transport: str) -> Carrier:
        """One that feeds it; to be closed."""
        if transport == "fused":
            return FusedCarrier()
        options = {"root_dir": str(self.directory / "disk")} if transport == "disk" else {}
        return TransferCarrier(transport, options, self.ranks, self.directory / transport)


@contextlib.contextmanager
def running(cell: Cell, directory: Path, transports: Sequence[str]) -> Iterator[RunningEngine]:
    """Start the engine of a cell; it reads model B, and is synced by nobody before this yields."""
    with contextlib.ExitStack() as stack:
        if cell.engine == "reference":
            local = set(transports) == {"fused"}
            launcher = ThreadLauncher() if local else ProcessLauncher(directory / "logs")
            yield _start_reference(cell, directory, launcher, stack)
        else:
            yield _start_real(cell, directory, stack)


def _start_real(cell: Cell, directory: Path, stack: contextlib.ExitStack) -> RunningEngine:
    paths = [directory / "a", directory / "b"]
    first, second = (_make_model(path, cell, seed) for seed, path in enumerate(paths, start=1))
    backend = plugins.load_backend(plugins.ROLLOUT_BACKENDS, cell.engine)
    config = plugins.load_object(backend.config_cls)(
        local_path=str(paths[1]),
        dtype=cell.dtype,
        tensor_model_parallel_size=cell.tp_size,
        kv_cache_memory_gb=0.0625,
        bucket_megabytes=0.5,
        load_format="auto",
        log_dir=str(directory / "logs"),
    )
    launcher = ProcessLauncher(directory / "logs")
    placement = Placement(tp_size=cell.tp_size)
    replica = plugins.load_object(backend.replica)(config, launcher, placement)
    stack.callback(replica.shutdown, STOP_S)
    started = StartedReplica(backend, replica, config)
    model_config = json.loads((paths[1] / "config.json").read_text())
    tolerance = TOLERANCES[cell.dtype]
    given = RolloutUnderTest(
        started.adapters,
        first,
        second,
        PROMPTS,
        layout=plugins.load_object(backend.layout)(model_config, config),
        flip=lambda *what: started.worker(FLIP[cell.engine], *what),
        tolerance=tolerance,
    )
    held = started.adapters[0].live_digests(CALL_S)
    cold = StartState(second, held, Witness(paths[1], cell.dtype, tolerance))
    facts = EngineFacts(
        poison=lambda: started.worker(POISON[cell.engine]),
        cold=cold,
        versions=Versions(directory / "version.json"),
        held={second.weights_digest: held},
    )
    ranks = EngineRanks.of(started.adapters, started.server, config)
    return RunningEngine(cell, given, facts, ranks, directory)


def _start_reference(
    cell: Cell, directory: Path, launcher: Launcher, stack: contextlib.ExitStack
) -> RunningEngine:
    config = ReferenceConfig(ReferenceModelConfig(tied=cell.kind == "tied"))
    placement = Placement(tp_size=cell.tp_size)
    replica = plugins.load_object(REFERENCE_BACKEND.replica)(config, launcher, placement)
    stack.callback(replica.shutdown, STOP_S)
    started = StartedReplica(REFERENCE_BACKEND, replica, _Ranks(config, cell.tp_size))
    first, second = (make_weights(config.model, seed) for seed in (1, 2))
    given = RolloutUnderTest(
        started.adapters,
        first,
        second,
        prompts=[[5, 6, 7, 8], [5, 6, 9], [3]],
        layout=layout_spec(config.model),
        flip=lambda *what: started.server.call("flip", *what, timeout=CALL_S),
        timeout_s=20.0,
    )
    facts = EngineFacts(
        poison=lambda: started.server.call("poison", timeout=CALL_S),
        cold=_cold_reference(config, placement, second, given),
        versions=Versions(directory / "version.json"),
        held={},
    )
    ranks = EngineRanks.of(started.adapters, started.server, config)
    return RunningEngine(cell, given, facts, ranks, directory)


def _cold_reference(
    config: ReferenceConfig, placement: Placement, weights: WeightSet, given: RolloutUnderTest
) -> StartState:
    """Of another reference engine, which starts in no time; it cannot read a model at its start."""
    replica = plugins.load_object(REFERENCE_BACKEND.replica)(config, ThreadLauncher(), placement)
    try:
        started = StartedReplica(REFERENCE_BACKEND, replica, _Ranks(config, placement.tp_size))
        started.sync(weights)
        case = RolloutCase.__new__(RolloutCase)
        case.given = given
        answers = case.fingerprint(started.adapters)
        held = started.adapters[0].live_digests(CALL_S)
    finally:
        replica.shutdown(STOP_S)
    return StartState(weights, held, lambda found: case.assert_same(found, answers))


@dataclass(frozen=True)
class _Ranks:
    """The reference engine's configuration, with the number of ranks that others have in theirs."""

    config: ReferenceConfig
    tensor_model_parallel_size: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def _make_model(path: Path, cell: Cell, seed: int) -> WeightSet:
    """An embedded model, norms not all one (a swapped one would not show); as a trainer's."""
    build_tiny_model(path, kind=cell.kind, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in sorted(tensors.items()):
        if tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5, generator=generator)
        tensors[name] = tensor.to(dtype_of(cell.dtype))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", dtype=cell.dtype)
    tied = cell.kind == "tied"
    return WeightSet(tensors, {"model.embed_tokens.weight": ("lm_head.weight",)} if tied else {})


class Witness:
    """What transformers makes of a model directory, as a judge of an engine's greedy answers."""

    def __init__(self, path: Path, dtype: str, tolerance: float) -> None:
        self._path = path
        self._dtype = dtype_of(dtype)
        self._tolerance = tolerance
        self._model: Any = None

    def __call__(self, answers: Fingerprint) -> None:
        """Every token is the best one, and has this log-prob, within the tolerance."""
        for prompt, (tokens, log_probs) in zip(PROMPTS, answers, strict=True):
            expected = self._log_probs(prompt, tokens)
            mine = torch.tensor(log_probs)
            theirs = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            far = float((mine - theirs).abs().max())
            worse = float((expected.max(1).values - theirs).max())
            assert far <= self._tolerance, f"log-probs differ by {far:.1e} from transformers'"
            assert worse <= self._tolerance, f"a token is {worse:.1e} worse than transformers' best"

    def _log_probs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Of every token of the vocabulary at every place of the answer."""
        if self._model is None:
            from transformers import AutoModelForCausalLM

            with no_progress_bars():
                model = AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype)
            self._model = model.eval()
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        return logits[len(prompt) - 1 : -1].log_softmax(-1)
