import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest
from rl_core.testing.contract import Contract

class Base(Contract, contract=True):
    def test_good(self): pass
    def test_bad(self): assert False
    def test_lacking(self): self.need("speed")
    def test_senseless(self): pass

class TestMine(Base):
    lacks = {"speed": "it is slow"}
    not_applicable = {"test_senseless": "no sense"}

def test_other(): pass
"""


def test_checks_and_skips_are_counted_once(pytester: pytest.Pytester):
    inner = pytester.mkdir("inner")
    (inner / "test_it.py").write_text(TESTS)
    lines = pytester.runpytest_inprocess("-p", "no:cacheprovider").outlines
    assert [line for line in lines if line.endswith("TestMine")] == [
        "   1 passed, 1 failed,  2 skipped  TestMine"
    ]
    assert sum("1 skipped  lacks speed: it is slow" in line for line in lines) == 1


def test_a_run_without_contracts_says_nothing(pytester: pytest.Pytester):
    pytester.makepyfile("def test_other(): pass")
    lines = pytester.runpytest_inprocess().outlines
    assert not any(line.startswith("=") and " contracts " in line for line in lines)


def test_a_module_that_is_skipped_or_broken_is_nobodys_check(pytester: pytest.Pytester):
    pytester.makepyfile(
        test_mine=TESTS,
        test_skipped="import pytest; pytest.importorskip('made_up_library')",
        test_broken="import made_up_library",
    )
    lines = pytester.runpytest_inprocess("--continue-on-collection-errors").outlines
    assert [line for line in lines if line.endswith("TestMine")] == [
        "   1 passed, 1 failed,  2 skipped  TestMine"
    ]


def test_markers_of_the_kit_need_no_configuration(pytester: pytest.Pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.engine\ndef test_it(): pass")
    pytester.runpytest_inprocess("--strict-markers").assert_outcomes(passed=1)
