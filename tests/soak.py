"""What does the long lane hold that the fast one does not?

`make test` takes a part and `make soak` the rest, or all again: whole searches, processes that are killed again and again, every
page of docs, every example that is drawn, every product of model types, dtypes and policies. What is held is held in `make test`
too, by fewer or smaller cases. An entry is a test, or one of its cases; one that names nothing fails `tests/house/test_lanes.py`.
"""

from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations

# In the long lane only; a shorter sibling holds the same promise in the fast one.
SOAK = (
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[0]",
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[10]",
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[20]",
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[30]",
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[40]",
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[50]",
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[70]",
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[80]",
    "test_adversary.py::test_no_plan_is_faster_than_a_bound[90]",
    "test_api.py::test_an_emulated_run_tells_the_time_of_the_machine_that_it_emulates",
    "test_check.py::test_every_survivor_is_of_a_family_that_is_explained",
    "test_check.py::test_no_mutant_survives_of_kind",
    "test_check.py::test_no_wrong_mutant_of_the_samples_survives",
    "test_cli_plan.py::test_a_120_billion_parameter_model_fits_with_a_bf16_master_or_more_memory",
    "test_cli_plan.py::test_a_schedule_that_was_asked_for_and_is_slower_than_another_says_so",
    "test_cli_plan.py::test_planning_wakes_no_torch",
    "test_compare.py::test_a_faster_machine_is_never_ranked_below_a_slower_one",
    "test_compare.py::test_a_machine_is_ranked_by_what_its_own_plan_says",
    "test_compare.py::test_a_machine_twice_as_fast_in_everything_does_twice_the_tokens",
    "test_compare.py::test_a_plan_too_long_to_write_is_no_misfit_and_no_other_machine_suffers_from_it",
    "test_compare.py::test_machines_that_it_does_not_fit_come_last_with_the_reason_and_a_change_that_fits",
    "test_compare.py::test_the_order_in_which_machines_are_given_does_not_matter",
    "test_compare.py::test_the_smallest_host_memory_fits_and_a_byte_less_does_not[None-free0]",
    "test_compare.py::test_the_smallest_host_memory_fits_and_a_byte_less_does_not[None-free1]",
    "test_compare.py::test_tiles_that_were_named_are_those_that_are_planned",
    "test_compare.py::test_what_binds_a_machine_and_whose_tokens_cost_least_can_be_read",
    "test_compare.py::test_what_has_no_price_says_so",
    "test_compare.py::test_where_the_device_is_too_small_no_host_memory_helps",
    "test_contention.py::test_on_a_gh200_the_optimizer_and_not_the_link_sets_the_smallest_batch_that_hides_everything",
    "test_cuda_machine.py::test_a_long_run_makes_no_event_and_no_stream_that_a_short_one_does_not",
    "test_cuda_machine.py::test_however_late_streams_are_the_bits_are_those_of_the_plain_loop[gemma2]",
    "test_cuda_machine.py::test_however_late_streams_are_the_bits_are_those_of_the_plain_loop[qwen3_moe]",
    "test_device_norms.py::test_the_search_squares_all_where_the_host_binds_and_else_what_the_step_would_wait_for",
    "test_disturbed_ranks.py::test_a_rank_that_stands_still_for_a_while_changes_nothing",
    "test_disturbed_ranks.py::test_half_a_checkpoint_of_two_ranks_is_passed_over_by_one_for_the_last_whole",
    "test_disturbed_ranks.py::test_where_the_disk_is_full_all_ranks_wait_and_end_when_told_and_what_was_saved_stands",
    "test_docs.py::test_every_command_of_a_page_prints_what_the_page_shows[change-the-planner.md]",
    "test_docs.py::test_every_command_of_a_page_prints_what_the_page_shows[fine-tune-32b.md]",
    "test_docs.py::test_every_command_of_a_page_prints_what_the_page_shows[which-machine.md]",
    "test_evaluation.py::test_training_is_the_same_to_the_bit_with_evaluations_in_between[gemma2]",
    "test_evaluation.py::test_training_is_the_same_to_the_bit_with_evaluations_in_between[mixtral]",
    "test_failures.py::test_a_disk_that_is_full_at_any_moment_is_one_line_and_with_room_the_run_goes_on",
    "test_failures.py::test_a_run_that_is_killed_at_any_moment_and_goes_on_ends_as_the_undisturbed_one[4-5]",
    "test_failures.py::test_a_run_that_is_told_to_end_saves_its_step_exits_with_0_and_the_next_goes_on_to_the_same_bits",
    "test_generation.py::test_drawn_tokens_are_among_the_likeliest_and_come_as_often_as_they_should",
    "test_gpu_benchmark.py::test_a_policy_that_changes_a_bit_fails_the_smoke_and_the_others_are_still_said",
    "test_gpu_benchmark.py::test_a_stage_over_its_limit_is_killed_with_all_that_it_started_and_the_next_still_runs",
    "test_gpu_benchmark.py::test_a_tiny_run_goes_through_every_stage_and_one_that_fails_is_recorded_and_tried_again",
    "test_hostile.py::test_a_run_that_is_stopped_ends_with_one_line_and_only_whole_checkpoints",
    "test_hostile.py::test_a_tokenizer_on_which_its_library_panics_is_one_line",
    "test_hostile.py::test_what_binds_a_step_that_is_full_of_nothing_is_what_waits",
    "test_hostile_files.py::test_a_plan_of_very_many_ops_is_answered",
    "test_hostile_files.py::test_many_published_runs_are_told_apart_in_no_time",
    "test_kernels.py::test_a_function_is_compiled_where_its_bits_stay_and_runs_call_by_call_elsewhere",
    "test_kills.py::test_training_that_is_killed_three_times_goes_on_to_the_same_bits",
    "test_long_context.py::test_a_long_context_is_trained_as_a_plain_loop_would_train_it",
    "test_long_context.py::test_a_searched_plan_trains_a_long_context_on_a_device_that_would_not_hold_a_quarter_of_it",
    "test_long_context.py::test_by_tiles_memory_grows_with_the_context_as_attention_and_one_layers_boundary_do[4096-12288]",
    "test_long_context.py::test_of_a_wider_mlp_by_tiles_a_long_context_feels_only_the_weights",
    "test_long_context.py::test_what_a_long_context_takes_is_what_is_planned_and_not_far_less",
    "test_long_steps.py::test_a_long_step_is_planned_checked_run_resumed_and_reported",
    "test_long_steps.py::test_a_run_of_a_long_step_corrects_its_machine",
    "test_long_steps.py::test_hundreds_of_micro_batches_are_performed_as_if_written_out",
    "test_memory.py::test_memory_does_not_grow_with_the_steps",
    "test_micro_batch.py::test_a_batch_that_nothing_divides_loses_nothing",
    "test_micro_batch.py::test_no_more_memory_makes_a_step_slower_than_the_gap_that_is_printed",
    "test_micro_batch.py::test_no_other_micro_batch_is_faster_by_more_than_half_a_percent",
    "test_prefetch.py::test_a_stream_is_read_in_a_process_of_its_own_that_ends_when_the_run_is_killed",
    "test_prefetch.py::test_workers_change_nothing_nothing_forks_and_one_that_is_killed_is_one_line",
    "test_probe_cuda.py::test_what_does_not_fit_the_device_or_takes_too_long_is_left_out",
    "test_recalibrate.py::test_a_real_run_on_this_cpu_corrects_its_profile",
    "test_recalibrate.py::test_noise_of_ops_does_not_hide_what_is_wrong",
    "test_recalibrate.py::test_updates_that_are_done_again_because_norms_are_clipped_are_no_slow_machine",
    "test_remedy.py::test_more_memory_for_a_policy_that_was_asked_for_comes_with_a_micro_batch_that_suits_it",
    "test_remedy.py::test_no_plan_has_more_ops_than_the_count_that_plans_are_refused_by",
    "test_report.py::test_a_plan_of_ten_thousand_ops_makes_a_page_of_less_than_two_megabytes",
    "test_report_browser.py::test_keys_zoom_move_and_show_the_whole_step_again",
    "test_resident.py::test_compare_has_a_line_for_each_machine_that_is_better_without_streaming",
    "test_resident_memory.py::test_after_150_steps_of_chats_of_any_length_what_was_resident_is_what_was_planned",
    "test_run_folders.py::test_a_checkpoint_is_a_model_to_begin_from_as_the_refusal_of_another_schedule_says",
    "test_run_settings.py::test_a_schedule_goes_on_where_a_resumed_run_left_it",
    "test_run_settings.py::test_the_profile_that_a_run_shows_is_one_that_plans_are_made_with",
    "test_run_settings.py::test_what_is_looked_at_changes_no_bit_of_training",
    "test_run_signals.py::test_a_damaged_checkpoint_is_refused_by_file_and_the_one_before_it_is_offered_and_works",
    "test_search.py::test_a_fixed_policy_is_the_answer",
    "test_search.py::test_a_policy_whose_plan_is_too_long_keeps_its_bound",
    "test_search.py::test_every_change_that_is_named_makes_it_fit",
    "test_search.py::test_the_answer_is_never_worse_than_a_static_candidate",
    "test_search.py::test_the_answer_passes_the_checker_with_its_claim_and_is_the_same_twice[qwen2.5-7b-gh200-4096-16]",
    "test_search.py::test_the_search_finds_what_brute_force_finds_where_what_is_saved_has_to_leave",
    "test_search.py::test_where_only_long_plans_fit_one_is_found_or_refused_in_one_line",
    "test_store.py::test_loading_saving_and_resuming_hold_no_more_than_one_tensor_besides_the_arenas",
    "test_store.py::test_what_computing_frees_is_held_neither_by_holes_nor_after_work_that_is_done_once",
    "test_tiles.py::test_tiles_under_any_policy_are_the_plain_loop_over_tiles_to_the_last_bit[mistral]",
    "test_tiles.py::test_tiles_under_any_policy_are_the_plain_loop_over_tiles_to_the_last_bit[qwen2]",
    "test_tiles.py::test_tiles_under_any_policy_are_the_plain_loop_over_tiles_to_the_last_bit[qwen3]",
    "test_token_cache.py::test_another_tokenizer_or_template_makes_other_tokens",
    "test_which.py::test_a_plan_costs_the_same_in_plan_compare_and_report",
    "test_uncertainty.py::test_the_interval_is_that_of_plain_sampling",
    "test_unlike_ranks.py::test_a_rank_that_reads_something_else_is_refused_by_name_and_nothing_is_left[model]",
    "test_unlike_ranks.py::test_a_rank_that_reads_something_else_is_refused_by_name_and_nothing_is_left[no data]",
    "test_unlike_ranks.py::test_a_rank_that_reads_something_else_is_refused_by_name_and_nothing_is_left[no weights]",
    "test_unlike_ranks.py::test_ranks_with_plans_of_another_number_meet_and_say_so[1]",
    "test_unlike_ranks.py::test_the_memory_of_a_host_must_be_enough_for_all_its_ranks[0]",
    "test_unlike_ranks.py::test_where_the_first_lacks_something_the_others_end_with_it",
    "test_validate.py::test_a_run_that_the_fit_has_not_seen_is_predicted_within_the_target",
)

# Of these, `make test` draws a share of the examples and `make soak` draws them all.
DRAWN = (
    "test_check.py::test_a_mutant_that_passes_trains_exactly_as_the_original",
    "test_check.py::test_a_plan_changed_in_many_ways_passes_or_is_a_plan_error",
    "test_check.py::test_an_arena_missing_added_moved_or_of_another_length_is_refused",
    "test_check.py::test_an_honest_claim_passes",
    "test_check.py::test_clocks_order_two_ops_exactly_when_a_path_leads_from_one_to_the_other",
    "test_check.py::test_every_plan_of_the_planner_passes",
    "test_check.py::test_memory_is_enough_at_the_peak_and_too_little_one_byte_below",
    "test_check.py::test_the_oracle_agrees_that_they_are_free_of_races",
    "test_contention.py::test_work_is_conserved_at_every_moment",
    "test_cost.py::test_blocks_that_differ_in_names_alone_cost_the_same",
    "test_cuda_machine.py::test_however_late_streams_are_the_bits_are_those_of_the_plain_loop",
    "test_data.py::test_a_step_sees_the_same_whatever_was_asked_before",
    "test_data.py::test_in_order_the_steps_spell_the_documents_epoch_after_epoch",
    "test_device_norms.py::test_no_policy_is_faster_than_a_relaxation_that_may_square_gradients",
    "test_exactness.py::test_after_an_op_has_failed_the_same_machine_does_the_step_again_as_if_nothing_had_been",
    "test_exactness.py::test_streaming_a_model_under_any_policy_is_the_plain_loop_to_the_last_bit",
    "test_executor.py::test_all_lanes_end_after_the_same_step_when_somebody_asks_for_the_end",
    "test_executor.py::test_every_op_of_every_step_runs_once_after_what_it_waits_for",
    "test_failures.py::test_an_exception_anywhere_stops_all_lanes_is_named_and_the_run_goes_on_from_its_checkpoint",
    "test_failures.py::test_what_is_not_a_number_skips_the_step_and_touches_neither_weights_nor_moments_nor_counters",
    "test_failures.py::test_what_is_not_a_number_stops_the_run_with_the_name_of_a_parameter",
    "test_faster.py::test_a_machine_so_many_times_as_fast_in_everything_takes_that_much_less",
    "test_footprint.py::test_a_plan_that_fits_a_machine_is_accepted_by_a_run_there_and_by_none_with_a_byte_less",
    "test_forward_plan.py::test_everything_lies_in_the_arenas_of_training_and_fits_there",
    "test_frozen.py::test_any_policy_gives_the_same_bits",
    "test_long_steps.py::test_every_repetition_runs_once_after_what_it_waits_for",
    "test_lower.py::test_a_pass_adds_what_it_is_for_and_leaves_all_else_as_it_was",
    "test_lower.py::test_dtypes_decide_how_large_slots_are_and_never_which_ops_there_are",
    "test_plan.py::test_a_plan_is_read_back_from_its_file",
    "test_plan.py::test_a_plan_is_read_back_from_its_text",
    "test_plan.py::test_text_and_json_hold_the_same_ops",
    "test_recalibrate.py::test_the_corrected_profile_never_predicts_the_step_worse",
    "test_repetition.py::test_a_folded_mutant_passes_only_if_it_passes_written_out",
    "test_repetition.py::test_a_repeating_step_takes_as_long_as_the_step_written_out",
    "test_repetition.py::test_the_repetitions_that_a_timeline_keeps_are_those_of_the_step_written_out",
    "test_repetition.py::test_written_out_it_has_the_ops_of_the_plan_that_was_never_folded",
    "test_report_step.py::test_activations_are_held_from_their_forward_to_their_backward_and_no_longer",
    "test_report_step.py::test_no_more_is_held_than_is_reserved",
    "test_report_step.py::test_the_step_that_is_drawn_holds_every_op_once",
    "test_report_step.py::test_what_memory_holds_is_what_the_next_use_of_every_slot_says",
    "test_resident.py::test_a_step_is_what_one_computes_by_hand_over_every_choice_of_activations",
    "test_search.py::test_no_plan_is_faster_than_its_bounds",
    "test_search.py::test_no_policy_of_a_family_is_faster_than_its_relaxation",
    "test_search.py::test_the_search_finds_what_brute_force_finds",
    "test_simulate.py::test_slowing_any_ops_never_finishes_sooner",
    "test_tiles.py::test_tiles_under_any_policy_are_the_plain_loop_over_tiles_to_the_last_bit",
    "test_token_cache.py::test_what_is_kept_is_what_was_made",
    "test_uncertainty.py::test_percentiles_are_in_order_and_a_seed_gives_them_again",
    "test_uncertainty.py::test_where_all_speeds_are_one_doubt_the_interval_is_its_spread",
    "test_uncertainty.py::test_wider_spreads_make_a_wider_interval",
    "test_uncertainty.py::test_without_spreads_the_interval_is_the_prediction",
    "test_waterfall.py::test_a_sensitivity_is_the_plan_simulated_again_with_a_tenth_more",
    "test_waterfall.py::test_on_a_machine_where_only_computing_takes_time_the_step_is_computing",
    "test_waterfall.py::test_recompute_is_what_is_computed_a_second_time",
    "test_waterfall.py::test_what_is_free_has_no_part_in_the_step",
)
SHARE = 7  # one in so many: a prime, so that no value of a product of parameters is the one that is always taken
FEWEST = 2

# Of these, `make test` takes the first case and then one in SHARE, and `make soak` the others.
SOME = (
    "test_abridged.py::test_a_waterfall_sensitivities_and_an_interval_are_those_of_the_step_written_out",
    "test_adapters.py::test_a_replay_saves_what_the_plan_says_and_gives_the_gradients_of_a_plain_backward",
    "test_adapters.py::test_an_evaluation_uses_adapters_drops_nothing_and_changes_nothing",
    "test_adversary.py::test_groups_smaller_than_the_step_have_true_bounds",
    "test_api.py::test_what_is_no_batch_is_named_and_nothing_hangs",
    "test_background.py::test_a_disk_that_fills_up_meanwhile_puts_the_save_off_and_training_goes_on",
    "test_background.py::test_a_run_goes_on_to_the_same_bits_under_another_plan_and_on_another_machine",
    "test_background.py::test_copies_never_take_more_memory_than_they_may",
    "test_background.py::test_what_is_written_in_the_background_is_what_is_written_while_all_lanes_are_idle",
    "test_background.py::test_without_the_gate_the_law_would_be_seen_to_be_broken",
    "test_chat.py::test_a_hostile_template_is_one_line",
    "test_chat.py::test_the_answers_and_their_ends_are_learned",
    "test_cli_plan.py::test_a_policy_that_cannot_be_is_refused",
    "test_cli_plan.py::test_the_schedule_of_another_system_can_be_asked_for",
    "test_cuda_machine.py::test_events_between_no_two_lanes_may_be_left_out",
    "test_data_apart.py::test_a_stream_of_them_is_resumed_anywhere",
    "test_device_norms.py::test_a_step_whose_sums_are_not_finite_is_skipped_without_a_trace",
    "test_device_norms.py::test_the_host_sums_squares_of_nothing_but_tied_weights",
    "test_documents.py::test_memory_stays_within_what_the_plan_books_and_a_little_more_where_activations_are_kept",
    "test_documents.py::test_several_sequences_in_a_micro_batch_and_mlps_by_tiles_change_nothing_of_that",
    "test_documents.py::test_streams_that_dawdle_make_no_difference",
    "test_documents.py::test_whatever_is_kept_streamed_or_computed_again_the_bits_are_those_of_the_plain_loop",
    "test_evaluation.py::test_streams_that_dawdle_evaluate_and_train_the_same",
    "test_exactness.py::test_a_backward_finds_weights_and_input_in_whichever_slots_they_are_by_then",
    "test_exactness.py::test_a_smaller_last_micro_batch_is_the_plain_loops",
    "test_exactness.py::test_dropout_is_the_same_whether_kept_recomputed_or_reordered",
    "test_exactness.py::test_every_combination_of_dtypes_ties_and_groups_is_the_plain_loop",
    "test_failures.py::test_a_machine_that_goes_on_has_forgotten_the_step_in_which_it_failed",
    "test_frozen.py::test_dtypes_and_uneven_micro_batches_change_nothing",
    "test_frozen.py::test_every_policy_gives_the_same_bits",
    "test_frozen.py::test_so_it_is_where_what_is_trained_lies_on_the_device",
    "test_frozen.py::test_streaming_is_the_plain_loop_to_the_bit_whatever_is_trained",
    "test_frozen.py::test_tables_and_heads_are_trained_or_not_tied_or_not",
    "test_frozen.py::test_weights_that_come_packed_are_computed_with_as_what_they_mean",
    "test_generation.py::test_every_plan_and_lateness_says_the_same",
    "test_generation.py::test_the_likeliest_tokens_are_those_of_transformers",
    "test_host_never_waits.py::test_compute_never_waits_for_the_device_but_where_experts_are_visited_one_by_one",
    "test_host_never_waits.py::test_the_links_lanes_only_copy_between_arenas_and_nobody_waits_for_it",
    "test_hostile.py::test_a_batch_beyond_all_measure_is_answered",
    "test_hostile.py::test_a_disk_that_is_full_leaves_nothing_half_written",
    "test_hostile.py::test_standard_output_that_is_full_is_one_line",
    "test_hostile_commands.py::test_a_command_takes_a_changed_file_or_refuses_it_in_one_line",
    "test_hostile_files.py::test_a_changed_file_is_taken_or_refused_in_one_line",
    "test_hostile_files.py::test_a_fault_in_our_own_readers_is_found",
    "test_hostile_files.py::test_a_good_file_is_taken",
    "test_hostile_files.py::test_a_plan_of_more_parts_than_any_model_is_refused",
    "test_hostile_files.py::test_a_reader_that_fails_is_found_out",
    "test_hostile_files.py::test_no_bit_of_a_tables_footer_ends_the_process",
    "test_hostile_files.py::test_without_the_fault_the_same_files_show_nothing",
    "test_kernels.py::test_any_policy_trains_the_bits_of_the_plain_loop_with_its_kernels",
    "test_kills.py::test_a_run_that_does_not_go_on_as_it_should_is_found_out",
    "test_kills.py::test_whatever_differs_from_the_undisturbed_run_is_seen",
    "test_lane_thread.py::test_no_process_waits_for_such_a_thread_when_it_ends",
    "test_lies.py::test_a_lie_is_noticed_unless_nobody_can_know",
    "test_lies.py::test_whatever_plan_is_asked_for_its_claim_holds",
    "test_long_steps.py::test_training_in_repetitions_is_the_plain_loop_bit_for_bit",
    "test_looks.py::test_lanes_are_drained_to_evaluate_every_so_many_steps_and_at_the_end",
    "test_looks.py::test_who_asks_for_the_end_during_an_evaluation_leaves_it_and_its_state_is_saved_once",
    "test_memory.py::test_a_long_run_holds_no_more_than_a_short_one",
    "test_micro_batch.py::test_a_size_that_was_named_stays",
    "test_micro_batch.py::test_greedy_plans_are_right_and_as_long_as_is_said_of_them",
    "test_micro_batch.py::test_of_the_candidates_the_one_whose_greedy_plan_is_simulated_fastest_is_chosen",
    "test_micro_batch.py::test_proposing_twice_proposes_the_same_whatever_stood_there",
    "test_micro_batch.py::test_sizes_that_fit_fit_just_where_the_fastest_ones_do",
    "test_mlp_tiles.py::test_a_backward_by_tiles_stays_within_its_transient_bytes_and_not_far_below",
    "test_mlp_tiles.py::test_each_tile_is_computed_again_once_in_backward",
    "test_optimizer.py::test_training_is_the_same_however_many_workers_share_an_op",
    "test_outside.py::test_of_every_type_that_is_accepted_loss_and_gradients_are_those_of_transformers_own_forward",
    "test_probe_cuda.py::test_a_cliff_is_named_in_the_summary_and_told_in_a_line_and_no_other_is",
    "test_probe_cuda.py::test_a_machine_as_its_parts_promise_has_no_cliffs",
    "test_recalibrate.py::test_a_machine_that_is_otherwise_than_its_profile_says_is_found_out",
    "test_recalibrate.py::test_a_run_that_went_as_predicted_changes_nothing",
    "test_recalibrate.py::test_whatever_is_wrong_the_step_is_right_afterwards",
    "test_remedy.py::test_no_change_resets_a_size_that_the_user_named",
    "test_remedy.py::test_the_missing_bytes_and_the_change_of_memory_are_those_of_the_nearest_policy",
    "test_replay.py::test_a_long_run_holds_no_more_than_a_short_one_whatever_it_saves",
    "test_replay.py::test_a_step_keeps_and_makes_no_more_than_the_plan_says_and_not_far_less",
    "test_report.py::test_a_claim_that_is_none_is_refused_by_its_place",
    "test_report_browser.py::test_nothing_is_wider_than_the_window",
    "test_report_browser.py::test_numbers_that_cannot_be_told_apart_hold_up_no_browser",
    "test_report_files.py::test_a_timeline_that_cannot_be_is_refused_in_one_line",
    "test_resident.py::test_where_host_and_device_are_one_memory_there_is_no_such_figure",
    "test_retention.py::test_a_run_that_is_killed_while_it_deletes_leaves_nothing_that_passes_for_whole",
    "test_run.py::test_every_policy_leaves_the_same_bytes",
    "test_run_settings.py::test_a_prompt_is_gone_on_with_by_who_learns_text_and_answered_by_who_learns_conversations",
    "test_run_settings.py::test_what_is_said_wrongly_of_a_run_is_one_line_and_leaves_nothing",
    "test_run_signals.py::test_a_second_signal_ends_at_once",
    "test_run_signals.py::test_a_signal_finishes_the_step_saves_and_says_so_and_the_rest_is_as_if_there_had_been_none",
    "test_run_signals.py::test_a_signal_while_the_end_is_looked_at_is_heeded_and_that_look_and_what_follows_are_missing",
    "test_search.py::test_a_search_that_may_simulate_nothing_answers_with_the_best_baseline_and_a_true_gap",
    "test_settling.py::test_a_speculation_is_taken_by_exchanging_places_or_left_and_either_way_it_is_the_plain_loop",
    "test_settling.py::test_a_step_with_a_gradient_that_is_not_finite_is_skipped_without_a_trace",
    "test_store.py::test_no_arena_moves_and_copies_and_optimizer_fault_no_page_in_again",
    "test_sum_groups.py::test_eight_micro_batches_in_groups_are_the_plain_loop_s_tree",
    "test_tiles.py::test_a_step_by_tiles_keeps_and_makes_no_more_than_the_plan_says_and_not_far_less",
    "test_tiles.py::test_nothing_of_a_tile_outlives_its_step_even_one_that_fails",
    "test_tiles.py::test_of_many_tiles_the_gradients_are_added_in_ascending_order",
    "test_tiles.py::test_one_tile_for_all_tokens_is_no_tile_to_the_last_bit_and_smaller_ones_only_round",
    "test_tiles.py::test_the_backward_of_a_tile_finds_weights_in_whichever_slot_they_are_by_then",
    "test_tiles.py::test_the_products_that_are_run_by_tiles_are_those_of_the_plan",
    "test_trainer.py::test_a_run_that_is_saved_stopped_and_resumed_under_another_plan_is_the_unbroken_one",
    "test_trainer.py::test_a_state_that_is_not_this_runs_is_refused_before_anything_is_changed",
    "test_validate.py::test_the_shipped_constants_are_those_that_the_fit_finds",
    "test_workload.py::test_so_are_those_of_layers_that_are_trained_in_part",
    "test_workload.py::test_the_loss_by_tiles_stays_within_the_heads_transient_bytes",
    "test_workload.py::test_their_backward_stays_within_its_transient_bytes_too",
)

# Of these, `make test` takes cases with which every pair of parameters' values occurs, or every value, and `make soak` the others.
# Model types whose layers take the same paths count as one value.
ALIKE = {"mistral": "llama", "qwen2": "llama", "qwen3": "llama", "qwen3_moe": "mixtral"}
PAIRS = (
    "test_documents.py::test_wherever_a_document_stands_and_whatever_it_is_packed_with_its_results_and_gradients_are_the_same_bits",
    "test_mlp_tiles.py::test_the_products_calls_and_traffic_of_a_forward_by_tiles_are_those_of_the_loop",
    "test_workload.py::test_a_layers_backward_stays_within_its_transient_bytes_and_not_far_below",
    "test_workload.py::test_attention_counts_the_pairs_that_the_models_own_mask_lets_through",
    "test_workload.py::test_calls_and_traffic_of_a_layer_are_those_of_the_real_one",
    "test_workload.py::test_kept_bytes_are_what_autograd_saves",
    "test_workload.py::test_rows_of_experts_keep_what_autograd_saves_of_them",
)
VALUES = (
    "test_activation_offload.py::test_so_are_experts_in_one_call_or_in_a_loop",
    "test_activation_offload.py::test_training_is_the_plain_loop_to_the_bit_wherever_activations_wait",
    "test_checkpoint.py::test_transformers_loads_the_checkpoint_of_every_type",
    "test_device_norms.py::test_a_model_normed_on_the_device_is_the_plain_loop_to_the_last_bit",
    "test_device_state.py::test_training_is_the_plain_loop_to_the_bit_wherever_state_lies",
    "test_documents.py::test_loss_and_gradients_are_those_of_the_documents_alone",
    "test_evaluation.py::test_of_the_same_batch_it_is_the_loss_of_the_training_step_to_the_bit",
    "test_host_never_waits.py::test_of_every_type_that_we_know_the_model_is_asked_for_masks_and_positions_twice",
    "test_kernels.py::test_kept_and_transient_bytes_of_fused_layers_are_those_of_real_ones",
    "test_kernels.py::test_losses_and_norms_are_those_of_eager_kernels_within_rounding",
    "test_kernels.py::test_pointwise_kernels_change_no_bit_of_a_training",
    "test_recompute.py::test_a_backward_with_recompute_stays_within_its_transient_bytes_and_not_far_below",
    "test_recompute.py::test_rows_of_experts_stay_within_it_where_nothing_else_is_large",
    "test_recompute.py::test_what_runs_again_and_what_is_saved_is_what_checkpointing_runs_and_saves",
    "test_repetition.py::test_mutants_of_a_folded_plan_are_caught_or_harmless",
    "test_replay.py::test_a_replay_saves_runs_and_gives_what_the_checkpointing_of_torch_does",
    "test_tiles.py::test_a_layers_forward_by_tiles_makes_the_calls_that_are_counted",
    "test_trainer.py::test_a_run_that_was_asked_to_end_saves_the_step_in_progress_and_goes_on_to_the_same_bits",
)


def long_lane(cases: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Of the cases by name, each with its parameters, those that the fast lane leaves to the long one."""
    of_test: dict[str, dict[str, Mapping[str, object]]] = {}
    for name, parameters in cases.items():
        if not {name, name.partition("[")[0]} & {*SOAK}:
            of_test.setdefault(name.partition("[")[0], {})[name] = parameters
    long = cases.keys() - {name for of in of_test.values() for name in of}
    for test, of in of_test.items():
        if test in SOME:
            long |= of.keys() - {*list(of)[::SHARE]}
        elif test in PAIRS or test in VALUES:
            long |= of.keys() - covering(of, 2 if test in PAIRS else 1)
    return long


def share(n_examples: int) -> int:
    """How many of so many examples the fast lane draws."""
    return min(n_examples, max(n_examples // SHARE, FEWEST))


def covering(cases: Mapping[str, Mapping[str, object]], strength: int) -> set[str]:
    """Names of cases in which every combination of so many parameters' values occurs that occurs in any; not many more than needed.

    A parameter that is a tuple counts as its elements, a model type as any that is like it.
    """
    wanted = {name: {*combinations(_values(values), strength)} for name, values in cases.items()}
    missing = set().union(*wanted.values())
    chosen = set()
    while missing:
        best = max(wanted, key=lambda name: len(wanted[name] & missing))  # of several, the first
        chosen.add(best)
        missing -= wanted[best]
    return chosen


def _values(parameters: Mapping[str, object]) -> Iterator[Hashable]:
    for name, value in parameters.items():
        for i, element in enumerate(value if isinstance(value, tuple) else (value,)):
            yield name, i, repr(ALIKE.get(element, element) if isinstance(element, str) else element)
