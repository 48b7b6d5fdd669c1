"""The pure part of the Slurm box: syntax, addresses, rendered files, history lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from tools.slurm_box.history import expand_nodes, parse_history
from tools.slurm_box.plan import UNIX_SOCKET_LIMIT, BoxSpec, Group, Plan, max_root_length, parse_groups

NAMES = st.from_regex(r"[a-z]([a-z-]{0,14}[a-z])?", fullmatch=True)


def plan(spec: BoxSpec, **rest: object) -> Plan:
    fields = {"root": Path("/tmp/b"), "user": "u", "host": "here", "base_port": 21504, "slot": 3} | rest
    return Plan(spec=spec, **fields)  # type: ignore[arg-type]


@given(st.dictionaries(NAMES, st.tuples(st.integers(1, 40), st.integers(0, 16)), min_size=1, max_size=6))
def test_groups_read_back_what_was_written(groups: dict[str, tuple[int, int]]) -> None:
    nodes = ",".join(f"{name}:{count}" for name, (count, _) in groups.items())
    gpus = ",".join(f"{name}:{g}" for name, (_, g) in groups.items() if g)
    expected = tuple(Group(name=name, nodes=count, gpus=g) for name, (count, g) in groups.items())
    assert parse_groups(nodes, gpus) == expected
    spec = BoxSpec(groups=expected)
    assert spec.nodes_text == nodes
    assert BoxSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@given(st.text(max_size=30))
def test_any_text_is_groups_or_a_user_error(text: str) -> None:
    try:
        groups = parse_groups(text)
    except UserError as error:
        assert "\n" not in str(error).replace(text, "")
    else:
        assert groups and all(re.fullmatch(r"[a-z-]+", g.name) and g.nodes >= 1 for g in groups)


@pytest.mark.parametrize(
    ("nodes", "gpus", "says"),
    [
        ("", "", "GROUP:COUNT"),
        ("trainer", "", "GROUP:COUNT"),
        ("trainer:", "", "GROUP:COUNT"),
        ("trainer:x", "", "GROUP:COUNT"),
        ("trainer:-1", "", "GROUP:COUNT"),
        ("trainer:٢", "", "GROUP:COUNT"),
        ("Trainer:2", "", "lower-case"),
        ("h100:2", "", "lower-case"),
        ("trainer:2,", "", "GROUP:COUNT"),
        ("trainer:2;rollout:2", "", "GROUP:COUNT"),
        ("trainer:0", "", "expected 1 or more"),
        ("trainer:2,trainer:3", "", "twice"),
        ("trainer:2", "rollout:4", "no group 'rollout'"),
        ("trainer:2", "trainer:four", "--gpus"),
    ],
)
def test_bad_groups_are_refused(nodes: str, gpus: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        parse_groups(nodes, gpus)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"groups": ()}, "at least one group"),
        ({"groups": (Group(name="a", nodes=1), Group(name="a", nodes=2))}, "twice"),
        ({"groups": (Group(name="a", nodes=500),)}, "500 nodes"),
        ({"cpus": 0}, "--cpus"),
        ({"cluster": "My Cluster"}, "--name"),
        ({"node_timeout_s": 0}, "--node-timeout"),
    ],
)
def test_bad_specs_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        BoxSpec(**fields)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.booleans())
def test_addresses_are_distinct_and_ports_are_reserved(counts: list[int], netns: bool) -> None:
    groups = tuple(Group(name="g" + "abcdef"[i], nodes=count) for i, count in enumerate(counts))
    p = plan(BoxSpec(groups=groups, netns=netns))
    assert len(p.nodes) == sum(counts)
    assert len({(node.address, node.port) for node in p.nodes}) == len(p.nodes)
    assert len({node.name for node in p.nodes}) == len(p.nodes)
    assert all(node.port in p.ports and node.port not in (p.base_port, p.base_port + 1) for node in p.nodes)
    if netns:
        assert all(len(node.veth) <= 15 for node in p.nodes), "an interface's name has 15 bytes at most"
        assert p.controller_address not in {node.address for node in p.nodes}


def test_the_longest_root_leaves_room_for_sockets() -> None:
    spec = BoxSpec.parse("trainer:12,sandbox:2")
    root = "/" + "r" * (max_root_length(spec) - 1)
    longest = f"{root}/spool/trainer12/trainer12_9999999.4294967291"
    assert len(longest) == UNIX_SOCKET_LIMIT
    assert len(f"{root}/munge/munge.sock") <= UNIX_SOCKET_LIMIT


def test_slurm_conf_declares_nodes_and_partitions() -> None:
    text = plan(BoxSpec.parse("trainer:2,sandbox:1", "trainer:4", cpus=16)).slurm_conf()
    nodes = [line for line in text.splitlines() if line.startswith("NodeName=")]
    assert nodes[0].split() == [
        "NodeName=trainer1",
        "NodeHostname=localhost",
        "NodeAddr=127.0.0.1",
        "Port=21506",
        "CPUs=16",
        "RealMemory=262144",
        "Gres=gpu:4",
        "Feature=trainer",
        "State=UNKNOWN",
    ]
    assert [line.split()[0] for line in nodes] == ["NodeName=trainer1", "NodeName=trainer2", "NodeName=sandbox1"]
    assert "Gres" not in nodes[2]
    partitions = [line for line in text.splitlines() if line.startswith("PartitionName=")]
    assert partitions == [
        "PartitionName=trainer Nodes=trainer[1-2] MaxTime=INFINITE State=UP Default=YES GraceTime=20",
        "PartitionName=sandbox Nodes=sandbox1 MaxTime=INFINITE State=UP GraceTime=20",
        "PartitionName=all Nodes=ALL MaxTime=INFINITE State=UP GraceTime=20",
        "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "SlurmctldHost=here(127.0.0.1)",
        "AuthInfo=socket=/tmp/b/munge/munge.sock,cred_expire=5",
        "SlurmdSpoolDir=/tmp/b/spool/%n",
        "TmpFS=/tmp/b/tmp/%n",
        "SlurmdParameters=config_overrides",
        "MpiDefault=pmi2",
        "ReturnToService=2",
        "OverTimeLimit=0",
        "KillWait=15",
        "MinJobAge=600",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobCompType=jobcomp/filetxt",
        "JobCompLoc=/tmp/b/log/jobcomp.log",
        "AccountingStorageType=accounting_storage/none",
    ],
)
def test_slurm_conf_has_the_settings_that_one_host_needs(line: str) -> None:
    assert line in plan(BoxSpec()).slurm_conf().splitlines()


def test_every_path_in_the_configuration_lies_below_the_root() -> None:
    p = plan(BoxSpec.parse("trainer:2", "trainer:2", accounting=True), root=Path("/tmp/only-here"))
    text = p.slurm_conf() + p.gres_conf() + p.cgroup_conf() + p.slurmdbd_conf()
    paths = set(re.findall(r"(?<=[=(])/[^\s,)]+", text)) - {"/bin/true"}
    assert paths and all(path.startswith("/tmp/only-here/") for path in paths)


def test_gres_conf_names_a_file_per_gpu() -> None:
    p = plan(BoxSpec.parse("trainer:2,rollout:1,sandbox:1", "trainer:4,rollout:1"))
    assert p.gres_conf().splitlines() == [
        "NodeName=trainer[1-2] Name=gpu File=/tmp/b/dev/gpu[0-3]",
        "NodeName=rollout1 Name=gpu File=/tmp/b/dev/gpu0",
    ]
    assert p.fake_gpus == 4


def test_namespaces_give_each_node_its_address() -> None:
    p = plan(BoxSpec.parse("trainer:2", netns=True))
    assert p.hosts().splitlines() == [
        "127.0.0.1 localhost",
        "10.77.3.1 here",
        "10.77.3.2 trainer1",
        "10.77.3.3 trainer2",
    ]
    assert "NodeName=trainer2 NodeHostname=trainer2 NodeAddr=10.77.3.3 Port=21506" in p.slurm_conf()
    assert "SlurmctldHost=here(10.77.3.1)" in p.slurm_conf()


def test_unknown_node_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no node 'trainer3'.*trainer1, trainer2"):
        plan(BoxSpec.parse("trainer:2")).node("trainer3")


LINE = (
    "JobId={id} UserId=ann(1000) GroupId=ann(1000) Name={name} JobState={state} Partition=trainer TimeLimit=5 "
    "StartTime=2026-03-01T10:00:00 EndTime=2026-03-01T10:00:07 NodeList={nodes} NodeCnt=2 ProcCnt=2 WorkDir=/home/ann "
    "ReservationName= Tres=cpu=2,node=2,billing=2 Account= QOS= WcKey= Cluster=unknown "
    "SubmitTime=2026-03-01T09:59:59 EligibleTime=2026-03-01T09:59:59{het} DerivedExitCode=0:0 ExitCode=0:0 "
)


def test_history_tells_components_and_requeues() -> None:
    text = "\n".join(
        [
            LINE.format(id=7, name="t", state="PENDING", nodes="trainer[1-2]", het=" HetJobId=7 HetJobOffset=0"),
            LINE.format(id=8, name="r", state="NODE_FAIL", nodes="rollout1", het=" HetJobId=7 HetJobOffset=1"),
            LINE.format(id=9, name="two words", state="COMPLETED", nodes="(null)", het=""),
            "JobId=10 UserId=ann(1000) Name=cut o",
        ]
    )
    a, b, c = parse_history(text)
    assert (a.job_id, a.het_job_id, a.het_offset, a.state, a.nodes) == (7, 7, 0, "REQUEUED", ("trainer1", "trainer2"))
    assert (b.job_id, b.het_job_id, b.het_offset, b.state, b.nodes) == (8, 7, 1, "NODE_FAIL", ("rollout1",))
    assert (c.het_job_id, c.het_offset, c.name, c.nodes, c.user) == (None, None, "two words", (), "ann")
    assert (a.start, a.end) == ("2026-03-01T10:00:00", "2026-03-01T10:00:07")


@given(st.lists(st.tuples(NAMES, st.integers(1, 50)), min_size=1, max_size=4, unique_by=lambda group: group[0]))
def test_node_lists_expand(groups: list[tuple[str, int]]) -> None:
    text = ",".join(f"{name}1" if count == 1 else f"{name}[1-{count}]" for name, count in groups)
    assert expand_nodes(text) == tuple(f"{name}{k}" for name, count in groups for k in range(1, count + 1))


def test_node_lists_with_gaps_expand() -> None:
    assert expand_nodes("a[1-2,4],b1") == ("a1", "a2", "a4", "b1")
