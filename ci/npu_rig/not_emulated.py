"""Tests that the emulated device is too small or too slow for, or lacks a part for, each with its reason; they wait for a real
one.

The plugin shows them as xfailed, not run. Keys are beginnings of test ids.
"""

MEMORY = "holds several tensors of {} GB, more than a machine that emulates the device has; a 910B has 64"
HOURS = "runs an hour on a device, days on the emulated one"
LONG = "every program runs in turn on one CPU core, for a size that is a device's"
HCCL = "gloo takes no tensors of an npu, and the emulated device has no hccl"
PROFILER = "the emulated device tells the profiler of launches, but of no kernels' times"
SPARSE = "the emulated device has no sparse tensors"
NEGATIVE = "torch_npu 2.13 leaves the sign out of every operation on a negative view, resolve_neg() and cpu() too"
DYNAMO = "PyTorch's tracer asks the emulated device's streams for what they lack"

_DELTA = "tests/ops/test_gated_delta_rule_device.py::"
NOT_EMULATED = {
    "tests/ops/test_causal_conv1d.py::test_grid_of_65536_tasks": MEMORY.format(4.3),
    "tests/ops/test_causal_conv1d.py::test_more_than_two_to_the_31_elements": MEMORY.format(4.9),
    "tests/ops/test_gated_rms_norm.py::test_more_than_two_to_the_31_elements": MEMORY.format(4.3),
    "tests/test_demo.py::test_command_trains_the_same_way_eager_and_captured": LONG,
    "tests/test_soak.py::test_twenty_thousand_calls_of_a_layer": HOURS,
    _DELTA + "test_channel_gates_of_long_sequences": LONG,
    _DELTA + "test_long_sequences": LONG,
    _DELTA + "test_the_shape_that_peers_are_measured_at": LONG,
    _DELTA + "test_as_many_sequences_as_a_grid_axis_holds": LONG,
    "tests/test_price.py::test_layers_of_a_model_hold_their_price[gdn-8192x64]": LONG,
    "tests/test_price.py::test_layers_of_a_model_hold_their_price[kda-8192x64]": LONG,
    "tests/test_capture_ddp.py::test_captured_and_eager_processes_agree": HCCL,
    "tests/test_capture_refusals.py::test_wrappers_for_many_processes_are_refused_inside": HCCL,
    "tests/test_examples.py::test_context_parallel_on_one_rank": HCCL,
    "tests/bench/test_kernel_times.py::test_kernel_times_add_up_to_less_than_the_call_takes": PROFILER,
    "tests/bench/test_sections.py::test_layers_are_measured_eager_captured_and_replayed": PROFILER,
    "tests/test_errors.py::test_a_sparse_tensor_is_named": SPARSE,
    "tests/test_capture_gradients.py::test_gradients_without_rows_are_refused_and_the_slot_is_free_again[sparse]": SPARSE,
    "tests/ops/test_contract.py::test_negative_views_are_read_as_what_they_stand_for": NEGATIVE,
    "tests/ops/test_gated_rms_norm.py::test_negative_views_are_read_as_what_they_stand_for": NEGATIVE,
    "tests/test_traced.py::test_a_compiled_layer_is_the_layer": DYNAMO,
}
