"""Claims of terms and attempts, and what they fence."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from miles_hpc.control.membership import ServiceAddress, find_controller, list_services, publish_service
from miles_hpc.control.terms import Claim, check_newest, claim_attempt, claim_term, newest_term, read_claim
from miles_hpc.core.errors import FencedError
from miles_hpc.core.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def test_terms_count_up_and_say_who_claimed_them(paths: RunPaths) -> None:
    assert newest_term(paths) == 0
    assert [claim_term(paths, attempt=1), claim_term(paths, attempt=2)] == [1, 2]
    claim = read_claim(paths, 2)
    assert claim is not None and (claim.term, claim.attempt) == (2, 2)


def test_concurrent_claims_get_different_terms(paths: RunPaths) -> None:
    with ThreadPoolExecutor(8) as pool:
        terms = list(pool.map(lambda _: claim_term(paths, attempt=1), range(24)))
    assert sorted(terms) == list(range(1, 25))


def test_a_newer_claim_fences_the_older_one(paths: RunPaths) -> None:
    attempt = claim_attempt(paths)
    old = claim_term(paths, attempt)
    check_newest(paths, old, attempt)
    claim_term(paths, attempt)
    with pytest.raises(FencedError, match="term 1 is over: term 2"):
        check_newest(paths, old, attempt)


def test_an_older_attempt_can_neither_claim_nor_publish(paths: RunPaths) -> None:
    old = claim_attempt(paths)
    term = claim_term(paths, old)
    new = claim_attempt(paths)
    with pytest.raises(FencedError, match="attempt 1 is over"):
        claim_term(paths, old)
    with pytest.raises(FencedError, match="attempt 1 is over"):
        check_newest(paths, term, old)
    assert newest_term(paths) == term
    check_newest(paths, claim_term(paths, new), new)


def test_a_late_claim_of_an_older_attempt_fences_nobody(paths: RunPaths) -> None:
    """A node that was cut off may be between its check and its claim when the next attempt begins."""
    old, new = claim_attempt(paths), claim_attempt(paths)
    mine = claim_term(paths, new)
    late = paths.term(mine + 1)
    late.mkdir()
    claim = Claim(term=mine + 1, attempt=old, host="cut-off", pid=1, time=0.0)
    (late / "claim.json").write_bytes(msgspec.json.encode(claim))
    check_newest(paths, mine, new)
    assert newest_term(paths, new) == mine
    publish_service(paths, ServiceAddress(name="controller", addresses=("tcp://a:1",), attempt=new, term=mine))
    found = find_controller(paths, new)
    assert found is not None and found.term == mine
    assert claim_term(paths, new) == mine + 2


def test_find_controller_follows_terms_of_its_own_attempt(paths: RunPaths) -> None:
    attempt = claim_attempt(paths)
    assert find_controller(paths, attempt) is None
    first = claim_term(paths, attempt)
    assert find_controller(paths, attempt) is None  # claimed, not listening yet
    publish_service(paths, ServiceAddress(name="controller", addresses=("tcp://a:1",), attempt=attempt, term=first))
    found = find_controller(paths, attempt)
    assert found is not None and (found.term, found.addresses) == (first, ("tcp://a:1",))
    claim_term(paths, attempt)
    assert find_controller(paths, attempt) is None


def test_a_newer_attempt_fences_what_was_left_over(paths: RunPaths) -> None:
    old = claim_attempt(paths)
    claim_term(paths, old)
    claim_attempt(paths)
    with pytest.raises(FencedError, match="attempt 1 is over"):
        find_controller(paths, old)


def test_services_are_listed_by_prefix(paths: RunPaths) -> None:
    term = claim_term(paths, claim_attempt(paths))
    for name in ("sandbox-b", "sandbox-a", "controller"):
        publish_service(paths, ServiceAddress(name=name, addresses=(f"tcp://{name}:1",), attempt=1, term=term))
    assert [s.name for s in list_services(paths, term, "sandbox-")] == ["sandbox-a", "sandbox-b"]
    assert list_services(paths, term + 1, "sandbox-") == []
