"""What users of comparable systems ran into (numbers of their own, 1 to 14)."""

from __future__ import annotations

from tests.reports.catalogue import Report

__all__ = ["PEER_REPORTS"]

_PEERS = "tests/reports/test_peers.py"
_LIFE = "tests/reports/test_life.py"
_CHECK = "tests/unit/test_preflight_checks.py::test_a_check_says_what_it_sees"
_PURE = "tests/unit/test_controller_pure.py"
_HOST = "tests/unit/test_rollout_host.py"
_BUFFER = "tests/unit/test_buffer.py"
_SAMPLER = "tests/unit/test_sampler.py"
_STEPS = "tests/unit/test_supervisor_steps.py"
_BACKEND = "tests/conformance/test_backend.py"

PEER_REPORTS = (
    Report(
        "1",
        "prime-rl#2574, #2577",
        "one component has ended, and the others hold all nodes until the time limit",
        (
            f"{_PEERS}::test_a_role_that_does_not_come_up_ends_the_allocation_with_the_reason",
            f"{_PEERS}::test_a_host_that_is_lost_is_asked_for_once",
            f"{_STEPS}::test_a_role_of_its_own_starts_again_alone",
            f"{_STEPS}::test_without_a_spare_rollout_goes_on_with_the_rest_and_the_trainer_needs_the_next_allocation",
            "tests/conformance/test_transport_loss.py::test_a_killed_peer_is_noticed",
            "tests/unit/test_standing.py::test_attempts_by_folders_events_and_outcomes",
            "tests/slurm/test_run.py::test_a_run_survives_kills_and_trains_every_group_once",
        ),
    ),
    Report(
        "2",
        "prime-rl#2664, #2670",
        "what ends the run kills a trainer in the middle of its checkpoint",
        (
            f"{_STEPS}::test_a_save_under_way_is_waited_for_when_the_supervisor_gives_up",
            "tests/unit/test_agent.py::test_a_notice_reaches_the_controller_at_once_and_the_agent_goes_on",
            f"{_PEERS}::test_a_checkpoint_that_is_still_being_written_is_nobodys_start",
            f"{_BACKEND}::test_a_failed_save_is_told_and_survived",
        ),
    ),
    Report(
        "3",
        "prime-rl#1712",
        "after a restart one role resumes from a step whose weights are still being written",
        (
            f"{_PEERS}::test_a_checkpoint_that_is_still_being_written_is_nobodys_start",
            f"{_PURE}::test_the_newest_readable_checkpoint_is_chosen_and_none_left_is_no_new_run",
            "tests/unit/test_manifest.py::test_a_folder_that_lacks_a_file_isn_t_published",
            "tests/unit/test_manifest.py::test_nothing_is_visible_when_the_fence_objects",
        ),
    ),
    Report(
        "4",
        "NeMo-RL#3238",
        "one member of a group is stuck, no batch is ever full, and a restart draws the same prompts",
        (
            f"{_PEERS}::test_one_group_that_never_ends_holds_up_no_batch",
            f"{_PEERS}::test_a_group_that_was_set_aside_is_not_drawn_again_after_a_restart",
            f"{_SAMPLER}::test_turn_limit",
            f"{_SAMPLER}::test_token_limit_is_never_exceeded",
            f"{_SAMPLER}::test_deadline_in_the_environment_truncates",
            f"{_SAMPLER}::test_deadline_in_the_engine_truncates",
            f"{_HOST}::test_a_hanging_engine_truncates_at_the_deadline",
            f"{_BUFFER}::test_failures_set_aside_but_a_lost_host_doesn_t",
        ),
        not_yet="failures of a group that isn't set aside yet aren't counted over a restart: it gets all its attempts "
        "again",
    ),
    Report(
        "5",
        "tinker-cookbook#822",
        "finished groups are thrown away to keep to the staleness cap, or a full pipeline sits at the cap",
        (
            f"{_BUFFER}::test_pacing_discards_nothing_while_groups_finish_in_order",
            f"{_BUFFER}::test_a_straggler_above_the_cap_is_dropped_with_a_reason",
            f"{_PEERS}::test_depth_and_staleness_are_two_settings",
        ),
    ),
    Report(
        "6",
        "miles#1724",
        "an engine that came back serves before it has current weights",
        (
            "tests/conformance/test_engine.py::test_refuses_everything_before_its_first_sync",
            "tests/conformance/test_engine.py::test_wrong_live_weights_taint_until_a_sync_succeeds",
            f"{_HOST}::test_engines_without_a_version_get_nothing_until_they_are_synced",
            f"{_SAMPLER}::test_slots_go_to_the_emptiest_engine_that_has_weights",
        ),
    ),
    Report(
        "7",
        "miles#2254",
        "the data cursor is ahead of groups that exist in memory only, and a restart skips them",
        (
            f"{_PURE}::test_a_restart_takes_over_what_was_owned_and_not_trained",
            f"{_PURE}::test_without_reuse_everything_is_sampled_again",
            f"{_BUFFER}::test_only_what_a_manifest_contains_is_forgotten",
            "tests/unit/test_lineage.py::test_journals_lead_back_to_the_saved_state",
            "tests/unit/test_source.py::test_the_cursor_continues_where_it_was",
        ),
    ),
    Report(
        "8",
        "slime PR#2331",
        "engines make their groups for weights in different orders and wait for each other",
        (
            "tests/unit/test_weights_plan.py::test_buckets_cover_every_piece_once_in_order_and_hold_what_fits",
            "tests/unit/test_weights_plan.py::test_plan_digest_changes_with_every_field",
            "tests/unit/test_weights_broadcast.py::test_silent_or_dead_source_ends_the_fetch_within_its_deadline",
        ),
        not_yet="weight sync over NCCL, and with it such groups: each engine fetches by itself, under a deadline",
    ),
    Report(
        "9",
        "slime#1391, #1562",
        "after days every request fails: a proxy variable, or an engine that is dead and still asked",
        (
            f"{_LIFE}::test_a_proxy_variable_is_nothing_to_the_runs_own_traffic",
            f"{_CHECK}[proxy-warn-doesn't cover n1]",
            f"{_CHECK}[proxy-warn-the site file's proxy]",
            f"{_HOST}::test_a_lost_engine_costs_one_local_retry",
            f"{_HOST}::test_a_group_that_no_engine_can_play_fails",
            f"{_BUFFER}::test_failures_set_aside_but_a_lost_host_doesn_t",
        ),
    ),
    Report(
        "10",
        "slime#2176",
        "a slow judge holds up the end of over-sampling",
        (
            f"{_SAMPLER}::test_deadline_in_the_environment_truncates",
            f"{_HOST}::test_abort_and_reset_drop_what_is_in_flight",
            f"{_PEERS}::test_one_group_that_never_ends_holds_up_no_batch",
        ),
        not_yet="rewards from a service, with a deadline of their own: so far the environment gives them, under the "
        "trajectory's",
    ),
    Report(
        "11",
        "slime#1032, #1695, #1558",
        "after a restart steps count anew, or trainer and engine disagree for several steps",
        (
            f"{_BACKEND}::test_a_checkpoint_holds_the_moment_of_the_call",
            f"{_BACKEND}::test_another_world_size_reads_a_checkpoint",
            f"{_PURE}::test_a_restart_takes_over_what_was_owned_and_not_trained",
            "tests/unit/test_manifest.py::test_a_manifest_reads_back",
            "tests/slurm/test_run.py::test_a_run_survives_kills_and_trains_every_group_once",
        ),
    ),
    Report(
        "12",
        "slime#1136",
        "one very long sample makes a later step run out of memory",
        (
            f"{_PEERS}::test_the_longest_trajectory_is_reckoned_with_before_the_run",
            f"{_SAMPLER}::test_token_limit_is_never_exceeded",
            "tests/unit/test_packing.py::test_plan",
            "tests/unit/test_packing.py::test_limits_are_named",
        ),
        not_yet="log-probs aren't computed in chunks: the output head's memory is that of max_tokens_per_microbatch, "
        "which nobody holds against the GPU's",
    ),
    Report(
        "13",
        "SGLang#4096",
        "the group for weight updates hangs on a port that is taken or on a wrong interface",
        (
            f"{_LIFE}::test_a_listener_that_never_answers_costs_a_deadline",
            f"{_LIFE}::test_listeners_of_many_jobs_on_one_node_have_ports_of_their_own",
            "tests/unit/test_addresses.py::test_a_name_that_gives_no_address_is_refused_in_one_line",
            "tests/unit/test_multihomed.py::test_the_deadline_holds_for_all_addresses_together",
            "tests/unit/test_weights_broadcast.py::test_silent_or_dead_source_ends_the_fetch_within_its_deadline",
        ),
        not_yet="SGLang's own group: there is no SGLang adapter yet",
    ),
    Report(
        "14",
        "open-instruct#1431, ray#59551",
        "placement waits for ever; ports and folders of jobs on one node are the same",
        (
            f"{_PEERS}::test_folders_carry_attempt_term_and_incarnation",
            f"{_LIFE}::test_listeners_of_many_jobs_on_one_node_have_ports_of_their_own",
            "tests/unit/test_placement.py::test_allocations_that_do_not_fit",
            "tests/unit/test_joining.py::test_the_skew_may_be_all_of_the_deadline_but_no_more",
            "tests/unit/test_jobs.py::test_waiting_has_a_deadline",
        ),
    ),
)
