"""What a box consists of, as pure data: specification, addresses, and the text of every configuration file.

    BoxSpec   what the user asks for: groups of nodes, CPUs, fake GPUs, modes
    Plan      BoxSpec + its place, ports and subnet; renders slurm.conf, gres.conf, hosts, slurmdbd.conf

Nothing here touches the file system, the network or a process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_hpc.core.errors import UserError
from tools.slurm_box.declared import Declared

__all__ = ["BoxSpec", "Group", "Node", "Plan", "max_root_length", "parse_groups"]

#: sun_path holds 108 bytes with the closing NUL (unix(7)).
UNIX_SOCKET_LIMIT = 107
#: "_<job id>.<step id>" behind a node's name; the batch step has id 4294967291.
STEP_SUFFIX = "_9999999.4294967291"
PORT_BLOCK = 64
ALL_PARTITION, URGENT_PARTITION = "all", "urgent"
PREEMPT_GRACE_S = 20
MAX_NODES = 240  # addresses .2 and up in one /24
_NAME = re.compile(r"[a-z][a-z-]{0,14}[a-z]|[a-z]", re.ASCII)
_NODES_SYNTAX = "GROUP:COUNT[,GROUP:COUNT...], for example trainer:2,rollout:2,sandbox:2"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes of one kind. The partition has the group's name, the nodes are name1, name2, ..."""

    name: str
    nodes: int
    gpus: int = 0  # fake GRES per node


def parse_groups(nodes: str, gpus: str = "") -> tuple[Group, ...]:
    """Groups from `trainer:2,rollout:2` and GPUs per node of a group from `trainer:4`.

    Raises UserError for bad syntax, a name given twice, a count below 1, and GPUs for a group that isn't in `nodes`.
    """
    counts = _counts(nodes, "--nodes")
    devices = _counts(gpus, "--gpus") if gpus.strip() else {}
    for name in devices:
        if name not in counts:
            raise UserError(f"--gpus {gpus}: no group {name!r} in --nodes {nodes}; expected one of {', '.join(counts)}")
    return tuple(Group(name=name, nodes=count, gpus=devices.get(name, 0)) for name, count in counts.items())


def _counts(text: str, option: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in text.split(","):
        name, colon, number = item.strip().partition(":")
        if not colon or not _NAME.fullmatch(name) or not re.fullmatch(r"[0-9]{1,4}", number, re.ASCII):
            raise UserError(
                f"{option} {text!r}: {item!r} isn't GROUP:COUNT with a lower-case group name; expected {_NODES_SYNTAX}"
            )
        if name in counts:
            raise UserError(f"{option} {text!r}: group {name!r} is given twice; expected {_NODES_SYNTAX}")
        if int(number) < 1:
            raise UserError(f"{option} {text!r}: group {name!r} has count {number}; expected 1 or more")
        counts[name] = int(number)
    return counts


@dataclass(frozen=True, kw_only=True)
class BoxSpec:
    """What `up` builds. Two equal specs describe the same box; a running box refuses a different one.

    cpus and memory_mib are declared to Slurm and needn't exist: the box oversubscribes its host.
    """

    groups: tuple[Group, ...] = (
        Group(name="trainer", nodes=2),
        Group(name="rollout", nodes=2),
        Group(name="sandbox", nodes=2),
    )
    cpus: int = 8
    memory_mib: int = 262144
    netns: bool = False
    accounting: bool = False
    cluster: str = "miles"
    node_timeout_s: int = 5  # SlurmdTimeout: a silent node is DOWN after two to three times this
    declared: tuple[Declared, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise UserError(f"a box needs at least one group; expected {_NODES_SYNTAX}")
        if len({group.name for group in self.groups}) != len(self.groups):
            raise UserError(f"a group is given twice in {self.nodes_text}; expected distinct names")
        named = (
            [group.name for group in self.groups]
            + [ALL_PARTITION, URGENT_PARTITION]
            + [name for d in self.declared for name in d.partitions]
        )
        if len(set(named)) != len(named):
            raise UserError(f"partitions {', '.join(named)}: expected distinct names")
        total = sum(group.nodes for group in self.groups)
        if total > MAX_NODES:
            raise UserError(f"{self.nodes_text}: {total} nodes; expected {MAX_NODES} at most")
        if not 1 <= self.cpus <= 1024:
            raise UserError(f"--cpus {self.cpus}: expected 1 to 1024 declared CPUs per node")
        if not 2 <= self.node_timeout_s <= 3600:
            raise UserError(f"--node-timeout {self.node_timeout_s}: expected 2 to 3600 seconds")
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", self.cluster, re.ASCII):
            raise UserError(f"--name {self.cluster!r}: expected a lower-case letter, then letters, digits or _")

    @classmethod
    def parse(cls, nodes: str, gpus: str = "", **rest: Any) -> BoxSpec:
        """A spec from the command line's spelling of groups and GPUs; `rest` as in the constructor."""
        return cls(groups=parse_groups(nodes, gpus), **rest)

    @property
    def nodes_text(self) -> str:
        """The groups in the spelling of --nodes."""
        return ",".join(f"{group.name}:{group.nodes}" for group in self.groups)

    def describe(self) -> str:
        """One line in the spelling of the command line."""
        gpus = ",".join(f"{group.name}:{group.gpus}" for group in self.groups if group.gpus)
        words = [f"--nodes {self.nodes_text}", *([f"--gpus {gpus}"] if gpus else []), f"--cpus {self.cpus}"]
        words += ["--netns"] * self.netns + ["--accounting"] * self.accounting + [f"--name {self.cluster}"]
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BoxSpec:
        """Inverse of to_json. Raises TypeError or KeyError when `data` has another shape."""
        groups = tuple(Group(**group) for group in data["groups"])
        declared = tuple(Declared.from_json(nodes) for nodes in data.get("declared", ()))
        return cls(**{**data, "groups": groups, "declared": declared})


def max_root_length(spec: BoxSpec) -> int:
    """Longest path of the root, in bytes, with which every unix socket below it fits into 107 bytes."""
    name = max((f"{group.name}{group.nodes}" for group in spec.groups), key=len)
    return UNIX_SOCKET_LIMIT - len(f"/spool/{name}/{name}{STEP_SUFFIX}")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One slurmd. `index` counts from 1 over all groups."""

    name: str
    group: str
    index: int
    address: str
    port: int
    veth: str = ""  # the host's end of its cable, netns only


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A spec with its place on this host.

    base_port: slurmctld; +1 slurmdbd; +2 and up the slurmd of each node (netns: +2 for all, each in its own network).
    slot: names bridge, cables and subnet in netns mode; 0 otherwise.
    first_job_id: MPICH names its shared memory after job and step, and what a killed rank leaves there stays. Boxes of
    one host share that memory, so that each one counts from a place of its own.
    """

    spec: BoxSpec
    root: Path
    user: str
    host: str  # what gethostname() says, without domain
    base_port: int
    slot: int = 0
    first_job_id: int = 1

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def bridge(self) -> str:
        return f"mbox{self.slot}"

    @property
    def subnet(self) -> str:
        return f"10.77.{self.slot}"

    @property
    def controller_address(self) -> str:
        return f"{self.subnet}.1" if self.spec.netns else "127.0.0.1"

    @property
    def munge_socket(self) -> Path:
        return self.root / "munge" / "munge.sock"

    @property
    def history_file(self) -> Path:
        return self.root / "log" / "jobcomp.log"

    @property
    def ports(self) -> range:
        """All ports that the box listens on in the host's network, slurmctld's first."""
        return range(self.base_port, self.base_port + ports_needed(self.spec))

    @property
    def nodes(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for group in self.spec.groups:
            for k in range(1, group.nodes + 1):
                index = len(nodes) + 1
                netns = self.spec.netns
                nodes.append(
                    Node(
                        name=f"{group.name}{k}",
                        group=group.name,
                        index=index,
                        address=f"{self.subnet}.{index + 1}" if netns else "127.0.0.1",
                        port=self.base_port + 2 if netns else self.base_port + 1 + index,
                        veth=f"mbox{self.slot}v{index}" if netns else "",
                    )
                )
        return tuple(nodes)

    def node(self, name: str) -> Node:
        """Raises UserError for a name that isn't in the box."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise UserError(f"no node {name!r} in {self.root}; expected one of {', '.join(n.name for n in self.nodes)}")

    def slurm_conf(self) -> str:
        """slurm.conf; the comments say why a setting differs from Slurm's default."""
        root, spec = self.root, self.spec
        lines = [
            "# Written by tools.slurm_box; the next `up` overwrites it.",
            f"ClusterName={spec.cluster}",
            f"SlurmctldHost={self.host}({self.controller_address})",
            f"SlurmctldPort={self.base_port}",
            f"FirstJobId={self.first_job_id}",
            f"SlurmUser={self.user}",
            f"SlurmdUser={self.user}",
            "",
            "# Everything below one folder. Spool and TmpFS differ per node: several slurmd share this host.",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            "# A requeued job waits until credentials of its last start have expired (default 120 s).",
            f"AuthInfo=socket={self.munge_socket},cred_expire=5",
            f"StateSaveLocation={root}/state",
            f"SlurmdSpoolDir={root}/spool/%n",
            f"TmpFS={root}/tmp/%n",
            f"SlurmctldPidFile={root}/run/slurmctld.pid",
            f"SlurmdPidFile={root}/run/slurmd.%n.pid",
            f"SlurmctldLogFile={root}/log/slurmctld.log",
            f"SlurmdLogFile={root}/log/slurmd.%n.log",
            "SlurmctldDebug=info",
            "SlurmdDebug=info",
            "MailProg=/bin/true",
            "",
            "# No cgroups, no binding; declared CPUs may exceed the real ones.",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SlurmdParameters=config_overrides",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "GresTypes=gpu",
            "MpiDefault=pmi2",
            "",
            "# Only the backfill loop starts het jobs (default every 30 s).",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=1,sched_interval=5,sched_min_interval=0,batch_sched_delay=0",
            "PriorityType=priority/basic",
            f"# Jobs in {URGENT_PARTITION} take nodes from others, which get SIGTERM and are requeued GraceTime later.",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "JobRequeue=1",
            "",
            "# Losses are noticed in seconds; a node that registers again is used again.",
            "ReturnToService=2",
            f"SlurmdTimeout={spec.node_timeout_s}",
            "SlurmctldTimeout=30",
            "MessageTimeout=5",
            "InactiveLimit=0",
            # Between SIGTERM and SIGKILL a cancelled run saves and says how it ended (default 30). On two busy cores
            # 5 s can be too short for that.
            "KillWait=15",
            # A step that ends while slurmctld is away tells it 60 s later; it mustn't count as unkillable before.
            "UnkillableStepTimeout=90",
            "OverTimeLimit=0",
            "",
            "# Finished jobs stay visible for ten minutes, and in the history file for good.",
            "MinJobAge=600",
            "JobCompType=jobcomp/filetxt",
            f"JobCompLoc={self.history_file}",
            *self._accounting_lines(),
            "",
        ]
        gpus = {group.name: group.gpus for group in spec.groups}
        for node in self.nodes:
            gres = f" Gres=gpu:{gpus[node.group]}" if gpus[node.group] else ""
            lines.append(
                f"NodeName={node.name} NodeHostname={node.name if spec.netns else 'localhost'} "
                f"NodeAddr={node.address} Port={node.port} CPUs={spec.cpus} RealMemory={spec.memory_mib}"
                f"{gres} Feature={node.group} State=UNKNOWN"
            )
        grace = f" GraceTime={PREEMPT_GRACE_S}"
        for i, group in enumerate(spec.groups):
            default = " Default=YES" if i == 0 else ""
            lines.append(f"PartitionName={group.name} Nodes={_range(group)} MaxTime=INFINITE State=UP{default}{grace}")
        # For jobs without components, and for somebody who takes the nodes from any other partition.
        lines.append(f"PartitionName={ALL_PARTITION} Nodes=ALL MaxTime=INFINITE State=UP{grace}")
        lines.append(f"PartitionName={URGENT_PARTITION} Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10")
        for nodes in spec.declared:
            lines += nodes.conf_lines(memory_mib=spec.memory_mib)
        return "\n".join(lines) + "\n"

    def _accounting_lines(self) -> list[str]:
        if not self.spec.accounting:
            return ["AccountingStorageType=accounting_storage/none"]
        return [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={self.controller_address}",
            f"AccountingStoragePort={self.base_port + 1}",
            "# Clients look for munge's socket here, and in /run/munge when it is missing.",
            f"AccountingStoragePass={self.munge_socket}",
            "AccountingStorageTRES=gres/gpu",
        ]

    def gres_conf(self) -> str:
        """gres.conf. A count without a file drains the node, so each fake GPU is a link to /dev/null."""
        return "".join(
            f"NodeName={_range(group)} Name=gpu File={self.root}/dev/gpu{_indices(group.gpus)}\n"
            for group in self.spec.groups
            if group.gpus
        )

    def cgroup_conf(self) -> str:
        """cgroup.conf; nothing uses it, but without it slurmd looks for the host's cgroup version and may give up."""
        return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"

    def hosts(self) -> str:
        """/etc/hosts as the nodes see it in netns mode."""
        lines = ["127.0.0.1 localhost", f"{self.controller_address} {self.host}"]
        return "\n".join(lines + [f"{node.address} {node.name}" for node in self.nodes]) + "\n"

    def slurmdbd_conf(self) -> str:
        root = self.root
        return (
            "AuthType=auth/munge\n"
            f"AuthInfo=socket={self.munge_socket}\n"
            f"DbdHost={self.host}\n"
            f"DbdAddr={self.controller_address}\n"
            f"DbdPort={self.base_port + 1}\n"
            f"SlurmUser={self.user}\n"
            "StorageType=accounting_storage/mysql\n"
            "StorageHost=localhost\n"
            f"StorageUser={self.user}\n"
            "StorageLoc=slurm_acct_db\n"
            f"PidFile={root}/run/slurmdbd.pid\n"
            f"LogFile={root}/log/slurmdbd.log\n"
        )

    @property
    def fake_gpus(self) -> int:
        """Links needed below dev/; nodes share them."""
        return max(group.gpus for group in self.spec.groups)


def ports_needed(spec: BoxSpec) -> int:
    """slurmctld, slurmdbd, and one per slurmd."""
    return 2 + sum(group.nodes for group in spec.groups)


def _range(group: Group) -> str:
    return f"{group.name}1" if group.nodes == 1 else f"{group.name}[1-{group.nodes}]"


def _indices(count: int) -> str:
    return "0" if count == 1 else f"[0-{count - 1}]"
