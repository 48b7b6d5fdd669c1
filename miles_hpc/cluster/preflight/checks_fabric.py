"""Checks of the libraries over the fabric: NCCL's network plug-in, what a log of NCCL proves, UCX."""

from __future__ import annotations

from collections.abc import Iterator

from miles_hpc.cluster.preflight.contract import Check, Context, Finding, Machine, fail, fine, skip, warn
from miles_hpc.cluster.preflight.nccl_log import NCCL_LINES, NcclLog, parse_nccl_log
from miles_hpc.cluster.preflight.parse_net import ucx_transports
from miles_hpc.cluster.preflight.wording import listed
from miles_hpc.cluster.site import role_python

__all__ = ["CHECKS"]

#: aws-ofi-nccl's names for NCCL_NET, compared without regard to case. Up to 1.11 there is one name only (its PR 530).
_OLD_NAMES = ("aws libfabric",)
_NEW_NAMES = ("libfabric", "ofi", "aws libfabric")
_LAST_OLD = (1, 11)
_LIBRARY = r"lib[nr]ccl-net(-ofi|-aws-ofi)?\.so(\.\d+)*"
_VERSION = r"aws-ofi-nccl[ /-]v?(\d+\.\d+[.\w-]*)"
#: As a report of aws-ofi-nccl on CXI advises.
_MAX_CHANNELS = 20
_RDMA = ("rc", "ud", "dc", "ib", "rc_x", "rc_v", "ud_x", "ud_v", "dc_x", "rc_mlx5", "ud_mlx5", "dc_mlx5", "rc_verbs")


# ------------------------------------------------------------------------------------------------ NCCL_NET


def _nccl_net(machine: Machine, context: Context) -> Iterator[Finding]:
    site = context.site
    if site is None:
        return
    environ = context.role_environment
    name = environ.get("NCCL_NET", "")
    if name[:1] in ("'", '"'):
        yield fail(
            f"NCCL_NET={name} has quotes in its value: no network bears that name", "set it without quotes inside"
        )
        return
    asks_ofi = name.lower() in _NEW_NAMES
    if site.fabric.kind != "cxi":
        yield from _without_slingshot(name, asks_ofi, context)
        return
    if context.nodes == 1:
        if asks_ofi:
            yield fail(
                f"NCCL_NET={name} in a run on one node: a step on one node gets no CXI service",
                "leave NCCL_NET out, or set it to Socket, in env_single_node of the site file",
            )
        else:
            yield fine(f"NCCL_NET={name or '(unset)'} on one node")
        return
    if name.lower() == "socket":
        yield warn("NCCL_NET=Socket over several nodes: TCP instead of Slingshot", "set NCCL_NET in env_multi_node")
        return
    if name and not asks_ofi:
        yield fail(
            f"NCCL_NET={name}: no plug-in for Slingshot has that name", 'set it to "AWS Libfabric", which all take'
        )
        return
    if not context.compute:
        yield fine(f"NCCL_NET={name or '(unset)'}; the plug-in itself is looked for on compute nodes")
        return
    yield from _plugin(machine, name, environ)


def _without_slingshot(name: str, asks_ofi: bool, context: Context) -> Iterator[Finding]:
    kind = context.site.fabric.kind if context.site is not None else ""
    if asks_ofi and kind:
        yield fail(f"NCCL_NET={name}, but the site's fabric is {kind}", "leave NCCL_NET out, or set it to IB or Socket")
    elif name.lower() == "socket" and kind in ("ib", "roce") and context.nodes > 1:
        yield warn(f"NCCL_NET=Socket over a {kind} fabric: TCP instead of RDMA", "leave NCCL_NET out")
    else:
        yield fine(f"NCCL_NET={name or '(unset)'}, fabric {kind or 'unknown'}")


def _plugin(machine: Machine, name: str, environ: dict[str, str]) -> Iterator[Finding]:
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    stated = environ.get("NCCL_NET_PLUGIN", "")
    found = machine.probe("libraries", _LIBRARY, *folders)
    if found.problem:
        yield fail(f"a folder of LD_LIBRARY_PATH doesn't answer: {found.problem}", "look at that file system")
        return
    paths = [stated] if "/" in stated else list(found.value)
    if not paths:
        yield fail(
            f"NCCL_NET={name or '(unset)'}, but neither libnccl-net*.so nor librccl-net*.so lies in LD_LIBRARY_PATH: "
            "the NCCL inside PyTorch has no way to Slingshot of its own",
            "load the site's module with aws-ofi-nccl (or its container hook), built for the CUDA of your PyTorch",
        )
        return
    told = machine.probe("search_bytes", paths[0], _VERSION)
    if told.problem:
        yield fail(f"{paths[0]}: {told.problem}", "correct NCCL_NET_PLUGIN or LD_LIBRARY_PATH")
        return
    version = str(told.value)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    old = len(numbers) == 2 and numbers <= _LAST_OLD
    if name and old and name.lower() not in _OLD_NAMES:
        saw = f'NCCL_NET={name}, but aws-ofi-nccl {version} in {paths[0]} is called "AWS Libfabric"'
        yield fail(saw, 'set NCCL_NET="AWS Libfabric", which newer ones take too')
    elif not version and name.lower() not in ("", *_OLD_NAMES):
        yield warn(
            f"{paths[0]} doesn't tell its version: NCCL_NET={name} fits those after 1.11 only", "use AWS Libfabric"
        )
    else:
        yield fine(f"NCCL_NET={name or '(unset)'}, aws-ofi-nccl {version or 'of unknown version'} in {paths[0]}")


# ------------------------------------------------------------------------------------------------ Slingshot's settings


def _cxi_settings(machine: Machine, context: Context) -> Iterator[Finding]:
    site, environ = context.site, context.role_environment
    if site is None or site.fabric.kind != "cxi":
        yield skip("no Slingshot fabric")
        return
    good = True
    if environ.get("FI_MR_CACHE_MONITOR", "").lower() == "memhooks":
        good = False
        yield fail("FI_MR_CACHE_MONITOR=memhooks deadlocks on CXI", "set it to userfaultfd or kdreg2")
    protocols = environ.get("NCCL_PROTO", "")
    if site.node.gpu_vendor != "amd" and context.nodes > 1 and _takes_ll128(protocols):
        good = False
        yield warn(
            f"NCCL_PROTO={protocols or '(unset)'} lets NCCL use LL128, which changed data in silence on CXI",
            'set NCCL_PROTO = "^LL128" in env_multi_node of the site file; to do without, compare checksums first',
        )
    channels = environ.get("NCCL_MAX_NCHANNELS", "")
    if channels.isdecimal() and int(channels) > _MAX_CHANNELS:
        good = False
        yield warn(
            f"NCCL_MAX_NCHANNELS={channels}: beyond about 2000 connections transfers stall on CXI",
            f"set it to {_MAX_CHANNELS} or less in large runs",
        )
    if good:
        yield fine("nothing is set that is known to hang or to change data on CXI")


def _takes_ll128(protocols: str) -> bool:
    """Whether NCCL may choose LL128: NCCL_PROTO lists what to use, "^" in front makes it one of what not to."""
    names = [name.strip().lower() for name in protocols.lstrip("^").split(",") if name.strip()]
    return not names or ("ll128" in names) != protocols.startswith("^")


# ------------------------------------------------------------------------------------------------ a log of NCCL


def _nccl_log(machine: Machine, context: Context) -> Iterator[Finding]:
    """The newest attempt's logs, if it ran with NCCL_DEBUG=INFO."""
    logs = machine.probe("newest_logs", str(context.run_dir))
    if logs.problem:
        yield fail(f"the run directory doesn't answer: {logs.problem}", "look at that file system")
        return
    if not logs.value:
        yield skip("no attempt has logs yet")
        return
    read = machine.probe("lines", NCCL_LINES, *logs.value)
    log = parse_nccl_log(read.value or [])
    if not log.seen and log.bus_gb_s is None:
        yield skip("no line of NCCL in the newest attempt's logs: set NCCL_DEBUG=INFO for one start")
        return
    steps = machine.probe("trained_steps", str(context.run_dir))
    yield nccl_verdict(log, int(steps.value or 0), context)


def nccl_verdict(log: NcclLog, steps: int, context: Context) -> Finding:
    """Whether the fabric's own network was used, and moved data; `steps` were trained in the attempt of the log."""
    kind = context.site.fabric.kind if context.site is not None else ""
    load = "load the site's NCCL plug-in, and set NCCL_NET so that NCCL refuses to start without it"
    if log.vni_not_found:
        return fail("NCCL's log has VNI_NOT_FOUND: the steps have no common virtual network", "see the check 'vni'")
    if log.missing_network:
        return fail(f"NCCL found no network named {log.missing_network}", load)
    if log.no_network:
        return fail("NCCL has none of the networks that NCCL_NET allows", load)
    used = log.provider or log.network
    if kind == "cxi" and log.provider != "cxi":
        why = " (no plug-in was found)" if log.no_plugin else ""
        return fail(f"NCCL went over {used or 'an unknown network'}, not over provider cxi{why}", load)
    if kind in ("ib", "roce") and log.network.lower() == "socket":
        return fail(f"NCCL went over Socket, the fabric is {kind}", "look for 'NET/IB : No device found' in the log")
    if log.bus_gb_s is not None:
        return fine(f"NCCL over {used or 'its network'}: nccl-tests moved data, up to {log.bus_gb_s:.3g} GB/s")
    if steps:
        return fine(f"NCCL over {used or 'its network'}: {steps} training steps ended in that attempt")
    rings = "rings are connected, which proves nothing" if log.rings else "no ring was connected"
    return warn(
        f"NCCL chose {used or 'a network'}, but no transfer ended: {rings}",
        "run a step, or nccl-tests over two nodes, before long jobs",
    )


# ------------------------------------------------------------------------------------------------ UCX


def _ucx(machine: Machine, context: Context) -> Iterator[Finding]:
    site, run = context.site, context.run
    environ = context.role_environment
    kind = site.fabric.kind if site is not None else ""
    python = role_python(run, site, "trainer") if run is not None and site is not None else ""
    asked = machine.probe("packages", "libucx-cu12", "libucx-cu13", "libucx", "ucx-py-cu12", python=python)
    if asked.problem:
        yield fail(f"the trainer's Python doesn't answer: {asked.problem}", "correct python.trainer")
        return
    wheel = next(iter(asked.value), "")
    prefers_system = environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() in ("1", "true")
    if wheel and not prefers_system:
        names = machine.probe("package_files", wheel, r"libuct_ib.*\.so", python=python).value or []
        rdma, source = bool(names), f"{wheel} {asked.value[wheel]} from PyPI"
    else:
        shown = machine.run("ucx_info", "-d")
        if shown.missing or shown.problem:
            yield (
                fine("UCX isn't installed")
                if not _uses_ucx(context)
                else fail(
                    'control.transport = "ucx", but there is no UCX', "install ucxx, or set control.transport to tcp"
                )
            )
            return
        rdma = any(transport.startswith(("rc", "ud", "dc")) for transport in ucx_transports(shown.stdout))
        source = "the system's UCX"
    yield _ucx_finding(rdma, source, kind, environ, _uses_ucx(context))


def _ucx_finding(rdma: bool, source: str, kind: str, environ: dict[str, str], used: bool) -> Finding:
    system = "load the site's UCX and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
    if rdma:
        return fine(f"{source} has RDMA transports")
    wanted = [name for name in environ.get("UCX_TLS", "").split(",") if name.strip() in _RDMA]
    device = environ.get("UCX_NET_DEVICES", "")
    if wanted or device.startswith(("mlx", "bnxt", "irdma")):
        stated = f"UCX_TLS has {listed(wanted)}" if wanted else f"UCX_NET_DEVICES={device}"
        return fail(
            f"{source} has no RDMA transports, but {stated}: it won't start", f"{system}, or unset the variable"
        )
    if kind in ("ib", "roce"):
        saw = f"{source} has no RDMA transports: UCX goes over TCP on this {kind} fabric"
        return warn(saw, system) if used else fine(f"{saw}; the run doesn't use UCX")
    beside = "; UCX has no way to Slingshot but TCP" if kind == "cxi" else ""
    return fine(f"{source} has no RDMA transports, none needed here{beside}")


def _uses_ucx(context: Context) -> bool:
    return context.run is None or context.run.control.transport == "ucx"


CHECKS = (
    Check(
        name="nccl-net",
        why="a name of NCCL_NET that the plug-in doesn't bear, or a missing plug-in, ends in a hang or in slow TCP",
        source="aws-ofi-nccl PR#530, shs-ccl-docs PR#35; OLCF Frontier guide on single nodes; a report of Isambard-AI",
        look=_nccl_net,
        needs=("site", "gpus"),
    ),
    Check(
        name="cxi-settings",
        why="settings that are fine elsewhere hang on Slingshot, or change data in silence",
        source="NVIDIA/nccl#2001, shs-ccl-docs PR#21; ofiwg/libfabric#9003; aws-ofi-nccl#1379",
        look=_cxi_settings,
        needs=("site", "gpus"),
    ),
    Check(
        name="nccl-log",
        why="NCCL falls back to sockets in silence, and connected rings don't show that data moves",
        source="reports of Isambard-AI and LANTA: 'Selected provider is cxi' and a finished transfer are the proof",
        look=_nccl_log,
        needs=("run directory", "gpus"),
        once=True,
    ),
    Check(
        name="ucx",
        why="UCX from PyPI is built without verbs: it runs over TCP, or not at all when a device is named",
        source="openucx/ucx#10049, #9908; CSCS documentation on communication libraries",
        look=_ucx,
    ),
)
