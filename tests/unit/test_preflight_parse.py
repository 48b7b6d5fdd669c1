"""Outputs of commands as the doctor's checks read them, with the traps that each has."""

from __future__ import annotations

import pytest

from miles_hpc.cluster.preflight.nccl_log import NcclLog, parse_nccl_log
from miles_hpc.cluster.preflight.parse_gpu import gpu_states, remapped_pending
from miles_hpc.cluster.preflight.parse_net import (
    Hca,
    chosen,
    interfaces,
    overlaps,
    parse_hcas,
    port_range,
    reserved_ports,
    ucx_transports,
)
from miles_hpc.cluster.preflight.parse_slurm import controllers, mpi_plugins, parameters, slurm_config
from miles_hpc.cluster.preflight.parse_storage import (
    Quota,
    StripePart,
    parse_lfs_quota,
    parse_quota,
    parse_stripes,
    stripe_at,
)
from miles_hpc.cluster.preflight.wording import nodes_by_value


def test_nodes_that_have_a_value_in_common() -> None:
    found = nodes_by_value({"n2": "b", "n3": "a", "n1": "b"})
    assert (found, list(found)) == ({"a": ["n3"], "b": ["n1", "n2"]}, ["b", "a"])
    assert nodes_by_value({}) == {}


# ------------------------------------------------------------------------------------------------ Slurm


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 22.05, on stdout
        (
            "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\n"
            "specific pmix plugin versions available: pmix_v4\n",
            {"pmix", "pmix_v4", "none", "cray_shasta", "pmi2"},
        ),
        # older ones, on stderr
        ("srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n", {"none", "pmi2", "openmpi"}),
        # a version without its plug-in named beside it
        ("MPI plugin types are...\n\tnone\n\tpmix_v3\n", {"none", "pmix_v3", "pmix"}),
        ("srun: error: s_p_parse_file: cannot stat\nsrun: fatal: Unable to process configuration file\n", set()),
        ("", set()),
    ],
)
def test_mpi_plugins(text: str, expected: set[str]) -> None:
    assert mpi_plugins(text) == expected


def test_slurm_config_and_its_lists() -> None:
    text = (
        "Configuration data as of 2026-08-01T00:00:00\n"
        "SchedulerParameters     = bf_interval=1,disable_hetjob_steps\n"
        "SchedulerType           = sched/backfill\n"
        "SwitchParameters        = (null)\n\n"
        "Slurmctld(primary) at n0 is UP\n"
    )
    config = slurm_config(text)
    assert config == {
        "SchedulerParameters": "bf_interval=1,disable_hetjob_steps",
        "SchedulerType": "sched/backfill",
        "SwitchParameters": "",
    }
    assert parameters(config["SchedulerParameters"]) == {"bf_interval": "1", "disable_hetjob_steps": ""}
    assert parameters("") == {}


def test_controllers() -> None:
    text = "Slurmctld(primary) at head1 is DOWN\nSlurmctld(backup) at head2 is UP\n"
    assert controllers(text) == {"head1": False, "head2": True}
    assert controllers("") == {}


# ------------------------------------------------------------------------------------------------ GPUs


def test_gpu_states_of_an_h200() -> None:
    (gpu,) = gpu_states("0, GPU-a4920bff-1ab6-3fef-a52a-475b9803e60c, 0, 0, 0\n")
    assert (gpu.index, gpu.volatile_errors, gpu.aggregate_errors, gpu.used_bytes) == (0, 0, 0, 0)


def test_gpu_states_without_ecc_and_with_memory_in_use() -> None:
    one, other = gpu_states("0, GPU-a, [N/A], [N/A], 512\n1, GPU-b, 3, 12, [Not Supported]\n")
    assert (one.volatile_errors, one.used_bytes) == (None, 512 * 1024**2)
    assert (other.volatile_errors, other.aggregate_errors, other.used_bytes) == (3, 12, None)


@pytest.mark.parametrize(
    "text", ["Unable to determine the device handle for GPU0000:0F:00.0: Unknown Error\n", "0, GPU-a, 0\n"]
)
def test_gpu_states_of_another_shape(text: str) -> None:
    with pytest.raises(ValueError):
        gpu_states(text)


def test_remapped_rows() -> None:
    assert remapped_pending("GPU-a, No, No\nGPU-b, Yes, No\nGPU-c, Yes, Yes\nGPU-d, [N/A], [N/A]\n") == {
        "GPU-b": "pending",
        "GPU-c": "failure",
    }


# ------------------------------------------------------------------------------------------------ network

ADDRESSES = """[{},
{"ifname":"lo","flags":["LOOPBACK","UP","LOWER_UP"],"operstate":"UNKNOWN",
 "addr_info":[{"family":"inet","local":"127.0.0.1","prefixlen":8,"scope":"host"}]},
{"ifname":"ib0","flags":["BROADCAST","MULTICAST","UP","LOWER_UP"],"operstate":"UNKNOWN",
 "addr_info":[{"family":"inet","local":"10.1.0.5","prefixlen":16,"scope":"global"},
              {"family":"inet6","local":"fe80::5","prefixlen":64,"scope":"link"}]},
{"ifname":"eth0@if5","flags":["BROADCAST","UP","LOWER_UP"],
 "addr_info":[{"family":"inet","local":"10.1.2.9","prefixlen":24,"scope":"global"}]},
{"ifname":"ib1","flags":["BROADCAST","MULTICAST"],"operstate":"DOWN","addr_info":[]},
{"ifname":"docker0","flags":["UP","LOWER_UP"],
 "addr_info":[{"family":"inet","local":"172.17.0.1","prefixlen":16,"scope":"global"}]}]"""


def test_interfaces_that_lead_somewhere() -> None:
    found = interfaces(ADDRESSES)
    assert [(one.name, one.up, one.networks) for one in found] == [
        ("eth0", True, ("10.1.2.0/24",)),
        ("ib0", True, ("10.1.0.0/16",)),
        ("ib1", False, ()),
    ]
    assert overlaps(found) == [("eth0", "ib0", "10.1.0.0/16")]
    assert interfaces("") == []


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ["hsn0", "hsn1", "eth0"]),
        ("hsn", ["hsn0", "hsn1"]),
        ("=hsn", []),
        ("=hsn0,eth0", ["hsn0", "eth0"]),
        ("==hsn0", ["hsn0"]),
        ("^hsn", ["eth0"]),
        ("^=hsn0", ["hsn1", "eth0"]),
    ],
)
def test_choosing_as_nccl_does(pattern: str, expected: list[str]) -> None:
    assert chosen(["hsn0", "hsn1", "eth0"], pattern) == expected


def test_choosing_ports_of_adapters() -> None:
    names = ["mlx5_0:1", "mlx5_1:1", "mlx5_10:1"]
    assert chosen(names, "mlx5_1") == ["mlx5_1:1", "mlx5_10:1"]  # a prefix: the trap of ten adapters
    assert chosen(names, "=mlx5_1") == ["mlx5_1:1"]
    assert chosen(names, "=mlx5_1:1,mlx5_0") == ["mlx5_0:1", "mlx5_1:1"]


def test_adapters() -> None:
    text = """hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tlink_layer:\t\tInfiniBand
hca_id:\tmlx5_bond_0
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
\t\t\tlink_layer:\t\tEthernet
"""
    assert parse_hcas(text) == [Hca("mlx5_0:1", True, "InfiniBand"), Hca("mlx5_bond_0:1", False, "Ethernet")]
    assert parse_hcas("No IB devices found\n") == []


def test_ports() -> None:
    assert port_range("32768\t60999\n") == (32768, 60999)
    with pytest.raises(ValueError):
        port_range("")
    assert reserved_ports("8080,9148-9200\n") == [(8080, 8080), (9148, 9200)]
    assert reserved_ports("\n") == []


def test_transports_of_ucx() -> None:
    text = """#
# Memory domain: mlx5_0
#      Transport: rc_mlx5
#         Device: mlx5_0:1
#           Type: network
#      Transport: rc_mlx5
#         Device: mlx5_1:1
#      Transport: tcp
#         Device: ib0
"""
    assert ucx_transports(text) == {"rc_mlx5": ["mlx5_0:1", "mlx5_1:1"], "tcp": ["ib0"]}


# ------------------------------------------------------------------------------------------------ storage

PLAIN = "/scratch/me\nstripe_count:  -1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
OLD = "lmm_stripe_count:  4\nlmm_stripe_size:   16777216\nlmm_pattern: raid0\n"
PROGRESSIVE = """/scratch/me
  lcm_layout_gen:    0
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_id:             N/A
    lcme_extent.e_start: 0
    lcme_extent.e_end:   4194304
      stripe_count:  1       stripe_size:   1048576       pattern:       raid0       stripe_offset: -1
    lcme_id:             N/A
    lcme_extent.e_start: 4194304
    lcme_extent.e_end:   EOF
      stripe_count:  32       stripe_size:   4194304       pattern:       raid0       stripe_offset: -1
"""


def test_stripes() -> None:
    assert parse_stripes(PLAIN) == [StripePart(0, -1, 1048576)]
    assert parse_stripes(OLD) == [StripePart(0, 4, 16777216)]
    parts = parse_stripes(PROGRESSIVE)
    assert parts == [StripePart(0, 1, 1048576), StripePart(4194304, 32, 4194304)]
    assert stripe_at(parts, 0) == parts[0]
    assert stripe_at(parts, 4194304) == parts[0]
    assert stripe_at(parts, 4194305) == parts[1]
    assert parse_stripes("") == []
    assert stripe_at([], 1) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "      /scratch   1024       0 2048       -      10       0     100       -\n",
            Quota(1048576, 2097152, 10, 100),
        ),
        # a long mount point has a line of its own; over the soft limit, with the grace period that is left
        (
            "/lustre/a/very/long/mount/point\n                2048* 1024 4096 6d23h59m 5 0 0 -\n",
            Quota(2097152, 1048576, 5, 0, over=True),
        ),
        # a target didn't answer: brackets
        ("/scratch [1024] 0 0 - 10 0 0 -\nSome errors happened when getting quota info.\n", Quota(1048576, 0, 10, 0)),
        ("Permission denied.\n", None),
        ("", None),
    ],
)
def test_lfs_quota(text: str, expected: Quota | None) -> None:
    assert parse_lfs_quota(text) == expected


def test_quota_of_other_file_systems() -> None:
    text = (
        "Disk quotas for user me (uid 1000): \n"
        "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
        "           /home 51200*  40960   61440   6days     900    1000    1200        \n"
        "           /work  1024       0    2048             5       0       0        \n"
    )
    assert parse_quota(text, "/home") == Quota(51200 * 1024, 40960 * 1024, 900, 1000, over=True)
    assert parse_quota(text, "/work") == Quota(1024 * 1024, 2048 * 1024, 5, 0)
    assert parse_quota(text, "/scratch") is None
    assert parse_quota("Disk quotas for user me (uid 1000): none\n", "/home") is None


# ------------------------------------------------------------------------------------------------ NCCL's log

OFI = """n1:1:1 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.9.2-aws
n1:1:1 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
n1:1:1 [0] NCCL INFO Using network AWS Libfabric
n1:1:1 [0] NCCL INFO Connected all rings
"""
SOCKET = """n1:1:1 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so), using internal implementation
n1:1:1 [0] NCCL INFO NET/IB : No device found.
n1:1:1 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.0.0.1<0>
n1:1:1 [0] NCCL INFO Using network Socket
"""
# NCCL 2.28.9 of PyTorch 2.11 on two H200 without P2P and shared memory; it names plug-ins of other kinds too.
H200 = """n1:6:6 [0] NCCL INFO ENV/Plugin: Could not find: libnccl-env.so
n1:6:6 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
n1:6:6 [0] NCCL INFO NET/IB : No device found.
n1:6:6 [0] NCCL INFO Failed to initialize NET plugin IB
n1:6:6 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>
n1:6:6 [0] NCCL INFO Assigned NET plugin Socket to comm
n1:6:6 [0] NCCL INFO Using network Socket
n1:6:6 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so
n1:6:6 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OFI, NcclLog(True, "cxi", "1.9.2-aws", "AWS Libfabric", rings=True)),
        (SOCKET, NcclLog(True, network="Socket", no_plugin=True)),
        (H200, NcclLog(True, network="Socket", no_plugin=True)),
        (
            "[2026] n1:6:6 [0] plugin/net.cc:379 NCCL WARN Failed to initialize any NET plugin\n",
            NcclLog(True, no_network=True),
        ),
        ("n1:1:1 [0] NCCL WARN Error: network OFI not found.\n", NcclLog(True, missing_network="OFI")),
        ("(NCCL INFO) fi_domain: VNI_NOT_FOUND\n", NcclLog(True, vni_not_found=True)),
        (
            OFI + "   134217728      33554432     float     sum      -1   1105.2  121.44  182.16      0\n",
            NcclLog(True, "cxi", "1.9.2-aws", "AWS Libfabric", rings=True, bus_gb_s=182.16),
        ),
        ("network manager: network foo not found\n", NcclLog()),
        ("", NcclLog()),
    ],
)
def test_nccl_log(text: str, expected: NcclLog) -> None:
    assert parse_nccl_log(text.splitlines()) == expected
