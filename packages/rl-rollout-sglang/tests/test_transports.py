"""Checkpoint engines feed this engine, on the replicas of the other tests.

A part of the matrix that `tools/property_matrix.py` goes through; `tests/test_property_matrix.py`
sees to it that every pair of its values is somewhere in the test run.
"""

import pytest

from rl_core.testing.transport_cells import TransportCell, check_cell

pytestmark = pytest.mark.engine

CELLS = (
    TransportCell("dense", 1, "mooncake", (1, 4)),
    TransportCell("moe", 1, "hccl", (1, 2)),
    TransportCell("tied", 2, "disk", (1, 7)),
)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_properties_hold_with_a_transport(cell, engines, under_test, tmp_path):
    started = engines(cell.kind)
    check_cell(cell, started, under_test(cell.kind), lambda: started.worker("poison"), tmp_path)
