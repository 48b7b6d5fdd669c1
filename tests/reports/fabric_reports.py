"""Reports on networks, communication libraries and GPUs (numbers 41 to 52)."""

from __future__ import annotations

from tests.reports.catalogue import Report

__all__ = ["FABRIC_REPORTS"]

_FABRIC = "tests/reports/test_fabric.py"
_ADDRESSES = "tests/unit/test_addresses.py"
_CHECK = "tests/unit/test_preflight_checks.py::test_a_check_says_what_it_sees"
_COMPARISON = "tests/unit/test_preflight_checks.py::test_a_comparison_says_what_differs"

FABRIC_REPORTS = (
    Report(
        "41",
        "nccl#286, #302, #634, #1277, #1581, #2428; nccl-tests#219",
        "nodes have other adapters than their neighbours, or two networks that overlap, and collectives hang",
        (
            f"{_COMPARISON}[nics-FAIL-n3 lacks hsn1]",
            f"{_COMPARISON}[nics-FAIL-n2 has usb0 besides]",
            f"{_COMPARISON}[nics-FAIL-RDMA adapters differ: n2 lacks]",
            f"{_COMPARISON}[nics-warn-ib0 and ib1 are both in 10.0.0]",
            f"{_COMPARISON}[nics-FAIL-both have 10.0.0.1]",
            "tests/unit/test_preflight_parse.py::test_interfaces_that_lead_somewhere",
        ),
    ),
    Report(
        "42",
        "marin#6940",
        'one build of NCCL refuses an exact name, which begins with "="',
        (
            "tests/unit/test_preflight_parse.py::test_choosing_as_nccl_does",
            "tests/unit/test_preflight_parse.py::test_choosing_ports_of_adapters",
        ),
        not_yet="another start with the other form when NCCL refuses the first: the doctor reads both",
    ),
    Report(
        "44",
        "sglang#3226; Megatron-LM#877; ucx#10049, #9908; prime-rl PR#3204; ompi#7857",
        "a library takes a bridge's address, or has no transport for the adapter that was named",
        (
            f"{_ADDRESSES}::test_a_name_or_pattern_decides",
            f"{_ADDRESSES}::test_a_name_that_gives_no_address_is_refused_in_one_line",
            f"{_ADDRESSES}::test_without_a_name_the_routes_decide",
            f"{_CHECK}[ucx-FAIL-it won't start]",
            f"{_CHECK}[ucx-FAIL-UCX_TLS has rc]",
            f"{_CHECK}[ucx-warn-UCX goes over TCP on this ib f]",
            "tests/unit/test_opening.py::test_ucx_without_its_package_says_what_to_install",
        ),
    ),
    Report(
        "45",
        "a public report on verl with four Slingshot adapters",
        "with a prefix of names remote ranks hang, with one adapter they don't",
        (
            f"{_FABRIC}::test_where_a_prefix_of_names_hung_one_adapter_is_named",
            "tests/unit/test_multihomed.py::test_silent_addresses_are_passed_over_and_get_longer_in_the_next_round",
            "tests/unit/test_multihomed.py::test_a_host_whose_first_network_is_cut_is_reached_over_the_second",
        ),
        not_yet="NCCL's own bootstrap isn't tried on one adapter after it hung on several: the site file says which",
    ),
    Report(
        "46",
        "libfabric#9003",
        "the library's memory hooks deadlock",
        (f"{_FABRIC}::test_no_site_on_slingshot_watches_memory_by_hooks", f"{_CHECK}[cxi-settings-FAIL-memhooks]"),
    ),
    Report(
        "47",
        "nccl#2001, PR#2053; shs-ccl-docs PR#21",
        "the protocol LL128 changes data in silence on Slingshot",
        (
            f"{_FABRIC}::test_no_site_on_slingshot_asks_for_ll128_or_for_many_channels",
            f"{_CHECK}[cxi-settings-warn-NCCL_PROTO=(unset) lets]",
            f"{_CHECK}[cxi-settings-warn-NCCL_PROTO=LL128,Simple lets]",
            "tests/unit/test_weights_broadcast.py::test_damage_is_fetched_once_more_and_no_more",
            "tests/conformance/test_engine.py::test_wrong_live_weights_taint_until_a_sync_succeeds",
        ),
        not_yet="a checksum of a collective over NCCL, before or within a run: only weights that arrive are checked",
    ),
    Report(
        "48",
        "aws-ofi-nccl#1379, #1055",
        "with some thousand connections transfers stall; one version of NCCL doesn't work with the plug-in",
        (
            f"{_FABRIC}::test_no_site_on_slingshot_asks_for_ll128_or_for_many_channels",
            f"{_CHECK}[cxi-settings-warn-NCCL_MAX_NCHANNELS=32]",
        ),
        not_yet="the number of a run's connections isn't reckoned, and NCCL's version isn't held against the plug-in's",
    ),
    Report(
        "49",
        "nccl-extensions#5",
        "transfers from many to many that GPUs start aren't there on Slingshot",
        not_yet="weight sync over NCCL: weights travel over the control layer's own transport so far",
    ),
    Report(
        "50",
        "ecmwf/WeatherGenerator#360",
        "an all-gather runs into its time limit because the network is slow, and the limit is raised",
        (
            f"{_CHECK}[nccl-log-ok-moved data, up to 182 GB/s]",
            f"{_CHECK}[nccl-log-warn-proves nothing]",
            f"{_CHECK}[nccl-net-warn-TCP instead of Slingshot]",
        ),
        not_yet="the doctor reads what a log says of bandwidth; it measures none, and knows of no least one",
    ),
    Report(
        "51",
        "nccl#2186, #1647; k8s-dra-driver#294, #1417; ucx PR#11885",
        "NVLink between nodes fails at the start, without a channel or with another one than the neighbour's",
        (f"{_CHECK}[imex-FAIL-no /dev/nvidia-caps-imex-chann]", f"{_CHECK}[imex-ok-channel1]"),
        not_yet="that all nodes are in one IMEX domain isn't compared: the channel's device is looked for on each",
    ),
    Report(
        "52",
        "nccl#1066, #129; ompi#11949; slurm-buildkite#54; warpx#6382; nccl-tests#300; pyxis#73; tensorpipe#412",
        "GPUs that are bound to tasks hide the peers' from each other",
        (
            f"{_FABRIC}::test_tasks_of_a_node_see_all_its_gpus_unless_the_site_wants_otherwise",
            "tests/unit/test_trainer_model.py::test_a_rank_takes_its_own_device_or_the_only_one_that_it_sees",
            "tests/unit/test_request_forms.py::test_a_role_at_a_site[clariden-trainer]",
            "tests/unit/test_request_forms.py::test_a_role_at_a_site[perlmutter-trainer]",
        ),
    ),
)
