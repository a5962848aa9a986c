import inspect
import pickle
import re

import pytest

from rl_core import errors
from rl_core.errors import DigestMismatchError, MiniRLError
from rl_core.tensor_counts import TensorCounts

TREE = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", TREE)
def test_errors_cross_processes(cls):
    error = pickle.loads(pickle.dumps(cls("tensor 'a' of rank 1")))
    assert type(error) is cls
    assert str(error) == "tensor 'a' of rank 1"


def test_a_digest_mismatch_carries_its_tensors_across():
    error = DigestMismatchError("two differ", ["a", "b"])
    error.add_note("seen on rank 1")
    error.counting(TensorCounts(matched=3))
    copy = pickle.loads(pickle.dumps(error))
    assert copy.tensors == ("a", "b")
    assert copy.counts == TensorCounts(matched=3, mismatched=2)
    assert str(copy) == "two differ"


@pytest.mark.parametrize("cls", [cls for cls in TREE if cls is not MiniRLError])
def test_errors_belong_to_the_tree_and_to_a_standard_error(cls):
    assert issubclass(cls, MiniRLError)
    assert any(base.__module__ == "builtins" for base in cls.__mro__[1:-3]), cls.__mro__


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = re.findall(
        r"(\w+Error)(?: \((\w+)\))?(?= |$)", errors.__doc__.split("```")[1], re.MULTILINE
    )
    assert {name for name, _ in drawn} == {cls.__name__ for cls in TREE}
    for name, standard in drawn:
        if standard:
            cls = getattr(errors, name)
            assert standard in {base.__name__ for base in cls.__mro__}
