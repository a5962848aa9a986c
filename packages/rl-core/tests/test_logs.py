from enum import Enum

import pytest

from rl_core.logs import kv, render
from rl_core.versions import PolicyVersion


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (None, "none"),
        (3, "3"),
        (0.123456, "0.1235"),
        (1.0, "1"),
        (float("nan"), "nan"),
        (1.5e-7, "1.5e-07"),
        ("text", "text"),
        (Colour.RED, "red"),
        (PolicyVersion(1, 2), "e1.s2"),
        ([1, None, 0.5], "[1, none, 0.5]"),
        ((), "[]"),
        ({"a": 1.0, "b": [True]}, "{a: 1, b: [true]}"),
    ],
)
def test_values(value, text):
    assert render(value) == text


def test_fields_keep_their_order():
    assert kv(zeta=1, alpha=2.0, mode="fused") == "zeta=1, alpha=2, mode=fused"
    assert kv() == ""
