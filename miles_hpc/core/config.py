"""The run file as frozen structs, documented per field; those of the site file are in `core.site` and re-exported.

`core.load` parses TOML into these, refuses unknown keys with their path and the nearest name, and applies
`--set a.b=c`. Where Miles has the concept, the option has Miles' name (`rollout_batch_size`, `eps_clip`, ...).
"""

from __future__ import annotations

from typing import Any, Literal

from miles_hpc.core.section import PythonConfig, Section
from miles_hpc.core.site import (
    Layout,
    SiteConfig,
    SiteContainer,
    SiteEnvSet,
    SiteFabric,
    SiteFileSystem,
    SiteImex,
    SiteLifecycle,
    SiteNode,
    SitePartition,
    SitePorts,
    SiteQos,
    SiteSbatch,
    SiteSizeLimit,
    SiteSource,
    SiteStripe,
    SiteTopology,
)

__all__ = [
    "CheckpointConfig",
    "ControlConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "GroupConfig",
    "GroupsConfig",
    "JobConfig",
    "ModelConfig",
    "PythonConfig",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "SessionsConfig",
    "SftConfig",
    "SglangConfig",
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
    "TrainConfig",
]


class ModelConfig(Section, frozen=True, kw_only=True):
    """The policy. Either `path` names a Hugging Face folder, or `config` describes one to initialise by `init_seed`."""

    path: str = ""
    config: dict[str, Any] = {}  # Hugging Face config with `model_type`, for a model without weights
    init_seed: int | None = None  # default: the run's seed
    tokenizer: str = ""  # "" = the model's folder; "characters" = one token per character, made by this project
    dtype: Literal["float32", "bfloat16"] = "float32"
    experts_implementation: str = "grouped_mm"  # transformers' MoE kernel; ignored for dense models


class SftConfig(Section, frozen=True, kw_only=True):
    """Warm start on demonstrations that a scripted policy plays in the run's own environment. steps = 0 skips it."""

    steps: int = 0
    n_demonstrations: int = 500
    batch_size: int = 64  # trajectories per step
    lr: float = 2e-3
    lr_warmup_steps: int = 30
    lr_decay_from: float = 0.6  # linear decay starts at this share of the steps
    lr_min_ratio: float = 0.1
    aux_loss_coef: float = 0.01  # load-balancing loss of MoE models


class RolloutConfig(Section, frozen=True, kw_only=True):
    """Sampling and the flow of groups."""

    n_steps: int = 100  # RL optimizer steps in the whole run, over all allocations
    rollout_batch_size: int = 16  # prompts (groups) per step
    n_samples_per_prompt: int = 8
    engine: str = "torch"  # torch | sglang | scripted | a registered name or dotted path
    engines_per_host: int = 1
    slots_per_engine: int = 64  # generation slots: trajectories that one engine serves at once
    engine_step_interval_s: float = 0.0  # shortest time between two decoding steps: more requests share a forward
    engine_batch_invariant: bool = False  # results don't depend, bit for bit, on what else is in the batch; slower
    temperature: float = 1.0
    top_p: float = 1.0
    custom_agent_function_path: str = ""  # module:function that plays the tasks as an OpenAI client; "": turn by turn
    agent_options: dict[str, Any] = {}  # more arguments of that function, by name
    max_turns: int = 4
    max_tokens_per_turn: int = 16
    max_trajectory_tokens: int = 256
    trajectory_deadline_s: float = 60.0  # a trajectory that takes longer is ended with status truncated
    max_admitted_batches: float = 2.0  # admission credits, in batches: groups between admission and training
    max_weight_staleness: int = 2  # steps; a group older than this at use is dropped with a reason
    max_group_attempts: int = 3  # a prompt whose group failed so often is set aside and reported
    reuse_after_restart: bool = True  # keep owned groups of a dead lineage while their staleness allows
    routing_replay: bool = True  # record routed experts and replay them in training (MoE models)
    sandbox_timeout_s: float = 5.0  # one command
    sandbox_max_output_bytes: int = 256


class SandboxConfig(Section, frozen=True, kw_only=True):
    """Bounds of one sandbox; cpu_s, memory_mb and file_mb hold for each of its processes (setrlimit)."""

    isolation: Literal["auto", "unshare", "bubblewrap", "none"] = "auto"  # none: for commands that are trusted
    cpu_s: int = 10
    memory_mb: int = 512  # address space
    file_mb: int = 8  # one file
    folder_mb: int = 16  # the working folder and /tmp, each
    processes: int = 48  # of the sandbox together


class SglangConfig(Section, frozen=True, kw_only=True):
    """SGLang as the engine (rollout.engine = "sglang"); its interpreter is python.sglang."""

    num_gpus_per_engine: int = 1  # devices of one engine, by tensor parallelism
    pause_generation_mode: Literal["in_place", "abort"] = "in_place"  # what a weight update does to requests under way
    enable_memory_saver: bool = False  # device memory can be given back between steps; needs torch_memory_saver
    check_weights: bool = True  # compare all live parameters with what was sent, in each update
    args: dict[str, Any] = {}  # more of its server's arguments, by their names without dashes


class SessionsConfig(Section, frozen=True, kw_only=True):
    """The session server of a rollout node: what agent programs from outside talk to. Bounds are per server.

    A session's prompt and answer together have at most rollout.max_trajectory_tokens.
    """

    history: Literal["linear", "tree"] = "linear"  # of sessions that don't say; so are the next four
    max_rollback: int = 1  # linear: assistant turns that one request may take back
    matcher: str = "strict"  # strict | loose_tool_call | role_content_only | a registered name or dotted path
    tool_parser: str = "none"  # how the model writes tool calls: hermes, qwen3_coder, ..., or a dotted path
    chat_family: str = "default"  # what the model's chat template needs beyond its files
    max_sessions: int = 4096
    max_in_flight: int = 16  # requests of one session
    max_messages: int = 4096  # of one request
    max_body_bytes: int = 64 << 20  # of one request
    max_session_tokens: int = 4 << 20  # recorded over all branches of a session
    max_turns: int = 1024  # recorded over all branches of a session with history tree
    ttl_s: float = 14_400.0  # a session without requests is closed after so long
    request_deadline_s: float = 600.0
    journal_segment_bytes: int = 64 << 20
    journal_fsync: bool = False  # what was answered survives the node's end, not only the server's; slower


class TrainConfig(Section, frozen=True, kw_only=True):
    """The RL optimizer step."""

    backend: str = "fsdp"  # fsdp | a registered name or dotted path
    advantage_estimator: Literal["grpo", "reinforce"] = "grpo"
    grpo_std_normalization: bool = True
    lr: float = 3e-4
    lr_warmup_steps: int = 5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    use_kl_loss: bool = False  # KL to the reference (the weights at the start of RL)
    kl_loss_coef: float = 0.0
    entropy_coef: float = 0.0
    use_tis: bool = False  # truncated importance sampling against the engine's log-probs
    tis_clip: float = 2.0
    minibatches_per_step: int = 1  # reserved: only 1, one optimizer step per batch
    max_tokens_per_microbatch: int = 8192  # rows * row_tokens of one forward
    row_tokens: int = 256  # length of a packed row; at least rollout.max_trajectory_tokens
    probe_sequences: int = 8  # fixed batch scored by engine and trainer after each sync; 0 switches it off
    threads: int = 1  # CPU threads of a trainer rank


class EvalConfig(Section, frozen=True, kw_only=True):
    """Held-out evaluation: before and after RL while training stands still, every `interval` steps beside it."""

    n_episodes: int = 0  # prompts of one evaluation; 0 = no evaluations
    n_samples_per_eval_prompt: int = 1  # trajectories of each prompt, for pass@k
    interval: int = 0  # RL steps from one evaluation beside training to the next; 0 = only before and after RL
    skip_eval_before_train: bool = False
    seed: int = 10_000
    temperature: float = 1.0
    top_p: float = 1.0
    max_turns: int = 0  # 0 = rollout.max_turns
    max_tokens_per_turn: int = 0  # 0 = rollout.max_tokens_per_turn
    success_reward: float = 1.0  # a trajectory with this reward or more has solved its prompt (pass@k)
    engines_per_host: int = 0  # of rollout.engines_per_host, so many serve evaluations only; 0 = they share engines
    slot_share: float = 0.25  # on shared engines: what evaluations are given while training groups wait as well
    max_in_flight: int = 1  # evaluations beside training at once
    overflow_policy: Literal["backpressure", "skip"] = "backpressure"  # with so many under way: training waits, or none
    deadline_s: float = 3600.0  # an evaluation beside training that takes longer is given up


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """When state is saved and how much of it is kept."""

    interval_steps: int = 20
    keep: int = 3


class EnvironmentConfig(Section, frozen=True, kw_only=True):
    """The task: a registered name or dotted path, and its own options."""

    name: str = "shell"
    options: dict[str, Any] = {}


class GroupConfig(Section, frozen=True, kw_only=True):
    """One het group: what to ask Slurm for. 0 GPUs means CPU only."""

    nodes: int
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    ranks_per_node: int = 1  # trainer: MPI ranks of a node (one per GPU); other roles have one agent
    partition: str = ""  # default: the site's partition for this role
    constraint: str = ""
    mem: str = ""
    spare_nodes: int = 0  # asked for in addition: each takes the place of a node that fails, in the same allocation


class GroupsConfig(Section, frozen=True, kw_only=True):
    """The het groups, in the order of the job's components."""

    trainer: GroupConfig
    rollout: GroupConfig
    sandbox: GroupConfig


class JobConfig(Section, frozen=True, kw_only=True):
    """What the batch job asks for and how an allocation ends."""

    time: str = "01:00:00"  # Slurm time of one allocation
    account: str = ""
    qos: str = ""
    env_set: str = ""  # one of the site's env_sets; "" = the site's own choice
    layout: Layout | Literal[""] = ""  # "" = the site's
    signal_s: int = 120  # seconds before the limit at which Slurm signals the batch script
    max_allocations: int = 100  # a run that needs more is a mistake
    max_idle_allocations: int = 2  # so many in a row without progress end the chain
    extra_directives: list[str] = []  # stated for every component, without '#SBATCH '


class ControlConfig(Section, frozen=True, kw_only=True):
    """The control layer. All times in seconds."""

    transport: Literal["tcp", "tcp-only", "ucx"] = "tcp"
    interface: str = ""  # interfaces to bind: names and patterns, as "ib0", "ib0,ib1", "hsn*"; "" = the site's
    heartbeat_interval_s: float = 1.0
    lost_after_s: float = 4.5  # no heartbeat for so long: lost; leaves half a second of the 5 s that are promised
    lease_s: float = 10.0  # an agent whose controller is silent for so long kills its children
    connect_deadline_s: float = 60.0
    start_deadline_s: float = 300.0  # all roles ready
    call_deadline_s: float = 60.0
    sync_deadline_s: float = 300.0  # an engine's update: fetching, loading, comparing; an engine beyond it is given up
    step_deadline_s: float = 600.0
    max_role_restarts: int = 20


class RunConfig(Section, frozen=True, kw_only=True):
    """A run file."""

    name: str
    model: ModelConfig
    groups: GroupsConfig
    site: str = ""  # name of a site file; --site and MILES_HPC_SITE override
    run_dir: str = ""  # default: runs/<name>
    seed: int = 0
    python_path: list[str] = []  # folders put on every role's import path
    job: JobConfig = JobConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sft: SftConfig = SftConfig()
    rollout: RolloutConfig = RolloutConfig()
    sessions: SessionsConfig = SessionsConfig()
    sglang: SglangConfig = SglangConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    control: ControlConfig = ControlConfig()
    python: PythonConfig = PythonConfig()
