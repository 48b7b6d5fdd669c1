"""Host lists: what scontrol 22.05 printed for each input, and the way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.cluster.nodelist import compress, expand
from miles_hpc.core.errors import UserError

GOLDEN = [
    ("node[001-003,007]", "node001 node002 node003 node007"),
    ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
    ("nid[001097,1156-1157,1160]", "nid001097 nid1156 nid1157 nid1160"),
    ("nid[001097,001156-001157]", "nid001097 nid001156 nid001157"),
    ("frontier[00001-00002,10001]", "frontier00001 frontier00002 frontier10001"),
    ("n[008-011]", "n008 n009 n010 n011"),
    ("host[9-10]", "host9 host10"),
    ("host[09-11]", "host09 host10 host11"),
    ("host[09-100]", " ".join(f"host{n:02d}" for n in range(9, 101))),
    ("rack[0-1]_blade[0-1]", "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1"),
    ("n[1-2][3-4]", "n13 n14 n23 n24"),
    ("x[1-2][3-4]y[5-6]", "x13y5 x13y6 x23y5 x23y6 x14y5 x14y6 x24y5 x24y6"),
    ("node[1-3],node[2-4]", "node1 node2 node3 node2 node3 node4"),
    ("a[1-2],b3", "a1 a2 b3"),
    ("c429-002,c427-032", "c429-002 c427-032"),
    ("node01 node02", "node01 node02"),
    ("node01\nnode02\n", "node01 node02"),
    ("host[099-101]", "host099 host100 host101"),
    ("123", "123"),
    ("a[1,+2]", "a1 a02"),  # strtoul(3) reads these; the width is that of the text
    ("a[1, 2]", "a1 a02"),
    ("a[3-]", "a3"),
    ("a[1a-2]", "a01 a02"),
    ("a[99999999999999999999]", "a18446744073709551615"),
    ("a\tb", "a b"),
    ("a\u00a0b", "a\u00a0b"),  # no separator, as for Slurm
    ("[1-2]", "1 2"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "hosts"), GOLDEN)
def test_expand(text: str, hosts: str) -> None:
    assert expand(text) == hosts.split(" ") if hosts else expand(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "node[]",
        "node[3-1]",
        "c[1-2]-ib",
        "jwb[0001-0002].juwels",
        "a[x]",
        "a[1",
        "a]",
        "a[1,,2]",
        "a[1--2]",
        "a[0-65536]",
        "a[-1]",
        "a[1a]",
        "a[1 ]",
        "a[0x1]",
        "a[\u0661-\u0662]",
        "a[\u00b2]",
        "a[1],[",
        "a[1]]",
        "a[[1]]",
        "[",
    ],
)
def test_invalid_lists_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"host list"):
        expand(text)


def test_a_product_of_ranges_is_bounded() -> None:
    with pytest.raises(UserError, match=r"members"):
        expand("n[1-60000][1-60000]")
    with pytest.raises(UserError, match=r"members"):
        expand(",".join(["n[0-65535]"] * 17))


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("node3 node1 node2", "node[3,1-2]"),
        ("node1 node2 node3", "node[1-3]"),
        ("node7", "node7"),
        ("host9 host10", "host[9-10]"),
        ("host099 host100", "host[099-100]"),
        ("host1 host02", "host[1,02]"),
        ("c429-002 c427-032", "c429-002,c427-032"),
        ("login trainer1 trainer2", "login,trainer[1-2]"),
        ("1 2 07", "[1-2,07]"),
        ("a1 a1 a2", "a[1,1-2]"),
        ("n99999999999999999999 n1", "n99999999999999999999,n1"),  # no number that Slurm holds
        ("a\u0661 a\u0662", "a\u0661,a\u0662"),
        ("", ""),
    ],
)
def test_compress(hosts: str, text: str) -> None:
    assert compress(hosts.split()) == text


def test_a_long_run_is_cut_where_slurm_ends_a_range() -> None:
    hosts = [f"n{i}" for i in range(70_000)]
    assert compress(hosts) == "n[0-65535,65536-69999]"
    assert expand(compress(hosts)) == hosts


@pytest.mark.parametrize("host", ["", "a,b", "a b", "n[1-2]", "a]", "a\n"])
def test_names_that_a_list_cannot_hold(host: str) -> None:
    with pytest.raises(UserError, match=r"host name .*: expected a name without"):
        compress(["a", host])


_HOST = st.from_regex(r"[a-z][a-z-]{0,5}[0-9]{0,4}(_b[0-9]{1,3})?", fullmatch=True)


@given(st.lists(_HOST, max_size=40))
def test_any_hosts_come_back(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == hosts


@given(st.integers(0, 2000), st.integers(1, 300), st.integers(1, 6))
def test_runs_of_numbers_come_back_as_one_range(first: int, count: int, width: int) -> None:
    hosts = [f"nid{n:0{width}d}" for n in range(first, first + count)]
    assert expand(compress(hosts)) == hosts
    assert compress(hosts).count("-") == (1 if count > 1 else 0)
