"""A contract cannot be weakened silently, and its skips are counted."""

from enum import StrEnum

import pytest

from rl_core.testing.contract import Contract
from rl_core.testing.rollout_contract import RolloutAdapterContract

pytest_plugins = ["pytester"]


class Ability(StrEnum):
    FLIES = "flies"
    SWIMS = "swims"


class Bird(Contract, contract=True):
    def test_flies(self):
        self.need(Ability.FLIES)

    def test_swims(self):
        self.need(Ability.SWIMS)


def test_redefining_a_test_is_an_error():
    with pytest.raises(TypeError, match=r"Hen redefines test_flies .*lacks"):

        class Hen(Bird):
            def test_flies(self):
                pass


def test_redefining_through_a_mixin_or_by_assignment_is_an_error():
    class Quiet:
        test_flies = None

    with pytest.raises(TypeError, match="redefines test_flies"):

        class Hen(Quiet, Bird):
            pass

    with pytest.raises(TypeError, match="redefines test_update_changes_the_answers"):

        class Mine(RolloutAdapterContract):
            test_update_changes_the_answers = staticmethod(lambda: None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lacks", {Ability.FLIES: " "}, "no reason for flies"),
        ("not_applicable", {"test_flies": ""}, "no reason for test_flies"),
        ("not_applicable", {"test_flys": "typo"}, "names no test"),
    ],
)
def test_declarations_need_reasons_and_right_names(name, value, message):
    with pytest.raises(TypeError, match=message):
        type("Hen", (Bird,), {name: value})


def test_own_tests_and_further_contracts_may_be_added():
    class Duck(Bird, contract=True):
        def test_quacks(self):
            pass

    class Mallard(Duck):
        def test_green_head(self):
            pass

    assert Mallard.promised_tests() == {"test_flies", "test_swims", "test_quacks"}


def test_skips_are_counted_with_their_reasons(pytester):
    pytester.makepyfile(
        """
        from enum import StrEnum
        import pytest
        from rl_core.testing.contract import Contract

        class Ability(StrEnum):
            FLIES = "flies"

        class Bird(Contract, contract=True):
            @pytest.mark.parametrize("height", [1, 2])
            def test_flies(self, height):
                self.need(Ability.FLIES)

            def test_swims(self):
                assert False

            def test_eats(self):
                pass

        class TestHen(Bird):
            lacks = {Ability.FLIES: "wings too short"}
            not_applicable = {"test_swims": "it has no pond"}

        def test_other():
            pytest.skip("not a contract")
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, skipped=4)
    result.stdout.fnmatch_lines(
        [
            "*= contracts =*",
            "   1 passed,  3 skipped  TestHen",
            "                2 skipped  lacks flies: wings too short",
            "                1 skipped  not applicable: it has no pond",
        ]
    )
    assert "not a contract" not in result.stdout.str()
