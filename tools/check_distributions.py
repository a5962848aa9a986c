"""Build every wheel and sdist, and use them as somebody else would.

    uv run tools/check_distributions.py                     everything
    uv run tools/check_distributions.py rl-core together    only these
    uv run tools/check_distributions.py --list              the names as JSON, for a CI matrix

Everything happens in a temporary directory, in environments that know nothing of this checkout. A
table says what held, a package a line; exit code 1 if anything did not. The steps:

    build     sdist, and the wheel from the sdist
    wheel     the package, `py.typed`, licence, nothing else; metadata, the pin of rl-core
    sdist     sources, tests, README, changelog, licence
    bare      installed without an extra: neither siblings nor Ray or an engine come with it, it
              imports, its entry points load, and using it without its library is a ComponentError
              that names the extra
    extra     with the extra that brings the library: still nothing foreign, and what its entry
              points name can be loaded
    readme    the first program of its README runs, before anything of the tests is installed
    beside    where the library is there already, the wheel brings itself and rl-core, and changes
              nothing
    tests     the tests in the sdist, contracts included

`together` installs all of them: first the wheels, then with the README's line.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from alone import Alone
from distributions import (
    CORE,
    Distribution,
    DistributionError,
    build,
    check_sdist,
    check_wheel,
)
from fresh_environment import CommandError
from test_packages import packages
from together import check_readme_line, check_wheels

TOGETHER = "together"
ALONE = ("build", "wheel", "sdist", "bare", "extra", "readme", "beside", "tests")
ALL = ("wheels", "readme line")


class Results:
    """What each step of each package came to."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], str] = {}
        self._failures: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether anything did not hold."""
        return bool(self._failures)

    def record(self, name: str, step: str, check: Callable[[], object]) -> object:
        """Run one check, and note how it ended; what it returns, which stands in the table if text.

        None after a failure.
        """
        begin, found = time.monotonic(), None
        try:
            found = check()
        except (DistributionError, CommandError) as error:
            self._cells[name, step] = "FAILED"
            self._failures.append(f"{name} {step}: {str(error).splitlines()[-1]}")
            sys.stderr.write(f"{error}\n")
        else:
            self._cells[name, step] = f"ok, {found}" if isinstance(found, str) else "ok"
        took = f"{time.monotonic() - begin:.0f} s"
        sys.stderr.write(f"{name} {step}: {self._cells[name, step]} ({took})\n")
        return found

    def table(self, names: list[str], steps: tuple[str, ...]) -> str:
        """A line a package, a column a step; `-` is a step that an earlier one prevented."""
        rows = [("", *steps)]
        rows += [(name, *(self._cells.get((name, step), "-") for step in steps)) for name in names]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines) + "\n"

    def failures(self) -> str:
        """A line for each step that failed; what it printed is on stderr."""
        return "".join(f"FAILED {failure}\n" for failure in self._failures)


def check_alone(results: Results, item: Distribution, directory: Path, core: str) -> None:
    """All steps of one package after its build."""
    results.record(item.name, "wheel", lambda: check_wheel(item, core))
    results.record(item.name, "sdist", lambda: check_sdist(item))
    alone = Alone(item, directory)
    for step, check in (
        ("bare", alone.check_bare),
        ("extra", alone.check_extra),
        ("readme", alone.check_readme),
        ("beside", alone.check_beside),
        ("tests", alone.check_tests),
    ):
        results.record(item.name, step, check)
    alone.remove()


def check_together(results: Results, items: list[Distribution], directory: Path) -> None:
    """All packages in one environment."""
    results.record(TOGETHER, ALL[0], lambda: check_wheels(items, directory))
    results.record(TOGETHER, ALL[1], lambda: check_readme_line(items, directory))


def build_all(results: Results, directory: Path) -> dict[str, Distribution]:
    """What could be built, and `constraints.txt` in `directory` that says where it is."""
    built: dict[str, Distribution] = {}
    dist = directory / "dist"
    dist.mkdir()
    for name, source in packages().items():
        made = results.record(name, "build", partial(build, name, source, dist))
        if isinstance(made, Distribution):
            built[name] = made
    lines = (item.requirement() for item in built.values())
    (directory / "constraints.txt").write_text("\n".join(lines) + "\n")
    return built


def check(wanted: list[str], directory: Path) -> Results:
    """Build everything, check what is wanted."""
    results = Results()
    built = build_all(results, directory)
    for name in wanted:
        if name in built and CORE in built:
            version = built[CORE].project["version"]
            check_alone(results, built[name], directory, version)
    if TOGETHER in wanted and len(built) == len(packages()):
        check_together(results, list(built.values()), directory)
    return results


def main() -> int:
    """Exit code 1 if anything did not hold."""
    known = [*sorted(packages()), TOGETHER]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all if none is given")
    parser.add_argument("--list", action="store_true", help="print the names as JSON and stop")
    arguments = parser.parse_args()
    if arguments.list:
        sys.stdout.write(json.dumps(known) + "\n")
        return 0
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    wanted = arguments.names or known
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the directory is removed
    with tempfile.TemporaryDirectory() as directory:
        results = check(wanted, Path(directory))
    alone = [name for name in wanted if name != TOGETHER]
    sys.stdout.write(results.table(alone, ALONE) if alone else "")
    sys.stdout.write(results.table([TOGETHER], ALL) if TOGETHER in wanted else "")
    sys.stdout.write(results.failures())
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
