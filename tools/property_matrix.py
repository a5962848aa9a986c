"""The ten properties of weight synchronisation, on live engines: one start each, all transports.

    uv run --no-sync tools/property_matrix.py
    uv run --no-sync tools/property_matrix.py --engine sglang --tp 2 --kind moe --transport hccl
    uv run --no-sync tools/property_matrix.py --kind dense --dtype bfloat16
    uv run --no-sync tools/property_matrix.py --kind dense --tp 1 --defect all

For each engine, number of tensor-parallel ranks and kind of model, one replica is started on a tiny
model made from a seed; the transports feed it one after the other, and with each of them the ten
properties of `rl_core.testing.weight_properties` are tested. Prints a table, writes it as JSON if
told where. Exit code 1 if a property does not hold, 2 if an engine did not start, 3 if one hung.

With `--defect`, engine or transport are wrong in a way that a property must notice: it then has to
come out red, and the exit code is 1 if it does not.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import pytest
from matrix_cells import TOLERANCES, Cell, RunningEngine, running
from matrix_defects import DEFECTS

from rl_core.testing.carried_case import CarriedCase
from rl_core.testing.weight_properties import WeightPropertyContract

ENGINES = ("vllm", "sglang")
TRANSPORTS = ("fused", "hccl", "mooncake", "disk")
KINDS = ("dense", "tied", "moe")
NUMBERS = tuple(WeightPropertyContract.names)
ENGINE_S = 1200.0
"""An engine that is not done after this is given up, with everything that was started."""

OK, RED, NONE = "ok", "RED", "n/a"


class Properties(WeightPropertyContract):
    """The contract, to be called test by test."""


@dataclass(frozen=True)
class Verdict:
    """What one property came to in one row.

    Attributes:
        number: of the property.
        result: `ok`, `RED`, or `n/a` for what has no meaning there.
        seconds: that it took.
        detail: what went wrong, or why it has no meaning.
        defect: with which it was tested; empty without one.
    """

    number: int
    result: str
    seconds: float
    detail: str = ""
    defect: str = ""


@dataclass(frozen=True)
class Row:
    """One engine with one transport.

    Attributes:
        cell: which.
        verdicts: of the properties.
        seconds: for all of it, without the engine's start.
    """

    cell: Cell
    verdicts: Sequence[Verdict]
    seconds: float

    def __str__(self) -> str:
        results = {verdict.number: verdict.result for verdict in self.verdicts}
        shown = " ".join(f"{results.get(number, ''):>4}" for number in NUMBERS)
        return f"{self.cell} {shown}  {self.seconds:5.0f} s"


def tried(number: int, case: CarriedCase, defect: str = "") -> Verdict:
    """Test one property."""
    begun = time.monotonic()
    result, detail = OK, ""
    try:
        getattr(Properties(), WeightPropertyContract.names[number])(case)
    except pytest.skip.Exception as reason:
        result, detail = NONE, str(reason)
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - a row of the table each
        where = traceback.extract_tb(error.__traceback__)[-1]
        result = RED
        told = str(error) or where.line
        detail = f"{type(error).__name__}: {told} ({Path(where.filename).name}:{where.lineno})"
    return Verdict(number, result, time.monotonic() - begun, detail[:600], defect)


def examined(engine: RunningEngine, transport: str, numbers: Sequence[int]) -> list[Verdict]:
    """All properties with one transport; the carrier is ended."""
    carrier = engine.carrier(transport)
    try:
        case = CarriedCase(engine.given, carrier, engine.facts)
        verdicts = [tried(number, case) for number in numbers]
        case.threads.shutdown(wait=False, cancel_futures=True)
        return verdicts
    finally:
        carrier.close()


def with_defects(engine: RunningEngine, transport: str, names: Sequence[str]) -> list[Verdict]:
    """The property of each defect, which has to be red."""
    verdicts = []
    for name in names:
        # The defect before may have left a version loaded and not committed.
        engine.given.adapters[0].fence("another defect comes", engine.given.timeout_s)
        carrier = engine.carrier(transport)
        try:
            case = DEFECTS[name](engine.given, carrier, engine.facts)
            verdicts.append(tried(case.number, case, name))
            case.undo()
            case.threads.shutdown(wait=False, cancel_futures=True)
        finally:
            carrier.close()
    return verdicts


def rows(cell: Cell, options: argparse.Namespace) -> Iterator[Row]:
    """Start one engine and take it through the transports.

    Errors: whatever kept the engine from starting.
    """
    scratch = tempfile.TemporaryDirectory(prefix="pm-")
    with (
        scratch as directory,
        running(cell, Path(directory), options.transport) as engine,
    ):
        for transport in options.transport:
            begun = time.monotonic()
            if options.defect:
                verdicts = with_defects(engine, transport, options.defect)
            else:
                verdicts = examined(engine, transport, options.property)
            yield Row(cell.by(transport), verdicts, time.monotonic() - begun)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", choices=(*ENGINES, "reference"), default=ENGINES)
    parser.add_argument("--tp", nargs="+", type=int, choices=(1, 2), default=(1, 2))
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--property", nargs="+", type=int, choices=NUMBERS, default=NUMBERS)
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="float32")
    parser.add_argument("--defect", nargs="+", choices=(*DEFECTS, "all"), default=())
    parser.add_argument("--json", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    if "all" in options.defect:
        options.defect = tuple(DEFECTS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Go through the chosen part of the matrix."""
    options = parsed(arguments)
    chosen = product(options.engine, options.tp, options.kind, [options.dtype])
    done: list[Row] = []
    unstarted: list[str] = []
    _say(f"{'engine':9} {'':4}  {'kind':5} {'dtype':8} {'way':8} " + _heading())
    for cell in (Cell(*values) for values in chosen):
        if cell.impossible:
            _say(f"{cell} {NONE}: {cell.impossible}")
            continue
        watch = threading.Timer(ENGINE_S, _give_up)
        watch.daemon = True
        watch.start()
        begun = time.monotonic()
        try:
            for row in rows(cell, options):
                done.append(row)
                _say(str(row))
                _explain(row)
        except Exception as error:  # noqa: BLE001 - the next engine may start
            unstarted.append(f"{cell} {type(error).__name__}: {error}")
            _say(f"{cell} FAILED {traceback.format_exc(limit=-3)}")
        _say(f"{cell} {time.monotonic() - begun:.0f} s with its start and end")
        watch.cancel()
    if options.json:
        found = {"rows": [asdict(row) for row in done], "unstarted": unstarted}
        options.json.write_text(json.dumps(found, indent=1))
    if unstarted:
        return 2
    return 1 if any(_bad(verdict) for row in done for verdict in row.verdicts) else 0


def _give_up() -> None:
    """End this process, and with it whatever it started: something hangs where it must not."""
    faulthandler.dump_traceback(sys.__stderr__)
    os._exit(3)


def _bad(verdict: Verdict) -> bool:
    """Whether a property does not hold, or a defect was not noticed."""
    return verdict.result == (OK if verdict.defect else RED)


def _explain(row: Row) -> None:
    """A line for everything that is not simply ok."""
    for verdict in row.verdicts:
        if verdict.result != OK or verdict.defect:
            cause = f"[{verdict.defect}] " if verdict.defect else ""
            _say(f"    property {verdict.number}: {verdict.result} {cause}{verdict.detail}")


def _heading() -> str:
    return " ".join(f"{number:>4}" for number in NUMBERS)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    raise SystemExit(main())
