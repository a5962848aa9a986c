"""What every contract has in common: it cannot be weakened silently.

A contract is a class of pytest tests. A backend subclasses it, gives the fixtures it asks for, and
declares what it lacks, each with a reason. A declared lack skips tests; `pytest_plugin` counts the
skips at the end of the run. Redefining a test of the contract is an error.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import pytest

SKIP_PREFIX = "contract: "
"""Start of every reason with which a contract skips one of its tests."""


class Contract:
    """Base of all contracts.

    Attributes:
        lacks: capabilities that the backend does not have, each with the reason.
        not_applicable: names of tests that make no sense for the backend, each with the reason.
    """

    lacks: ClassVar[Mapping[Any, str]] = {}
    not_applicable: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, *, contract: bool = False, **kwargs: Any) -> None:
        """Check a backend's subclass; `contract=True` marks a class that defines tests."""
        super().__init_subclass__(**kwargs)
        cls._contract = contract
        if contract:
            return
        promised = cls.promised_tests()
        redefined = sorted(name for base in _own(cls) for name in vars(base) if name in promised)
        if redefined:
            msg = (
                f"{cls.__name__} redefines {', '.join(redefined)} of its contract; declare in "
                "`lacks` or `not_applicable` what does not apply, with the reason"
            )
            raise TypeError(msg)
        _check_reasons(cls, promised)

    _contract: ClassVar[bool] = True

    @classmethod
    def promised_tests(cls) -> set[str]:
        """Names of the tests that the contracts of this class define."""
        contracts = [base for base in cls.__mro__ if vars(base).get("_contract", False)]
        return {name for base in contracts for name in vars(base) if name.startswith("test_")}

    @pytest.fixture(autouse=True)
    def _applicable(self, request: pytest.FixtureRequest) -> None:
        name = getattr(request.node, "originalname", request.node.name)
        if name in self.not_applicable:
            pytest.skip(f"{SKIP_PREFIX}not applicable: {self.not_applicable[name]}")

    def need(self, capability: StrEnum) -> None:
        """Skip the running test, with the declared reason, if the backend lacks `capability`."""
        if capability in self.lacks:
            pytest.skip(f"{SKIP_PREFIX}lacks {capability}: {self.lacks[capability]}")


def _own(cls: type[Contract]) -> list[type]:
    """`cls` and those of its bases that are not contracts."""
    return [base for base in cls.__mro__ if not vars(base).get("_contract", False)]


def _check_reasons(cls: type[Contract], promised: set[str]) -> None:
    unknown = set(cls.not_applicable) - promised
    if unknown:
        raise TypeError(f"{cls.__name__}.not_applicable names no test: {sorted(unknown)}")
    for subject, reason in {**cls.lacks, **cls.not_applicable}.items():
        if not reason.strip():
            raise TypeError(f"{cls.__name__} gives no reason for {subject}")
