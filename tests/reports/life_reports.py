"""Reports on signals, status, orphans, ports, file systems and what Ray and others left open (numbers 53 on)."""

from __future__ import annotations

from tests.reports.catalogue import Report

__all__ = ["LIFE_REPORTS"]

_LIFE = "tests/reports/test_life.py"
_CHECK = "tests/unit/test_preflight_checks.py::test_a_check_says_what_it_sees"
_JOBS = "tests/unit/test_jobs.py"
_CHILDREN = "tests/unit/test_children.py"
_JOINING = "tests/unit/test_joining.py"
_MACHINE = "tests/unit/test_preflight_machine.py"

LIFE_REPORTS = (
    Report(
        "53",
        "Lightning#20542, #15022, #14610, #21404, #6626, #16639, #5160",
        "the signal before the end hits the wrong job, is one that NCCL uses, or reaches nobody",
        (
            f"{_LIFE}::test_the_signal_before_the_end_is_usr2_to_the_batch_shell_of_a_plain_job",
            f"{_LIFE}::test_the_batch_script_passes_a_signal_on_at_once",
            "tests/slurm/test_submit.py::test_the_batch_script_forwards_signals_and_keeps_the_exit_code",
            "tests/slurm/test_submit.py::test_requeue_from_inside_keeps_the_id_and_appends_output",
        ),
        not_ours="ids of array jobs: a run is no array",
    ),
    Report(
        "55",
        "goodfire spd#741; EgoVerse PR#621; Automodel#405; determined PR#6250",
        "the notice of the end is looked at between long steps, or by one rank alone",
        (
            "tests/unit/test_agent.py::test_a_notice_reaches_the_controller_at_once_and_the_agent_goes_on",
            "tests/unit/test_members.py::test_a_notice_is_handed_on",
            "tests/unit/test_lifecycle.py::test_one_more_step_has_to_fit_with_its_save",
            "tests/slurm/test_lifecycle.py::test_the_run_comes_out_whole",
        ),
    ),
    Report(
        "56",
        "toil#4431; nextflow#193; reframe#283; maestrowf#441; slurm-pipeline#45; Model-Optimizer PR#1900; Parsl#2207",
        "a job that Slurm has forgotten is taken for finished, or for failed",
        (
            f"{_JOBS}::test_silence_is_no_end",
            f"{_JOBS}::test_accounting_counts_for_ends_only",
            f"{_JOBS}::test_another_job_of_the_same_id_is_not_ours",
            f"{_JOBS}::test_a_forgotten_job_is_given_up_after_a_while",
            "tests/unit/test_job_state.py::test_verdict",
            "tests/unit/test_job_state.py::test_what_is_over_is_not_unknown",
            "tests/slurm/test_status.py::test_a_vanished_job_is_known_by_sacct",
            "tests/slurm/test_side_jobs.py::test_slurmctld_forgets",
        ),
    ),
    Report(
        "57",
        "sglang#23627",
        "workers of an engine that ended live on and hold the GPU's memory",
        (
            f"{_CHILDREN}::test_what_a_child_left_behind_is_killed_when_it_has_ended",
            f"{_CHILDREN}::test_end_terminates_then_kills_the_whole_group",
            f"{_CHECK}[gpu-leftovers-FAIL-GPU 0: 64.4 GB]",
            f"{_CHECK}[gpu-leftovers-warn-by processes 4711]",
        ),
        not_yet="workers that leave their engine's process group: within a job Slurm's cgroup ends them with the step",
    ),
    Report(
        "58",
        "prime-rl PR#2331; EgoVerse PR#682; vllm#55510; TensorRT-LLM PR#16404; cloudai PR#942",
        "what is left of a run stays on its nodes, or the cleaning ends other jobs' processes and living children",
        (
            f"{_LIFE}::test_no_process_is_ended_by_its_name",
            f"{_CHILDREN}::test_only_the_main_thread_starts_children",
            f"{_CHILDREN}::test_a_child_dies_with_its_parent",
            "tests/conformance/test_roster_hosts.py::test_a_killed_agent_takes_its_child_along_and_is_lost_by_its_socket",
            "tests/slurm/test_submit.py::test_roles_get_their_steps_and_one_host_can_start_again",
        ),
    ),
    Report(
        "59",
        "catalyst PR#716; XLM#53; mlperf-common PR#9; srt-slurm PR#147, #195, #76; sglang PR#15392, #15385",
        "two jobs on a node get one port: it is fixed, or the remainder of a job id, or was free a moment ago",
        (
            f"{_LIFE}::test_listeners_of_many_jobs_on_one_node_have_ports_of_their_own",
            f"{_LIFE}::test_a_port_that_another_job_took_over_is_no_peer",
            "tests/conformance/test_transport_elastic.py::test_nobody_listens",
            f"{_CHECK}[ports-FAIL-share 9000-9999]",
            f"{_CHECK}[ports-warn-port 8999]",
        ),
    ),
    Report(
        "60",
        "a note of LANTA",
        "jobs that are killed at their limit leave adapters busy",
        (
            f"{_CHILDREN}::test_end_terminates_then_kills_the_whole_group",
            "tests/mpi/test_trainer_world.py::test_a_session_over_two_terms",
            "tests/slurm/test_run.py::test_the_time_limit_cuts_and_the_next_allocation_goes_on",
        ),
        not_ours="whether an adapter stays busy is seen on a Slingshot machine only; here ranks end MPI before they go",
    ),
    Report(
        "62",
        "SYMFLUENCE#21; rsmas_insar#437; mspass#660",
        "thousands of processes open the same small files, and the site blocks the user",
        ("tests/unit/test_routing_store.py::test_a_group_is_three_inodes",),
        not_yet="Python's own files: each task imports from where it is installed, nothing is sent ahead by sbcast or "
        "put into an image",
    ),
    Report(
        "63",
        "SOAP PR#188",
        "a file is striped over all targets, or a large one over a single target",
        (
            f"{_CHECK}[stripe-warn-all targets]",
            f"{_CHECK}[stripe-warn-1 target of 1.05 MB for files ]",
            f"{_CHECK}[stripe-ok-as the site advises]",
            "tests/unit/test_preflight_parse.py::test_stripes",
        ),
    ),
    Report(
        "64",
        "bio2zarr#366; rechunker#80; zarr-python PR#2644; physicsnemo-curator PR#41",
        "a file a chunk uses the quota of files up",
        (
            f"{_CHECK}[quota-FAIL-and 10 files]",
            f"{_CHECK}[quota-FAIL-over your quota]",
            "tests/unit/test_routing_store.py::test_a_group_is_three_inodes",
            "tests/unit/test_routing_store.py::test_layout_plans",
            "tests/unit/test_preflight_nodes.py::test_the_size_of_a_run_grows_with_what_it_keeps",
        ),
    ),
    Report(
        "65",
        "prime-rl PR#2305; sglang#31347; tvm-ffi#667; triton#11512; pytorch#173679; opendatahub PR#844; LUMI on MIOpen",
        "a compiler's cache on a shared file system breaks by locks, races and stale handles",
        (
            f"{_CHECK}[jit-caches-warn-TRITON_CACHE_DIR: /scratch/me/]",
            f"{_CHECK}[jit-caches-FAIL-/home/me/.triton: no answer]",
            f"{_CHECK}[jit-caches-ok-lie on this node]",
        ),
        not_yet="the caches' folders aren't set by the toolkit: the doctor says which to set in the site file",
    ),
    Report(
        "66",
        "JUPITER, one of its nodes",
        "a file system that one node lost stops all others in silence",
        (
            f"{_CHECK}[file-systems-FAIL-/scratch/run: no answer within]",
            f"{_MACHINE}::test_a_file_system_that_hangs_is_named",
            f"{_MACHINE}::test_a_check_that_breaks_or_hangs_hides_no_other",
            "tests/unit/test_agent.py::test_a_file_system_that_stalls_holds_up_neither_heartbeats_nor_the_lease",
        ),
    ),
    Report(
        "why-leave-ray",
        "ray#59551, #10154, #58875, #25819, #11295, #26477, #43778, #826, PR#22663; dagster-slurm#40; vllm#7933; "
        "AReaL#20; SkyRL#709",
        "jobs on one node meet by ports and folders, starts depend on their order, workers count the node's cores, "
        "processes are left behind",
        (
            f"{_LIFE}::test_listeners_of_many_jobs_on_one_node_have_ports_of_their_own",
            f"{_LIFE}::test_a_port_that_another_job_took_over_is_no_peer",
            f"{_LIFE}::test_nobody_counts_the_nodes_cores_for_the_jobs",
            f"{_LIFE}::test_no_process_is_ended_by_its_name",
            f"{_JOINING}::test_whatever_the_order_everybody_ends_up_with_the_newest",
            f"{_JOINING}::test_the_skew_may_be_all_of_the_deadline_but_no_more",
            "tests/unit/test_agent.py::test_heartbeats_renew_the_lease_and_silence_ends_it",
            "tests/unit/test_submit.py::test_of_two_submissions_one_gets_the_directory",
            "tests/unit/test_submit.py::test_directories_of_others",
        ),
    ),
    Report(
        "sglang-weight-sync",
        "sglang#4096, #7478, #3932, #4978",
        "the group for weight updates waits for ever: a port that is taken, a wrong interface, IPv6",
        (
            "tests/unit/test_weights_broadcast.py::test_silent_or_dead_source_ends_the_fetch_within_its_deadline",
            "tests/unit/test_tcp.py::test_ipv6",
            "tests/unit/test_addresses.py::test_a_host_with_ipv6_alone",
            "tests/mpi/test_ipv6_run.py::test_a_whole_run_over_ipv6",
        ),
        not_yet="SGLang's own group for weight updates: there is no SGLang adapter and no weight sync over NCCL yet",
    ),
    Report(
        "config-pitfalls",
        "reframe#2226, #605, PR#3280",
        "a job that looks at its cluster submits itself again; a role, or the cluster, has no partition",
        (
            f"{_LIFE}::test_a_partition_is_stated_or_known_to_be_found",
            "tests/unit/test_preflight_nodes.py::test_inside_a_plain_job_one_step_on_some_of_its_nodes",
            "tests/unit/test_preflight_nodes.py::test_inside_a_het_job_one_step_per_component",
            "tests/unit/test_validate.py::test_a_site_without_a_partition_for_a_role",
            "tests/slurm/test_doctor.py::test_inside_a_het_job_nodes_of_all_components_answer",
        ),
    ),
)
