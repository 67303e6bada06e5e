"""Which tests are the long lane?

`make test` leaves these out and `make soak` makes them: whole searches, processes that are killed again and again, every page of
docs. What they hold is held in `make test` too, by fewer or smaller cases. An entry is a test, or one of its cases.
"""

SOAK = (
    "test_cli_plan.py::test_a_120_billion_parameter_model_fits_with_a_bf16_master_or_more_memory",
    "test_cli_plan.py::test_measurements_are_ranked_only_where_they_are_asked_for",
    "test_compare.py::test_a_faster_machine_is_never_ranked_below_a_slower_one",
    "test_compare.py::test_a_machine_is_ranked_by_what_its_own_plan_says",
    "test_compare.py::test_a_machine_twice_as_fast_in_everything_does_twice_the_tokens",
    "test_compare.py::test_machines_that_it_does_not_fit_come_last_with_the_reason_and_a_change_that_fits",
    "test_device_norms.py::test_the_search_squares_all_where_the_host_binds_and_else_what_the_step_would_wait_for",
    "test_docs.py::test_every_command_of_a_page_prints_what_the_page_shows[change-the-planner.md]",
    "test_docs.py::test_every_command_of_a_page_prints_what_the_page_shows[fine-tune-32b.md]",
    "test_failures.py::test_a_disk_that_is_full_at_any_moment_is_one_line_and_with_room_the_run_goes_on",
    "test_gpu_benchmark.py::test_a_tiny_run_goes_through_every_stage_and_one_that_fails_is_recorded_and_tried_again",
    "test_hostile.py::test_a_run_that_is_stopped_ends_with_one_line_and_only_whole_checkpoints[2-interrupted-130]",
    "test_hostile.py::test_a_tokenizer_on_which_its_library_panics_is_one_line",
    "test_kernels.py::test_a_function_is_compiled_where_its_bits_stay_and_runs_call_by_call_elsewhere",
    "test_kills.py::test_training_that_is_killed_three_times_goes_on_to_the_same_bits",
    "test_lane_thread.py::test_no_process_waits_for_such_a_thread_when_it_ends[ending-0]",
    "test_lane_thread.py::test_no_process_waits_for_such_a_thread_when_it_ends[raising-1]",
    "test_long_context.py::test_a_searched_plan_trains_a_long_context_on_a_device_that_would_not_hold_a_quarter_of_it",
    "test_long_steps.py::test_a_run_of_a_long_step_corrects_its_machine",
    "test_micro_batch.py::test_no_other_micro_batch_is_faster_by_more_than_half_a_percent[0]",
    "test_micro_batch.py::test_no_other_micro_batch_is_faster_by_more_than_half_a_percent[2]",
    "test_micro_batch.py::test_no_other_micro_batch_is_faster_by_more_than_half_a_percent[4]",
    "test_prefetch.py::test_a_stream_is_read_in_a_process_of_its_own_that_ends_when_the_run_is_killed",
    "test_remedy.py::test_more_memory_for_a_policy_that_was_asked_for_comes_with_a_micro_batch_that_suits_it",
    "test_resident_memory.py::test_after_300_steps_of_chats_of_any_length_what_was_resident_is_what_was_planned[joined]",
    "test_resident_memory.py::test_after_300_steps_of_chats_of_any_length_what_was_resident_is_what_was_planned[one]",
    "test_search.py::test_a_policy_whose_plan_is_too_long_keeps_its_bound",
    "test_search.py::test_every_change_that_is_named_makes_it_fit[gpt-oss-120b-h200-pcie5-None-1500000000000-64]",
    "test_search.py::test_every_change_that_is_named_makes_it_fit[qwen2.5-72b-rtx4090-server-None-None-8]",
    "test_search.py::test_the_answer_is_never_worse_than_a_static_candidate",
    "test_store.py::test_loading_saving_and_resuming_hold_no_more_than_one_tensor_besides_the_arenas[fp32]",
)
