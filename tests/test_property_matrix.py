"""The property matrix notices defects, and every pair of its values is in the normal test run."""

import ast
import importlib.util
import itertools
import json
import sys

import pytest
from whole_runs import ROOT, WITNESSED

sys.path.append(str(ROOT / "tools"))

import property_matrix as matrix
from matrix_cells import Cell
from matrix_defects import DEFECTS

REFERENCE = ("--engine", "reference", "--tp", "2", "--kind", "dense", "--transport", "fused")


def test_all_ten_hold_for_the_reference_engine(capsys, tmp_path):
    assert matrix.main([*REFERENCE, "--json", str(tmp_path / "table.json")]) == 0
    [row] = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [verdict["result"] for verdict in row["verdicts"]] == ["ok"] * 10
    assert row["cell"] == vars(Cell("reference", 2, "dense", "float32", "fused"))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "fused" in line]
    assert line.split()[-12:-2] == ["ok"] * 10


def test_each_property_notices_its_defect(capsys):
    assert [defect.number for defect in DEFECTS.values()] == list(matrix.NUMBERS)
    assert matrix.main([*REFERENCE, "--defect", "all"]) == 0
    told = capsys.readouterr().out
    for number, name in enumerate(DEFECTS, start=1):
        assert f"property {number}: RED [{name}]" in told


def test_a_red_cell_is_told_and_ends_in_an_error(monkeypatch, capsys):
    monkeypatch.setattr(matrix, "CarriedCase", DEFECTS["drift"])
    assert matrix.main([*REFERENCE, "--property", "2"]) == 1
    assert "property 2: RED" in capsys.readouterr().out


def test_a_defect_that_nobody_notices_is_an_error(monkeypatch):
    monkeypatch.setitem(
        DEFECTS,
        "drift",
        type(
            "Sound",
            (matrix.CarriedCase,),
            {
                "number": 2,
                "undo": lambda _: None,
            },
        ),
    )
    assert matrix.main([*REFERENCE, "--defect", "drift"]) == 1


def test_what_there_is_not_is_said_to_be_not_there(capsys):
    assert matrix.main(["--engine", "reference", "--tp", "1", "--kind", "moe"]) == 0
    told = capsys.readouterr().out
    assert "n/a: the reference engine has no experts" in told
    assert "ok" not in told


def engines_of(engine):
    """Kinds and sizes of the engines that a backend's tests start, all fed as in fused mode."""
    conftest = ast.parse((ROOT / f"packages/rl-rollout-{engine}/tests/conftest.py").read_text())
    [value] = [
        node.value
        for node in conftest.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "ENGINES"
    ]
    for kind, settings in ast.literal_eval(value).items():
        yield Cell(engine, settings.get("tp_size", 1), kind, transport="fused")


def transports_of(engine):
    """What feeds them besides."""
    path = ROOT / f"packages/rl-rollout-{engine}/tests/test_transports.py"
    spec = importlib.util.spec_from_file_location(f"transports_of_{engine}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for cell in module.CELLS:
        yield Cell(engine, cell.tp_size, cell.kind, transport=cell.transport)


def witnessed():
    """Whole runs at whose end the engine is asked."""
    for kind, arguments in WITNESSED.values():
        given = dict(item.split("=") for item in arguments)
        yield Cell(
            given.get("rollout.name", "vllm"),
            int(given.get("rollout.tensor_model_parallel_size", 1)),
            kind,
            transport=given.get("checkpoint_engine.backend", "fused"),
        )


def pairs(values):
    """All pairs of values of different factors."""
    return set(itertools.combinations(enumerate(values), 2))


@pytest.fixture
def covered():
    found = list(witnessed())
    for engine in matrix.ENGINES:
        found += [*engines_of(engine), *transports_of(engine)]
    return found


def test_every_pair_is_in_the_normal_run(covered):
    factors = (matrix.ENGINES, matrix.TRANSPORTS, (1, 2), matrix.KINDS)
    wanted = set().union(*map(pairs, itertools.product(*factors)))
    found = set().union(
        *(pairs((cell.engine, cell.transport, cell.tp_size, cell.kind)) for cell in covered)
    )
    assert sorted(map(str, wanted - found)) == []
    assert len(covered) < len(list(itertools.product(*factors))) / 2
