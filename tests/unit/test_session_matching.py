"""Which changes of a message that comes back each matcher bears."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.core.registry import names
from miles_hpc.rollout.session.errors import MatcherFailed
from miles_hpc.rollout.session.matching import load_matcher

NAMES = ("strict", "loose_tool_call", "role_content_only")


def call(arguments: Any = "{}", name: str = "run", **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def turn(content: Any = "a", calls: Any = None, reasoning: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": calls, "reasoning_content": reasoning, **more}


# recorded, sent, by whom they are found equal: s(trict), l(oose), r(ole and content)
TABLE: list[tuple[str, Any, Any, str]] = [
    ("the same", turn(), turn(), "slr"),
    ("other content", turn("a"), turn("b"), ""),
    ("content untrimmed", turn("a"), turn("a "), ""),
    ("other role", turn(), turn() | {"role": "user"}, ""),
    ("content None and empty", turn(None), turn(""), "slr"),
    ("content None and a list", turn(None), turn([]), "slr"),
    ("content 0 isn't empty", turn(None), turn(0), ""),
    ("keys absent", turn(), {"role": "assistant", "content": "a"}, "slr"),
    ("calls None and a list", turn(calls=None), turn(calls=[]), "slr"),
    ("extra keys", turn(), turn(refusal="x", name="y"), "slr"),
    ("content in parts is another", turn("a"), turn([{"type": "text", "text": "a"}]), ""),
    ("index of a call", turn(calls=[call()]), turn(calls=[call(index=0)]), "slr"),
    ("index on either side", turn(calls=[call(index=3)]), turn(calls=[call(index=0)]), "slr"),
    ("other name of a function", turn(calls=[call()]), turn(calls=[call(name="x")]), "r"),
    ("other id of a call", turn(calls=[call()]), turn(calls=[call() | {"id": "c2"}]), "r"),
    ("unknown field of a call", turn(calls=[call()]), turn(calls=[call(more=1)]), "r"),
    ("a call less", turn(calls=[call(), call()]), turn(calls=[call()]), "r"),
    ("order of calls", turn(calls=[call(), call(name="x")]), turn(calls=[call(name="x"), call()]), "r"),
    ("empty field of a call", turn(calls=[call()]), turn(calls=[call(custom=None)]), "lr"),
    ("empty field left out", turn(calls=[call(custom="")]), turn(calls=[call()]), "lr"),
    ("spacing", turn(calls=[call('{"a":1}')]), turn(calls=[call('{ "a" : 1 }')]), "lr"),
    ("object for text", turn(calls=[call('{"a":1}')]), turn(calls=[call({"a": 1})]), "lr"),
    ("order of keys", turn(calls=[call('{"a":1,"b":2}')]), turn(calls=[call('{"b":2,"a":1}')]), "lr"),
    ("order of keys, deep", turn(calls=[call('{"d":{"a":1,"b":2}}')]), turn(calls=[call('{"d":{"b":2,"a":1}}')]), "lr"),
    ("order in lists", turn(calls=[call('{"a":[1,2]}')]), turn(calls=[call('{"a":[2,1]}')]), "r"),
    ("escapes", turn(calls=[call('{"a":"é"}')]), turn(calls=[call('{"a":"\\u00e9"}')]), "lr"),
    ("no arguments", turn(calls=[call("")]), turn(calls=[call("{}")]), "lr"),
    ("None as arguments", turn(calls=[call(None)]), turn(calls=[call({})]), "lr"),
    ("1 and 1.0", turn(calls=[call('{"a":1}')]), turn(calls=[call('{"a":1.0}')]), "lr"),
    ("1e2 and 100", turn(calls=[call('{"a":1e2}')]), turn(calls=[call('{"a":100}')]), "lr"),
    ("0.1 as a number", turn(calls=[call('{"a":0.1}')]), turn(calls=[call({"a": 0.1})]), "lr"),
    (
        "decimals beyond a float",
        turn(calls=[call('{"a":0.1000000000000000055}')]),
        turn(calls=[call('{"a":0.1}')]),
        "r",
    ),
    ("whole numbers beyond a float", turn(calls=[call(f'{{"a":{2**60}}}')]), turn(calls=[call({"a": 2**60 + 1})]), "r"),
    (
        "numbers of 5000 digits",
        turn(calls=[call('{"a":1%s}' % ("0" * 5000))]),
        turn(calls=[call('{"a":1e5000}')]),
        "lr",
    ),
    ("true isn't 1", turn(calls=[call('{"a":true}')]), turn(calls=[call('{"a":1}')]), "r"),
    ("text isn't a number", turn(calls=[call('{"a":"1"}')]), turn(calls=[call('{"a":1}')]), "r"),
    ("null isn't absent", turn(calls=[call('{"a":null}')]), turn(calls=[call("{}")]), "r"),
    ("a key twice, word by word", turn(calls=[call('{"a":1,"a":1}')]), turn(calls=[call('{"a":1,"a":1}')]), "slr"),
    ("a key twice, other words", turn(calls=[call('{"a":1,"a":1}')]), turn(calls=[call('{"a":1}')]), "r"),
    ("NaN, word by word", turn(calls=[call('{"a":NaN}')]), turn(calls=[call('{"a":NaN}')]), "slr"),
    ("NaN, other words", turn(calls=[call('{"a":NaN}')]), turn(calls=[call('{"a": NaN}')]), "r"),
    ("not JSON, word by word", turn(calls=[call("{a")]), turn(calls=[call("{a")]), "slr"),
    ("not JSON", turn(calls=[call("{a")]), turn(calls=[call("{ a")]), "r"),
    ("not an object", turn(calls=[call("[1]")]), turn(calls=[call("[ 1]")]), "r"),
    ("an exponent out of all bounds", turn(calls=[call('{"a":1e99999999999999999999}')]), turn(calls=[call()]), "r"),
    ("too deep", turn(calls=[call('{"a":' * 9999 + "1" + "}" * 9999)]), turn(calls=[call()]), "r"),
    ("reasoning", turn(reasoning="so"), turn(reasoning="so"), "slr"),
    ("other reasoning", turn(reasoning="so"), turn(reasoning="no"), "r"),
    ("reasoning trimmed", turn(reasoning="\nso\n"), turn(reasoning="so"), "lr"),
    ("reasoning left out", turn(reasoning="so"), turn(), "lr"),
    ("reasoning added", turn(), turn(reasoning="so"), "r"),
    ("calls that aren't a list", turn(calls={"a": 1}), turn(calls={"a": 1}), "slr"),
    ("calls that aren't objects", turn(calls=["x"]), turn(calls=["y"]), "r"),
    ("a function that isn't an object", turn(calls=[{"function": "x"}]), turn(calls=[{"function": "y"}]), "r"),
    ("not a message", turn(), "a", ""),
    ("nothing", turn(), None, ""),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("recorded", "sent", "equal"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(name: str, recorded: Any, sent: Any, equal: str) -> None:
    assert load_matcher(name)(recorded, sent) is (name[0] in equal)


def test_the_table_shows_every_matcher_both_ways() -> None:
    for letter in "slr":
        assert {letter in row[3] for row in TABLE} == {True, False}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.randoms(use_true_random=False))
def test_arguments_written_anew_are_the_same(arguments: dict[str, Any], random: Any) -> None:
    loose = load_matcher("loose_tool_call")
    keys = list(arguments)
    random.shuffle(keys)
    anew = json.dumps({k: arguments[k] for k in keys}, indent=1, ensure_ascii=random.random() < 0.5)
    recorded = turn(calls=[call(json.dumps(arguments))])
    assert loose(recorded, turn(calls=[call(anew)]))
    assert loose(recorded, turn(calls=[call(arguments)]))
    assert not loose(recorded, turn(calls=[call(json.dumps(arguments | {"": "another value"}))])) or (
        arguments.get("") == "another value"
    )


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4), st.decimals(min_value=1, max_value=2, places=9))
def test_numbers_are_compared_exactly(a: Decimal, b: Decimal) -> None:
    loose = load_matcher("loose_tool_call")
    equal = loose(turn(calls=[call(f'{{"a":{a:f}}}')]), turn(calls=[call(f'{{"a":{b:f}}}')]))
    assert equal is (a == b)


def just_true(recorded: Any, sent: Any) -> bool:
    return True


def truthy(recorded: Any, sent: Any) -> Any:
    return 1


def broken(recorded: Any, sent: Any) -> bool:
    raise KeyError("nothing")


def test_a_matcher_of_ones_own() -> None:
    matcher = load_matcher("tests.unit.test_session_matching:just_true")
    assert matcher(turn(), turn("other")) is True and not matcher.reflexive
    assert matcher(turn(), "not a message") is False


@pytest.mark.parametrize(
    ("name", "message"), [("truthy", "returned int 1; expected exactly True or False"), ("broken", "raised KeyError")]
)
def test_broken_matchers_are_named(name: str, message: str) -> None:
    with pytest.raises(MatcherFailed, match=message) as caught:
        load_matcher(f"tests.unit.test_session_matching:{name}")(turn(), turn())
    assert caught.value.status == 500


def test_unknown_matchers() -> None:
    assert set(NAMES) <= set(names("matcher"))
    with pytest.raises(UserError, match="did you mean 'strict'"):
        load_matcher("strikt")
    with pytest.raises(UserError, match="can't load"):
        load_matcher("tests.unit.test_session_matching:nothing")
