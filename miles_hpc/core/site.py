"""The site file as frozen structs, documented per field: one cluster, facts only.

    what a job looks like  sbatch, directives, layouts, partitions, qos, requeue           read by plan and validate
    what a role gets       env*, env_sets, modules, python, proxy, interface, mpi          read by plan and launch
    node and net           node, fabric, topology, imex, userns, container, file_systems   shown; unknown ones listed

A fact that nobody has looked up is absent: None, "", an empty list or table, 0 for a size. `cluster.site_facts` lists
what is absent. Where a fact is from is said in `sources`, whose `covers` names the keys.
"""

from __future__ import annotations

from typing import Literal

from miles_hpc.core.section import PythonConfig, Section

__all__ = [
    "Layout",
    "SiteConfig",
    "SiteContainer",
    "SiteEnvSet",
    "SiteFabric",
    "SiteFileSystem",
    "SiteImex",
    "SiteLifecycle",
    "SiteNode",
    "SitePartition",
    "SitePorts",
    "SiteQos",
    "SiteSbatch",
    "SiteSizeLimit",
    "SiteSource",
    "SiteStripe",
    "SiteTopology",
]

#: What one batch job looks like: nodes of all roles in one component or a component each, and one srun over all of
#: them (_span) or one a role.
Layout = Literal["hetjob", "hetjob_span", "split", "split_span"]
YesNo = Literal["yes", "no", "unknown"]


class SiteSource(Section, frozen=True, kw_only=True):
    """Where facts are from. How far to trust them: from documentation down to one user's note."""

    source: str  # public address, or the document's name
    evidence: Literal["documentation", "source code", "third-party configuration", "issue", "user note", "own"]
    date: str  # YYYY-MM-DD or YYYY-MM: the day or month on which it was read, or of which it is
    covers: list[str] = []  # keys and tables of the site file that it speaks for


class SiteSizeLimit(Section, frozen=True, kw_only=True):
    """How long a job of some size may run. Each component of a het job is a job of its own here."""

    max_nodes: int  # of one job, this many included
    max_time: str


class SitePartition(Section, frozen=True, kw_only=True):
    """One partition: which roles it suits, what a node of it has, what a job in it may ask for."""

    name: str
    roles: list[Literal["trainer", "rollout", "sandbox"]]  # the first partition listed for a role is its default
    nodes: int = 0  # 0 = unknown
    max_nodes: int = 0  # of one run: the nodes of all its components here count; 0 = unknown
    max_time: str = ""  # of one job, unless its QOS has a limit of its own
    limits: list[SiteSizeLimit] = []  # tighter ones by the job's size, the smallest size first
    node_minutes: int = 0  # of one run: nodes here times minutes; 0 = unknown
    max_running: int = 0  # jobs of one user; a het job counts once per component; 0 = unknown
    max_submitted: int = 0  # the same, queued ones included
    preemptable: bool | None = None
    constraint: str = ""
    gres: str = ""  # GPU type in gres requests: gpu:<type>:<n>; "" = gpu:<n>
    gpus_per_node: int = 0
    cpus_per_node: int = 0


class SiteQos(Section, frozen=True, kw_only=True):
    """One quality of service with its limits; fields as in a partition."""

    name: str
    max_nodes: int = 0
    max_time: str = ""
    max_running: int = 0
    max_submitted: int = 0
    preemptable: bool | None = None


class SiteSbatch(Section, frozen=True, kw_only=True):
    """Which options sbatch takes here. Options are long ones without a value: "--mem"."""

    forbidden: list[str] = []
    required: list[str] = []  # each must be stated for every component
    partition_stated: bool = True  # false: Slurm finds the partition from QOS and constraint, --partition is left out
    gpu_bind: str = ""  # --gpu-bind beside every GPU request; "" = not stated
    mem: Literal["allowed", "forbidden", "zero", "unknown"] = (
        "unknown"  # zero: --mem=0, the whole node, or nothing else
    )
    cpus_per_gpu_min: int = 0  # fewer CPUs for a GPU are refused
    exclude_allowed: bool | None = None  # --exclude
    nodelist_allowed: bool | None = None  # --nodelist
    export_allowed: bool | None = None  # --export


class SiteLifecycle(Section, frozen=True, kw_only=True):
    """How jobs end and come back here, as far as the site decides it. See also `requeue`."""

    requeue_default: bool | None = None  # what Slurm does with a job that says nothing
    max_requeues: int = 0  # of one job, by its owner or by Slurm; 0 = unknown
    max_batch_requeue: int = 0  # Slurm's MaxBatchRequeue: after so many requeues by itself it holds the job
    chaining_forbidden: list[str] = []  # QOS and partitions in which a job must not submit its follower
    preempt_grace_s: int = 0
    preempt_signals: list[str] = []  # what a preempted job gets before the grace time, in order, as "CONT", "TERM"
    preempt_user_signal: bool | None = None  # whether --signal's one comes at preemption too (send_user_signal)
    kill_on_bad_exit_default: bool | None = None  # srun's default here; steps of this project state it


class SiteNode(Section, frozen=True, kw_only=True):
    """What a node has."""

    gpus: int = 0  # the most that a group may ask for without Slurm; with it, partitions say so
    gpu: str = ""  # for readers: the model
    gpu_vendor: Literal["nvidia", "amd", ""] = ""
    nics: list[str] = []  # for readers
    gpu_nics: list[str] = []  # the NIC nearest to GPU 0, 1, ...
    cpus: int = 0  # cores
    memory_bytes: int = 0
    local_scratch: str = ""  # for readers: a variable or path
    login_arch: str = ""  # x86_64 | aarch64
    compute_arch: str = ""


class SiteFabric(Section, frozen=True, kw_only=True):
    """The network between nodes. Its environment is in env_single_node and env_multi_node."""

    kind: Literal["cxi", "ib", "roce", "ethernet", ""] = ""
    slurm_network: str = ""  # --network of every component
    vni_strategy: Literal["single_step", "job_vni_last", ""] = (
        ""  # Slingshot; job_vni_last: libfabric gets the last VNI
    )
    bootstrap_interface: str = ""  # what collectives' sockets bind, as NCCL_SOCKET_IFNAME takes it


class SiteEnvSet(Section, frozen=True, kw_only=True):
    """Variables that belong to one version of the network's software; they come over env, env_single_node, ..."""

    name: str  # as job.env_set names it
    since: str = ""  # for readers: from which software or date on, or until when
    env: dict[str, str] = {}
    env_single_node: dict[str, str] = {}
    env_multi_node: dict[str, str] = {}


class SiteImex(Section, frozen=True, kw_only=True):
    """Channels for memory that is shared over NVLink between nodes, as Slurm's switch/nvidia_imex gives them out."""

    channel: Literal["job", "segment", "none", "unknown"] = (
        "unknown"  # what has one: a job (each component of a het job is one), a segment of it, or the plug-in is off
    )
    per_segment_allowed: bool | None = None  # --network=unique-channel-per-segment
    max_channels: int = 0  # for readers: in use at once on the cluster


class SiteTopology(Section, frozen=True, kw_only=True):
    """How far the fast links reach."""

    domain_gpus: int = 0  # GPUs of one NVLink domain
    domain_nodes: int = 0
    spare_nodes_per_rack: int = 0  # nodes of a domain that no segment should count on
    may_span: list[
        Literal["tensor", "expert", "engine"]
    ] = []  # for readers: groups of ranks that may reach beyond a domain
    segment_directive: bool | None = None  # whether --segment may be stated
    segment_nodes: int = 0  # --segment of every component that has more nodes; needs segment_directive = true


class SiteContainer(Section, frozen=True, kw_only=True):
    """What runs containers on compute nodes."""

    runtimes: list[str] = []  # apptainer | singularity | enroot | podman-hpc | shifter | cscs-ce


class SiteStripe(Section, frozen=True, kw_only=True):
    """How files from a size on are striped over a parallel file system's targets."""

    from_bytes: int
    count: int
    stripe_bytes: int = 0


class SiteFileSystem(Section, frozen=True, kw_only=True):
    """One file system and its rules."""

    path: str  # "$SCRATCH", a path, or its name at the site where no path is known
    kind: str = ""  # lustre | gpfs | vast | nfs | ...
    purge_days: int = 0
    purge_basis: Literal["unread", "age", ""] = ""  # unread: days since the last read; age: days since written
    touch_forbidden: bool | None = None  # whether renewing dates against the purge is forbidden
    quota_bytes: int = 0
    quota_inodes: int = 0
    flock: YesNo = "unknown"
    stripes: list[SiteStripe] = []


class SitePorts(Section, frozen=True, kw_only=True):
    """TCP ports that services may listen on; 0 = unknown."""

    first: int = 0
    last: int = 0


class SiteConfig(Section, frozen=True, kw_only=True):
    """One cluster: facts with their sources."""

    name: str
    inherits: str = ""  # a base by name: its fields hold where this file says nothing; "" once it is merged
    title: str = ""
    aliases: list[str] = []  # further names for --site
    host_patterns: list[str] = []  # regular expressions for whole host names of nodes, without their domain
    host_variables: dict[str, str] = {}  # variables that every shell of the site has, with the values that tell it
    sources: list[SiteSource | str] = []  # a plain string covers nothing in particular
    verified: str = ""  # date
    notes: list[str] = []  # for readers: what doesn't apply here, traps
    scheduler: Literal["slurm", "none"] = "slurm"
    slurm_version_seen: str = ""  # the newest that a source names
    slurm_version_min: str = ""  # older ones lack something that runs here need
    partitions: list[SitePartition] = []
    qos: list[SiteQos] = []
    node: SiteNode = SiteNode()
    gpu_request: Literal["gres", "gpus-per-node", "gpus-per-task", "none"] = "gres"
    sbatch: SiteSbatch = SiteSbatch()
    layout: Layout = "hetjob"  # unless a run says otherwise
    layouts: list[Layout] = []  # those that may be used here; [] = unknown, nothing is refused
    layouts_why: str = ""
    requires_account: bool = False
    requeue: bool = True  # whether a job may be requeued by its owner; otherwise a follow-up job is chained
    lifecycle: SiteLifecycle = SiteLifecycle()
    mpi: str = "pmi2"  # srun --mpi
    mpi_flavours: list[str] = []  # cray-mpich | openmpi | mpich | parastation | ...
    directives: list[str] = []  # stated for every component, without '#SBATCH '
    interface: str = ""  # as control.interface, for all runs here; "" = those that routes lead through
    modules: list[str] = []
    env: dict[str, str] = {}  # for every role
    env_single_node: dict[str, str] = {}  # in addition for a role on one node
    env_multi_node: dict[str, str] = {}  # in addition for a role that spans nodes
    env_sets: list[SiteEnvSet] = []
    env_set: str = ""  # the one of env_sets that holds unless job.env_set names another
    fabric: SiteFabric = SiteFabric()
    imex: SiteImex = SiteImex()
    topology: SiteTopology = SiteTopology()
    userns: YesNo = "unknown"  # whether users may make user namespaces on compute nodes
    container: SiteContainer = SiteContainer()
    compute_internet: Literal["yes", "no", "proxy", "unknown"] = "unknown"
    proxy: str = ""
    file_systems: list[SiteFileSystem] = []
    service_ports: SitePorts = SitePorts()
    python: PythonConfig = PythonConfig()
