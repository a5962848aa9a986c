"""What a rank gives back on cpu leaves its process; what was tied stays tied."""

import os
from types import SimpleNamespace

import torch

from rl_core.testing.process_holdings import private_bytes
from rl_rollout_sglang.worker_memory import WorkerMemory

ROWS = 1 << 13
NBYTES = ROWS * 1024 * 4


def test_released_weights_leave_the_process():
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(ROWS, 1024), "head": torch.nn.Linear(1024, ROWS, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    weight = model["head"].weight
    runner = SimpleNamespace(model=model)
    memory = WorkerMemory(SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner)))

    filled = private_bytes([os.getpid()])
    assert memory.release("weights") == NBYTES
    assert filled - private_bytes([os.getpid()]) > NBYTES * 3 // 4
    assert memory.release("weights") == 0
    memory.resume("weights")
    assert model["embed"].weight is model["head"].weight is weight
    assert weight.shape == (ROWS, 1024)
    assert not weight.any()
