"""What we write loads back equal."""

import datetime
import tomllib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core import toml

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_SCALAR = st.one_of(
    _TEXT,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.dates(),
    st.times().map(lambda t: t.replace(fold=0)),
)
_VALUE: st.SearchStrategy[Any] = st.recursive(
    _SCALAR, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4), max_leaves=12
)


@given(st.dictionaries(_TEXT, _VALUE, max_size=6))
def test_round_trip(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml.dumps(table)) == table


class _Inner(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    maybe: int | None = None


class _Outer(msgspec.Struct, frozen=True, kw_only=True):
    inner: _Inner
    many: list[_Inner]
    pair: tuple[int, int] = (1, 2)


def test_structs_become_tables_and_none_is_left_out() -> None:
    text = toml.dumps(_Outer(inner=_Inner(n=1), many=[_Inner(n=2, maybe=3), _Inner(n=4)]))
    assert tomllib.loads(text) == {"pair": [1, 2], "inner": {"n": 1}, "many": [{"n": 2, "maybe": 3}, {"n": 4}]}


def test_floats_at_the_edges() -> None:
    table = {"big": 1e300, "small": 5e-324, "round": 1e16, "inf": float("inf"), "minus": -0.0}
    assert tomllib.loads(toml.dumps(table)) == table


@pytest.mark.parametrize("value", [None, object(), b"bytes", datetime.timedelta(1), {1: 2}])
def test_what_toml_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"TOML"):
        toml.dumps({"key": [value]})
