"""Reports on host lists, times, requests, variables, steps and MPI's start (numbers 1 to 39)."""

from __future__ import annotations

from tests.reports.catalogue import Report

__all__ = ["JOB_REPORTS"]

_JOBS = "tests/reports/test_jobs.py"
_LISTS = "tests/unit/test_nodelist.py"
_ON_SLURM = "tests/slurm/test_nodelist.py::test_expansion_agrees_with_scontrol"
_CHECK = "tests/unit/test_preflight_checks.py::test_a_check_says_what_it_sees"
_LEAKS = (
    f"{_JOBS}::test_every_srun_states_its_cpus_and_takes_none_from_the_batch_script",
    "tests/unit/test_placement.py::test_step_inputs_do_not_leak_into_other_components",
    "tests/slurm/test_layouts.py::test_each_process_has_its_own_inputs",
)

JOB_REPORTS = (
    Report(
        "1",
        "facebookincubator/submitit PR#4",
        "numbers in brackets lose their leading zeros",
        (f"{_JOBS}::test_lists_of_the_reports[n[008-011]-hosts0]", f"{_LISTS}::test_expand", _ON_SLURM),
    ),
    Report(
        "2",
        "Lightning#14896, #5160; ignite PR#2204; skypilot PR#8891; cloudai PR#1023; parallelly#140; scoop PR#30; "
        "ood_core#54; clustershell#293, #427",
        "a parser by regular expression fails on several names, or on two ranges in one name",
        (
            f"{_JOBS}::test_lists_of_the_reports[a[1-2],b3-hosts1]",
            f"{_JOBS}::test_lists_of_the_reports[a[1-2]b[3-4],c-hosts2]",
            f"{_LISTS}::test_any_hosts_come_back",
            _ON_SLURM,
        ),
    ),
    Report(
        "3",
        "pmodels/mpich#5653, #2786, #3946",
        "a launcher of its own reads Slurm's lists in another way than Slurm",
        (_ON_SLURM, "tests/slurm/test_nodelist.py::test_compression_agrees_with_scontrol"),
        not_ours="Hydra's parser is MPICH's: srun starts every rank here, and Hydra reads no list",
    ),
    Report(
        "4",
        "Megatron-Bridge PR#3830",
        "the master's name is cut out of the compact list and is half a bracket",
        (f"{_JOBS}::test_the_first_host_is_a_name_and_not_a_piece_of_the_list",),
    ),
    Report(
        "5",
        "volcengine/verl, an example script",
        "host names on lines of their own are taken for one name",
        (f"{_JOBS}::test_lists_of_the_reports[n008\\nn009\\n-hosts3]", f"{_LISTS}::test_expand"),
    ),
    Report(
        "6",
        "pytorch#76069",
        "every node takes itself for the master, with a free port of its own",
        (
            "tests/unit/test_terms.py::test_find_controller_follows_terms_of_its_own_attempt",
            "tests/unit/test_joining.py::test_whatever_the_order_everybody_ends_up_with_the_newest",
            "tests/unit/test_addresses.py::test_two_interfaces_and_a_name_that_resolves_to_127_0_1_1",
            "tests/mpi/test_trainer_world.py::test_a_session_over_two_terms",
        ),
    ),
    Report(
        "7",
        "sgl-project/sglang PR#36116",
        "the batch shell expands a task's variable, and all tasks get the number of the first; an open port is no "
        "engine that works",
        (
            f"{_JOBS}::test_what_only_a_task_knows_is_not_taken_from_the_batch_shell",
            "tests/slurm/test_submit.py::test_roles_get_their_steps_and_one_host_can_start_again",
            "tests/conformance/test_engine_process.py::test_serves_over_tcp_and_ends_on_sigterm",
            "tests/conformance/test_engine.py::test_refuses_everything_before_its_first_sync",
        ),
    ),
    Report(
        "8",
        "mlc-ai/pith-train PR#47",
        "the address of the host that called srun is taken for rank 0's",
        (
            f"{_JOBS}::test_the_host_that_called_srun_is_never_published_as_ours",
            "tests/unit/test_addresses.py::test_the_host_of_srun_is_asked_for_by_default",
        ),
    ),
    Report(
        "11",
        "start scripts at Leonardo and JUPITER",
        "an address that was cut out of a command's output has a blank at its end",
        (
            f"{_JOBS}::test_an_address_with_a_blank_is_refused",
            "tests/unit/test_tcp.py::test_bad_addresses_are_user_errors",
        ),
    ),
    Report(
        "12",
        "JUWELS Booster",
        "a node's name leads to the management network",
        (
            "tests/unit/test_addresses.py::test_without_a_name_the_routes_decide",
            "tests/unit/test_addresses.py::test_a_name_or_pattern_decides",
        ),
        not_ours="names aren't resolved at all: addresses of interfaces are published, and the site file names ib0",
    ),
    Report(
        "13",
        "Lightning#17228, #20434; litgpt#1832; NeMo Speech#5819",
        "tasks and devices differ in number, and the ranks that are there wait for ever",
        (
            f"{_JOBS}::test_a_group_has_one_task_a_rank_or_one_a_node",
            "tests/unit/test_validate.py::test_a_gpu_has_one_rank",
            "tests/mpi/test_spmd.py::test_wrong_world_size_is_a_user_error",
        ),
    ),
    Report(
        "14",
        "Megatron-LM#1371",
        "each of eight tasks starts eight ranks",
        (
            f"{_JOBS}::test_a_group_has_one_task_a_rank_or_one_a_node",
            "tests/unit/test_request_forms.py::test_a_role_at_a_site",
            "tests/slurm/test_submit.py::test_the_trainers_step_is_one_mpi_world",
        ),
    ),
    Report(
        "15",
        "NERSC, a helper script for jobs of variable time",
        "a bare number of minutes is read as seconds",
        (
            "tests/unit/test_walltime.py::test_parse_time[30-1800]",
            f"{_JOBS}::test_a_time_reaches_slurm_as_it_was_written",
        ),
    ),
    Report(
        "16",
        "ROCm/spur#804; qbatch#209; libsubmit#75; CESM#186; openff-evaluator#418",
        "days with hours, or minutes with seconds, are read as something else",
        (
            "tests/unit/test_walltime.py::test_parse_time[1-12-129600]",
            "tests/unit/test_walltime.py::test_parse_time[10:00-600]",
            "tests/unit/test_walltime.py::test_format_and_parse_agree",
            "tests/slurm/test_walltime.py::test_limits_agree_with_sbatch",
            f"{_JOBS}::test_a_time_reaches_slurm_as_it_was_written",
        ),
    ),
    Report(
        "18",
        "SmartSim PR#104, #268; ROCm/spur#794; psij PR#445",
        "a value with a comma is cut by --export, and a second --export replaces the first",
        (
            f"{_JOBS}::test_no_variable_travels_in_a_list_of_sruns",
            "tests/unit/test_exports.py::test_nasty_values_arrive",
            "tests/slurm/test_environment.py::test_nasty_values_reach_every_task",
            "tests/slurm/test_environment.py::test_a_list_of_variables_would_be_cut_at_commas",
        ),
    ),
    Report(
        "20",
        "webknossos-libs PR#1483; DDS#490; srt-slurm PR#125; soperator PR#2316; datatrove#248",
        "srun inherits the batch script's CPUs in two forms that contradict each other, and ends",
        (*_LEAKS, f"{_JOBS}::test_a_job_that_is_submitted_from_inside_one_takes_nothing_of_it"),
    ),
    Report(
        "20a",
        "snakemake-executor-plugin-slurm#373",
        "GPUs are asked for by two families of options at once",
        (
            f"{_JOBS}::test_a_second_family_of_gpu_request_is_refused",
            "tests/unit/test_request_forms.py::test_any_run_is_refused_in_a_line_or_asks_as_the_site_wants",
        ),
    ),
    Report(
        "21",
        "a public start script with a het job",
        "a step on the second component gets the first one's CPUs and memory",
        _LEAKS,
    ),
    Report("22", "esm_tools#1148", "a host file of an earlier command changes where tasks go", _LEAKS),
    Report(
        "24",
        "Parsl#3006",
        "a task asks for all cores of the node, and the second one doesn't start",
        (f"{_JOBS}::test_ranks_share_the_cores_of_a_node", f"{_JOBS}::test_more_cores_than_a_node_has_are_refused"),
    ),
    Report(
        "26",
        "TACC Vista",
        "the site rejects jobs that ask for GPUs or memory",
        (
            f"{_JOBS}::test_vista_gets_none_of_the_options_that_it_rejects",
            "tests/unit/test_request_forms.py::test_rules_of_a_site[vista]",
            "tests/unit/test_request_forms.py::test_a_forbidden_option_is_refused_however_it_is_spelt[vista---gres=1]",
            "tests/unit/test_request_forms.py::test_memory_at_a_site[vista]",
        ),
    ),
    Report(
        "29",
        "a public start script with a het job",
        "srun that names the leader's job sees the nodes of one component only",
        (
            f"{_JOBS}::test_a_step_names_its_component_and_no_job",
            "tests/slurm/test_submit.py::test_roles_get_their_steps_and_one_host_can_start_again",
        ),
    ),
    Report(
        "30",
        "esm_tools#1340, PR#1364; NeMo-Skills PR#336, #372; srt-slurm PR#178, #321; SmartSim PR#346; NeMo-Run PR#407",
        "het jobs or their steps are not to be had here, and it shows after hours in the queue",
        (
            f"{_CHECK}[het-jobs-FAIL-disable_hetjob_steps]",
            f"{_CHECK}[het-jobs-FAIL-only backfill starts het jobs]",
            "tests/unit/test_site_schema.py::test_a_site_where_only_split_is_allowed",
            "tests/slurm/test_submit.py::test_what_slurm_would_refuse_is_seen_before_anything_is_written",
        ),
    ),
    Report(
        "31",
        "smith#688; optimas PR#266; radical.pilot#2620; DLA-Future#337; axom#637; ompi#8378; QCG-PilotJob#49; "
        "lumi-userguide PR#223",
        "a second step on a node waits until the first has ended",
        (
            f"{_JOBS}::test_every_step_overlaps_and_says_what_it_needs",
            "tests/unit/test_placement.py::test_srun_of_one_host_of_a_role",
            "tests/slurm/test_submit.py::test_roles_get_their_steps_and_one_host_can_start_again",
        ),
    ),
    Report(
        "32",
        "ORNL DDStore's documentation",
        "two steps of a job have networks of their own on Slingshot and don't reach each other",
        (
            f"{_JOBS}::test_where_steps_meet_by_the_jobs_network_every_component_asks_for_it",
            "tests/unit/test_slingshot.py::test_an_agent_takes_it_where_the_site_says_so",
            f"{_CHECK}[vni-FAIL-the step's VNI only]",
        ),
        not_ours="whether the switch lets packets through is seen on a Slingshot machine only",
    ),
    Report(
        "33",
        "openpmix/prrte#2004",
        "daemons that were started with --mpi=none have no virtual network",
        (
            "tests/unit/test_placement.py::test_on_slingshot_no_step_is_started_without_an_mpi_plugin",
            f"{_CHECK}[vni-FAIL-isn't set]",
        ),
    ),
    Report(
        "34",
        "mochi-margo#301, #305",
        "Slurm lists two virtual networks, and the library takes the step's",
        (
            "tests/unit/test_slingshot.py::test_the_last_one_is_the_jobs[1310,1271-1271-]",
            "tests/unit/test_slingshot.py::test_an_agent_takes_it_where_the_site_says_so",
            f"{_CHECK}[vni-ok-1271 is taken]",
        ),
    ),
    Report(
        "35",
        "ornladios/ADIOS2#3439",
        "a step on one node has no virtual network, and the job's own is refused",
        (
            f"{_CHECK}[vni-warn-no job_vni]",
            f"{_CHECK}[vni-warn-on one node]",
            f"{_CHECK}[nccl-net-FAIL-a run on one node]",
            "tests/unit/test_placement.py::test_each_role_has_the_settings_of_its_own_width",
        ),
    ),
    Report(
        "36",
        "a public script with Hydra's mpiexec first in PATH",
        "another launcher than srun starts the ranks, and none of them has a virtual network",
        (
            "tests/unit/test_slingshot.py::test_the_last_one_is_the_jobs[--isn't set]",
            "tests/mpi/test_spmd.py::test_wrong_world_size_is_a_user_error",
            f"{_JOBS}::test_a_step_names_its_component_and_no_job",
        ),
    ),
    Report(
        "37",
        "ompi#10940; mpi4py#141",
        "the MPI that is installed and srun's plug-in don't fit: worlds of one rank, or an abort",
        (
            f"{_CHECK}[mpi-FAIL-openmpi 5.0.11 under --mpi=pmi]",
            f"{_CHECK}[mpi-FAIL-under --mpi=pmix aborts]",
            "tests/mpi/test_spmd.py::test_wrong_world_size_is_a_user_error",
            "tests/slurm/test_doctor.py::test_an_mpi_plugin_that_is_not_there",
        ),
        not_yet="the major version of PMIx isn't compared: what a wheel was built against isn't in its metadata",
    ),
    Report(
        "38",
        "geos-chem#822",
        "srun has no plug-in for PMIx",
        (
            f"{_CHECK}[mpi-FAIL-no --mpi=pmix_v3: it has pmi2,]",
            "tests/slurm/test_doctor.py::test_an_mpi_plugin_that_is_not_there",
        ),
        not_ours="another plug-in is named and not taken by itself: which one fits is up to the installed MPI",
    ),
    Report(
        "39",
        "pmix-standard#363; CSCS documentation; podman-hpc#158",
        "PMIx inside a container asks for munge, which is outside",
        (
            f"{_CHECK}[container-munge-FAIL-PMIx asks for munge]",
            f"{_CHECK}[container-munge-FAIL-psec=^native]",
            f"{_CHECK}[container-munge-warn-without munge]",
        ),
    ),
)
