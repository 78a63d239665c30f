"""`make test` takes a sample of the longest tables of cases, always the same; FUSEGRAD_TESTS=all takes them all."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

# Before the import, which reads it. Captures are counted: what another test left on disk must not serve.
os.environ.setdefault("FUSEGRAD_STORE", "0")

import fusegrad

for _name in fusegrad.__all__:  # all modules are there before a test exchanges something in one
    getattr(fusegrad, _name)

ONE_IN = {
    "streams/test_bins.py": 2,
    "docs/test_exercises.py": 3,
    "codegen/test_work_by_steps.py": 3,
    "streams/test_decode.py": 14,
    "streams/test_text.py": 2,
    "streams/test_masks_not_saved.py": 9,
    "exporting/test_vmap.py": 12,
    "slabs/test_slab_settings.py": 6,
    "runtime/functorch/test_under_torch_func.py": 8,
    "runtime/commands/test_start.py": 2,
    "streams/test_plain_functions.py": 12,
    "streams/test_moving_extremes.py": 3,
    "codegen/test_online_sums.py": 2,
    "exporting/test_module.py": 21,
    "distributed/test_ranks.py": 40,
    "loops/test_loops.py": 3,
    "loops/test_layouts.py": 2,
    "loops/test_derived_backwards.py": 12,
    "loops/test_around.py": 3,
    "loops/test_divided_sums.py": 20,
    "loops/test_between.py": 9,
    "codegen/test_mixed_axes.py": 2,
    "contract/test_grad_mode.py": 6,
    "contract/test_torch_func.py": 2,
    "contract/test_state_between_calls.py": 2,
    "contract/test_opaque_forward.py": 2,
    "contract/test_hidden_state.py": 2,
    "docs/test_in_a_browser.py": 2,
    "benchmarks/test_losses.py": 2,
    "benchmarks/test_limits.py": 16,
    "benchmarks/test_correctness.py": 14,
    "benchmarks/test_needs.py": 104,
    "benchmarks/test_streams.py": 18,
    "benchmarks/test_flex_kernels.py": 8,
    "compose/test_hessian.py": 27,
    "compose/test_grad_grad_grad.py": 27,
    "compose/test_jvp_grad.py": 22,
    "compose/test_dual_numbers.py": 14,
    "compose/test_jacobians.py": 14,
    "compose/test_linearize.py": 14,
    **{f"compose/test_{name}.py": 9 for name in (
        "eager", "finite_differences", "grad_vmap", "jvp_vmap", "stacked", "transpose", "vmap", "vmap_grad", "vmap_jvp",
    )},
    "codegen/test_switches.py": 8,
    "codegen/test_chunks_of_time.py": 12,
    "codegen/test_with_vectors.py": 9,
    "loops/test_chunks_of_time.py": 14,
    "compose": 9,
    "conformance/test_conformance.py": 18,
    "contract/test_wrong_backwards.py": 6,
    "cpp": 3,
    "distributed/test_parts.py": 30,
    "exporting/test_hostile_names.py": 27,
    "exporting/test_any_width.py": 26,
    "gallery/test_in_graphs.py": 52,
    "loops/test_fixed.py": 2,
    "loops/test_nested.py": 6,
    "gallery": 68,
    "loops/test_exports.py": 9,
    "loops/test_round_trips.py": 9,
    "loops/test_states.py": 3,
    "slabs/test_chunks_by_hand.py": 6,
    "codegen/test_selected_sums.py": 3,
    "loops/test_random_loops.py": 18,
    "suite/test_proved_on_targets.py": 92,
    "gpu": 30,
    "models": 12,
    "interop/test_operators.py": 30,
    "interop/test_torch_compile.py": 3,
    "interop": 3,
    "runtime/functorch/test_per_lane.py": 6,
    "runtime/bisect/test_bisect.py": 9,
    "runtime/persistence/test_stored.py": 3,
    "runtime/execution/test_switches.py": 6,
    "runtime/specialize/test_transitions.py": 14,
    "pretended_gpu/test_functions.py": 60,
    "pretended_gpu/test_calls.py": 40,
    "pretended_gpu/test_on_amd.py": 40,
    "loops/test_suite_values.py": 40,
    "loops/test_suite_figures.py": 80,
    "loops/test_suite_lengths.py": 2,
    "loops/test_stacks.py": 6,
    "loops/test_multiples.py": 3,
    "loops/test_blocks.py": 3,
    "streams/test_streams.py": 195,
    "slabs/test_slabs.py": 14,
    "slabs/test_slab_figures.py": 2,
    "streams/test_edges.py": 135,
    "streams/test_registers.py": 10,
    "streams/test_many_styles.py": 90,
    "streams/test_stream_programs.py": 57,
    "streams/test_stream_compositions.py": 9,
    "streams/test_comparisons.py": 36,
    "suite/test_derived.py": 3,
    "suite/test_suite.py": 21,
    "suite/test_targets.py": 21,
    "codegen/test_layout.py": 8,
    "codegen/test_bodies.py": 8,
    "codegen/test_primitives.py": 9,
    "codegen/test_proofs_of_emitted_streams.py": 51,
    "codegen/test_proofs_of_streams.py": 15,
    "codegen/test_divided_axes.py": 15,
    "codegen/test_random_graphs.py": 10,
    "codegen/test_row_pieces.py": 44,
    "trust/test_injection.py": 38,
    "runtime/check/test_trial.py": 2,
    "trust/test_determinism.py": 69,
    "trust/test_pairs.py": 21,
    "suite/test_linearity.py": 2,
    "training/test_training.py": 45,
    "trust/numerics/test_numerics_page.py": 14,
    "trust/test_threads.py": 3,
    "trust/test_processes.py": 14,
    "trust/test_programs_at_once.py": 14,
    "trust/test_environments.py": 42,
    "trust/test_nothing_is_kept.py": 285,
    "trust/test_sources.py": 3,
    "trust/test_proofs.py": 9,
    "trust/test_counterexamples.py": 12,
    "trust/test_no_counterexamples.py": 195,
    "examples/test_examples.py": 2,
    "runtime/functorch/test_lanes.py": 3,
    "streams/test_residuals.py": 2,
    "runtime/commands/test_commands.py": 3,
    "runtime/execution/test_random.py": 3,
    "runtime/execution/test_products.py": 3,
    "ir/loops": 2,
    "trust/test_stream_counterexamples.py": 9,
}  # fmt: skip
"""Files and folders by how many cases of a test stand for one that is taken; of every test one is, at least."""
WHOLE = ("test_laws.py", "test_layout.py", "test_rooms.py")
"""Files of which every case is taken."""
THIN = 3
"""Of all others every so manieth: a sample takes less than 20 minutes on two slow cores."""
LEFT = (
    "benchmarks/test_gpu_day_rehearsal.py",
    "codegen/test_row_pieces.py::test_the_same_kernel_at_other_sizes",
    "exporting/test_any_width.py::test_derivatives_have_any_width_too",
    "exporting/test_any_width.py::test_names_are_examples_like_numbers",
    "runtime/commands/test_command_examples.py::test_every_example_is_checked_exported_and_profiled",
    "codegen/test_proofs_of_emitted_streams.py",
    "compose/test_norm_swiglu.py::test_the_hessian_takes_the_same_kernels_for_every_size_and_batch",
    "contract/test_split.py::test_inductor_compiles_the_segments",
    "docs/test_notebook.py::test_its_cells_run",
    "everywhere/test_everywhere.py::test_without_the_option_the_plugin_changes_nothing",
    "examples/test_demo.py::test_attention_as_one_function",
    "exporting/test_any_width.py::test_a_limit_is_stated_and_checked",
    "exporting/test_any_width.py::test_a_version_is_the_kernels_of_each_of_its_blocks",
    "exporting/test_any_width.py::test_sizes_are_compiled_in_by_either_name",
    "exporting/test_any_width.py::test_sizes_that_nothing_has_are_refused_by_name",
    "exporting/test_module.py::test_forward_mode_is_the_compiled_one",
    "exporting/test_module.py::test_heads_in_another_ratio_are_refused",
    "exporting/test_module.py::test_its_own_test_finds_a_wrong_kernel",
    "exporting/test_module.py::test_other_sizes_and_constants_are_refused_by_name",
    "exporting/test_vmap.py::test_every_composition_gives_what_the_compiled_class_gives",
    "interop/test_export.py::test_another_process_loads_random_numbers",
    "loops/test_exports.py::test_an_export_is_right_or_refuses",
    "loops/test_multiples.py::test_kernels",
    "loops/test_multiples.py::test_one_graph_serves_all_such_lengths",
    "loops/test_multiples.py::test_transforms",
    "profiling/test_profile.py::test_inductor_is_counted_beside_eager",
    "runtime/commands/test_commands.py::test_export_of_derivatives",
    "slabs/test_slab_settings.py::test_of_a_process_and_on_disk",
    "trust/test_nothing_is_kept.py::test_a_slice_of_calls_with_large_tensors",
    "streams/test_bins.py::test_gradients_of_tables_beside_eager",
    "streams/test_parts_of_sums.py::test_beside_eager",
    "streams/test_prologues.py::test_gradients_in_other_layouts",
    "streams/test_prologues.py::test_second_derivatives",
    "streams/test_registers.py::test_loops_around_loops_keep_nothing_of_them",
    "streams/test_shared_heads.py::test_beside_eager",
    "world/test_world.py::test_a_suite_is_compared_test_by_test",
)
"""What takes ten seconds or more where others show nearly the same, and a sample leaves out altogether."""
FEWER = ((1.0, 5), (0.3, 2))
"""Of tests that take so many seconds, one in so many is taken."""
HERE = Path(__file__).parent
SECONDS = HERE / "seconds.txt"
"""What the slower tests take, all their cases in the sample, in order; `make seconds` measures it again."""
MEASURED = os.environ.get("FUSEGRAD_TESTS") == "seconds"


def pytest_configure(config: pytest.Config) -> None:
    """A mistake that fusegrad goes round is a failure here. Not in pyproject.toml: that imports fusegrad before us."""
    config.addinivalue_line("filterwarnings", "error:.*internal error:fusegrad.FallbackWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("FUSEGRAD_TESTS") == "all":
        return
    taken = list(_sample(items))
    kept = set(taken)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = taken


def _sample(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Every so manieth case of each test, from one on that its name decides."""
    left = {*LEFT, *(() if MEASURED else _slow_ones_left())}
    for test, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        each = list(cases)
        if _place(each[0]) in left or f"{_place(each[0])}::{test.rpartition('::')[2]}" in left:
            continue
        share = min(_share(each[0]), len(each))
        yield from each[zlib.crc32(test.encode()) % share :: share]


def _slow_ones_left() -> Iterator[str]:
    """The slow tests but for every so manieth: in the order of the table, so that each folder keeps some."""
    rows = [line.split() for line in SECONDS.read_text().splitlines() if not line.partition(" ")[2].startswith(WHOLE)]
    most = float("inf")
    for least, one_in in FEWER:
        slow = [test for seconds, test in rows if least <= float(seconds) < most]
        yield from (test for i, test in enumerate(slow) if i % one_in)
        most = least


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write down what the slower tests took, where that is what they were run for."""
    if not MEASURED:
        return
    seconds = Counter[str]()
    for report in terminalreporter.getreports(""):
        seconds[report.nodeid.partition("[")[0].removeprefix(f"{HERE.name}/")] += report.duration
    rows = sorted((test, s) for test, s in seconds.items() if s >= FEWER[-1][0])
    SECONDS.write_text("".join(f"{s:.1f} {test}\n" for test, s in rows))


def _share(item: pytest.Item) -> int:
    place = _place(item)
    if place in WHOLE:
        return 1
    return THIN * next((n for where, n in ONE_IN.items() if place == where or place.startswith(f"{where}/")), 1)


def _place(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else ""
