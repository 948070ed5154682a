"""Selection of the parametrized cases that run in `make test`; `make nightly` runs all of them."""

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def nightly_except(always: Collection[T], cases: Iterable[T]) -> list[ParameterSet]:
    """Parameters for `parametrize`: the cases in `always` run in every test run, the other cases only nightly.

    A case for several argument names is a tuple."""
    cases = list(cases)
    missing = [case for case in always if case not in cases]
    assert not missing, f"{missing} are not among the cases"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in always else (pytest.mark.nightly,)
        )
        for case in cases
    ]
