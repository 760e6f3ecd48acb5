"""Captured forwards: the eager result for every packing inside the tier, eager elsewhere."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from graphlin.capture import capture
from graphlin.errors import (
    ReplayError,
    SlotInUse,
    StaleAddress,
    StructureMismatch,
    TierOverflow,
    TierUnderflow,
    UnsupportedModule,
)
from graphlin.tier import Tier
from tests.blocks import Mixer, StateMixer, assert_equal, captured, pack

TIER = Tier(tokens=24, seqs=4)
PACKS = [(5, 3), (24,), (1, 0, 7, 2), (0,), (6, 6, 6, 6), (2, 21)]


def graphed_mixer(device, **options):
    return capture(Mixer().to(device), TIER, **options)


@torch.no_grad()
def test_changing_packs_replay_to_the_eager_result(device):
    graphed = graphed_mixer(device)
    for lengths in PACKS:
        x, cu = pack(lengths, device)
        assert_equal([graphed(x, cu_seqlens=cu)], [graphed.block(x, cu)])
    captured(graphed, len(PACKS))
    assert graphed.stats.captures == 1


@torch.no_grad()
def test_cu_seqlens_changed_in_place_is_used_and_never_modified(device):
    graphed = graphed_mixer(device)
    x, cu = pack((8, 8, 4), device, slack=4, poison=1.0)
    for ends in ([0, 8, 16, 20], [0, 1, 2, 3], [0, 0, 0, 24], [0, 5, 5, 5]):
        cu.copy_(torch.tensor(ends))
        assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
        assert cu.tolist() == ends
    captured(graphed, 4)


@torch.no_grad()
def test_nan_in_slack_and_rows_left_behind_change_nothing(device):
    graphed = graphed_mixer(device)
    full, cu_full = pack((24,), device)
    graphed(full, cu_full)                                     # leaves 24 rows behind
    x, cu = pack((4, 2), device, slack=9)
    y = graphed(x, cu)
    assert y.shape == (1, 15, 8)
    assert_equal([y], [graphed.block(torch.nan_to_num(x), cu)])
    captured(graphed, 2)


@torch.no_grad()
def test_replay_runs_none_of_the_blocks_python(device):
    graphed = graphed_mixer(device)
    x, cu = pack((5, 3), device)
    expected = graphed(x, cu)

    def broken(*args, **kwargs):
        raise AssertionError("the block's forward ran")
    graphed.block.forward = broken
    assert torch.equal(graphed(x, cu), expected)
    captured(graphed, 2)


@torch.no_grad()
def test_over_the_tier_is_eager_and_counted(device):
    graphed = graphed_mixer(device)
    inside, cu = pack((5, 3), device)
    first = graphed(inside, cu)
    for lengths in ((25,), (1, 1, 1, 1, 1)):
        x, ends = pack(lengths, device)
        assert torch.equal(graphed(x, ends), graphed.block(x, ends))
    assert torch.equal(graphed(inside, cu), first)             # a larger eager call between replays
    captured(graphed, 2, TierOverflow=2)


@torch.no_grad()
def test_over_the_tier_raises_if_asked(device):
    graphed = graphed_mixer(device, fallback="raise")
    with pytest.raises(TierOverflow, match="25 tokens in 1 sequences, the largest tier holds 24 in 4"):
        graphed(*pack((25,), device))
    x, cu = pack((5, 3), device)
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 1)


def test_dense_batches_run_as_equal_sequences(device):
    graphed = graphed_mixer(device)
    for shape in ((2, 5, 8), (4, 6, 8), (1, 24, 8), (3, 1, 8)):
        x = torch.randn(shape, device=device, requires_grad=True)
        found, expected = graphed(x), graphed.block(x)
        weight = torch.randn_like(expected)
        assert_equal([found, *torch.autograd.grad((found * weight).sum(), x)],
                     [expected, *torch.autograd.grad((expected * weight).sum(), x)])
    captured(graphed, 4, backwards=4)
    x = torch.randn(5, 2, 8, device=device)
    assert torch.equal(graphed(x), graphed.block(x))
    captured(graphed, 4, TierOverflow=1)


def test_states_in_and_out_keep_their_tree_and_sizes(device):
    graphed = capture(StateMixer().to(device), TIER)
    for lengths in ((5, 3), (1, 0, 7), (24,)):
        x, cu = pack(lengths, device)
        state = {"sum": torch.randn(len(lengths), 8, device=device)}
        (y, states), (y0, states0) = (block(x, cu, initial_state=state, output_final_state=True)
                                      for block in (graphed, graphed.block))
        assert states["sum"].shape == (len(lengths), 8) and isinstance(states["parts"], tuple)
        assert_equal([y, states["sum"], states["parts"][0]], [y0, states0["sum"], states0["parts"][0]])
        y.sum().backward()
    captured(graphed, 3, backwards=3)
    x, cu = pack((2,), device)
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])     # another structure, another graph
    captured(graphed, 4)


@torch.no_grad()
def test_constants_are_part_of_the_key(device):
    class Scale(nn.Module):
        def forward(self, x, cu_seqlens, factor=2):
            return x * factor + cu_seqlens[-1]
    graphed = capture(Scale(), TIER)
    x, cu = pack((5, 3), device)
    for factor in (2, 3, 2.0, True, 2, 3):
        assert torch.equal(graphed(x, cu, factor=factor), graphed.block(x, cu, factor))
    captured(graphed, 6)
    assert graphed.stats.captures == 4


@torch.no_grad()
def test_a_constant_that_always_changes_stops_being_captured(device):
    class Scale(nn.Module):
        def forward(self, x, cu_seqlens, factor):
            return x * factor
    graphed = capture(Scale(), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    for factor in range(20):
        assert torch.equal(graphed(x, cu, factor), x * factor)
    captured(graphed, 16, StructureMismatch=4)


@torch.no_grad()
def test_a_block_without_cu_seqlens_is_captured_at_its_exact_shape(device):
    graphed = capture(nn.Linear(8, 3).to(device), TIER)
    for rows in (4, 4, 6):
        x = torch.randn(rows, 8, device=device)
        assert_equal([graphed(x)], [graphed.block(x)])
    captured(graphed, 2, StructureMismatch=1)


@torch.no_grad()
def test_dims_make_a_block_without_cu_seqlens_vary(device):
    graphed = capture(nn.Linear(8, 3).to(device), TIER, dims={"input": {0: "tokens"}})
    for rows in (4, 9, 0, 24):
        x = torch.randn(rows, 8, device=device)
        assert_equal([graphed(x)], [graphed.block(x)])
    captured(graphed, 4)


@torch.no_grad()
def test_the_chunk_table_is_built_in_the_graph(device):
    class Tables(nn.Module):
        def forward(self, x, cu_seqlens, chunk_indices=None):
            return x + chunk_indices.sum(), chunk_indices.max()
    tier = Tier(tokens=64, seqs=4, chunk_size=16)
    graphed = capture(Tables(), tier)
    for lengths in ((40, 3), (17, 17, 17), (64,)):
        x, cu = pack(lengths, device)
        table = [(n, t) for n, length in enumerate(lengths) for t in range(-(-length // 16))]
        expected = sum(map(sum, table)) - 2 * (tier.max_chunks - len(table))
        y, largest = graphed(x, cu)
        assert_equal([y], [x + expected])
        assert largest == max(map(max, table))
    graphed(x, cu, chunk_indices=torch.zeros(9, 2, dtype=torch.int32, device=device))      # replaced by the graph's own
    captured(graphed, 4)


@torch.no_grad()
def test_outputs_are_copies_by_default_and_views_if_asked(device):
    x, cu = pack((5, 3), device)
    for copies in (True, False):
        graphed = graphed_mixer(device, copy_outputs=copies)
        first = graphed(x, cu)
        kept = first.clone()
        second = graphed(x + 1, cu)
        assert torch.equal(first, kept) is copies
        assert (first.data_ptr() == second.data_ptr()) is not copies
        captured(graphed, 2)


@torch.no_grad()
def test_weights_loaded_in_place_are_used(device):
    graphed = graphed_mixer(device)
    x, cu = pack((5, 3), device)
    graphed(x, cu)
    graphed.load_state_dict({name: torch.randn_like(value) for name, value in graphed.state_dict().items()})
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 2)


@pytest.mark.parametrize("change", [
    lambda block: setattr(block.enter, "weight", nn.Parameter(torch.randn_like(block.enter.weight))),
    lambda block: setattr(block, "enter", nn.Linear(8, 8).to(block.leave.weight.device)),
    lambda block: setattr(block.enter.weight, "data", torch.randn_like(block.enter.weight)),
    lambda block: setattr(block.leave, "bias", nn.Parameter(torch.randn_like(block.enter.bias))),
    lambda block: block.dropout.register_buffer("extra", None),
], ids=["parameter", "submodule", "data", "from None", "new buffer"])
@torch.no_grad()
def test_a_changed_block_is_noticed_and_refresh_takes_it(device, change):
    graphed = graphed_mixer(device)
    x, cu = pack((5, 3), device)
    graphed(x, cu)
    change(graphed.block)
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 1, StaleAddress=1)
    graphed.refresh()
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 2, StaleAddress=1)


@torch.no_grad()
@pytest.mark.parametrize("change", [lambda data: data.t(), lambda data: data[:4], lambda data: data.view(4, 16)],
                         ids=["transposed", "cut", "reshaped"])
def test_weights_laid_out_anew_at_the_same_place_are_noticed(device, change):
    graphed = capture(Mixer().to(device), TIER, fallback="raise")
    x, cu = pack((5, 3), device)
    graphed(x, cu)
    weight = graphed.block.enter.weight
    weight.data = change(weight.data)
    with pytest.raises(StaleAddress, match="since the capture"):
        graphed(x, cu)


def test_a_stale_address_names_the_parameter(device):
    graphed = graphed_mixer(device, fallback="raise")
    x, cu = pack((5, 3), device)
    graphed(x, cu)
    graphed.block.enter.bias.data = torch.zeros(8, device=device)
    with pytest.raises(StaleAddress, match=r"enter.bias was added, replaced or moved since the capture.*refresh\(\)"):
        graphed(x, cu)


HOOKS = {
    "hook": lambda block: block.enter.register_forward_hook(lambda module, args, out: 2 * out),
    "pre-hook": lambda block: block.enter.register_forward_pre_hook(lambda module, args: (3 * args[0],)),
    "of all modules": lambda block: register_module_forward_hook(
        lambda module, args, out: 2 * out if module is block.enter else None),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
@torch.no_grad()
def test_a_hook_makes_calls_eager_until_it_is_removed(device, register):
    graphed = graphed_mixer(device)
    x, cu = pack((5, 3), device)
    plain = graphed(x, cu)
    handle = register(graphed.block)
    try:
        found = graphed(x, cu)
        assert torch.equal(found, graphed.block(x, cu)) and not torch.equal(found, plain)
        with pytest.raises(UnsupportedModule, match="(enter|all modules.*) has a hook, .*never at a replay. Remove it"):
            graphed.refresh()
            graphed(x, cu)
        with pytest.raises(UnsupportedModule, match="has a hook"):
            capture(graphed.block, TIER)
    finally:
        handle.remove()
    graphed.refresh()
    assert torch.equal(graphed(x, cu), plain)
    captured(graphed, 2, StaleAddress=1)


@torch.no_grad()
def test_memory_of_a_block_without_parameters_is_counted(device):
    class Double(nn.Module):
        def forward(self, x, cu_seqlens):
            return 2 * x
    graphed = capture(Double(), TIER)
    assert graphed.held_bytes() == 0
    graphed(*pack((5, 3), device))
    assert graphed.held_bytes() >= 2 * 24 * 8 * 4 + 5 * 4          # x and cu_seqlens, and the output in the pool
    captured(graphed, 1)


def test_modes_have_graphs_of_their_own(device):
    graphed = capture(Mixer(dropout=0.5).to(device), TIER)
    x, cu = pack((5, 3), device)
    for train in (True, False):
        graphed.train(train)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                y = graphed(x, cu)
                assert y.requires_grad is grad
                if not train:
                    assert_equal([y], [graphed.block(x, cu)])
                del y
    with torch.inference_mode():
        assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    graphed.block.enter.weight.requires_grad_(False)
    graphed(x, cu).sum().backward()
    assert graphed.block.enter.weight.grad is None and graphed.block.leave.weight.grad is not None
    captured(graphed, 6)
    assert graphed.stats.captures == 5


@torch.no_grad()
def test_dropout_draws_anew_and_follows_the_seed(device):
    graphed = capture(Mixer(dropout=0.5).to(device), TIER)
    x, cu = pack((12, 9), device)
    graphed(x, cu)
    torch.manual_seed(5)
    first, second = graphed(x, cu), graphed(x, cu)
    torch.manual_seed(5)
    again = graphed(x, cu)
    assert not torch.equal(first, second) and torch.equal(first, again)
    captured(graphed, 4)


@torch.no_grad()
def test_autocast_is_a_mode_and_its_cache_is_left_alone(device):
    graphed = graphed_mixer(device)
    x, cu = pack((5, 3), device)
    plain = graphed(x, cu)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        cast = graphed(x, cu)
        assert cast.dtype == torch.bfloat16 and torch.is_autocast_cache_enabled()
        torch.testing.assert_close(cast, graphed.block(x, cu), rtol=2e-2, atol=2e-2)
        graphed.block.enter.weight.mul_(2)                     # eager casts are cached in this region, the graph's not
        torch.clear_autocast_cache()
        torch.testing.assert_close(graphed(x, cu), graphed.block(x, cu), rtol=2e-2, atol=2e-2)
    graphed.block.enter.weight.div_(2)
    assert torch.equal(graphed(x, cu), plain)
    captured(graphed, 4)


@torch.no_grad()
def test_buffers_written_by_the_forward_see_real_calls_alone(device):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, cu_seqlens):
            self.calls += 1
            return x * self.calls
    graphed = capture(Counts().to(device), TIER)
    x, cu = pack((5, 3), device)
    for calls in (1, 2, 3):
        assert torch.equal(graphed(x, cu), x * calls)
        assert graphed.block.calls == calls
    captured(graphed, 3)


def process_state(device):
    """What a capture must leave as it was: generators, autocast, grad mode and garbage collection."""
    generators = [torch.get_rng_state()]
    if device.type != "cpu":
        generators.append(torch.get_device_module(device).get_rng_state(device))
    return (*(state.tolist() for state in generators), torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), gc.isenabled())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_state_of_the_process_is_as_before(device, grad, autocast, fails):
    class Drops(Mixer):
        runs = 0

        def forward(self, x, cu_seqlens=None):
            self.runs += 1
            if fails and self.runs == 3:                       # the capture, after a run for shapes and one to warm up
                raise KeyError("trip")
            return super().forward(x, cu_seqlens)
    x, cu = pack((5, 3), device)
    block = Drops(dropout=0.5).to(device).train()
    with torch.set_grad_enabled(grad), torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        graphed = capture(block, TIER, num_warmup_iters=1)
        before = process_state(device)
        if fails:
            with pytest.raises(KeyError, match="trip"):
                graphed.prepare((x, cu), {})
        else:
            graphed.prepare((x, cu), {})
        assert process_state(device) == before
        assert graphed.stats.captures == (not fails)
        y = graphed(x, cu)
        assert y.requires_grad is grad and (y.dtype == torch.bfloat16) is autocast
    if grad:
        y.sum().backward()
    captured(graphed, 1, backwards=int(grad))


@torch.no_grad()
def test_a_sample_is_captured_at_once_and_no_other_mode_after(device):
    x, cu = pack((5, 3), device)
    graphed = capture(Mixer().to(device), TIER, (x,), {"cu_seqlens": cu})
    assert graphed.stats.captures == 1
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    graphed.eval()
    assert torch.equal(graphed(x, cu), graphed.block(x, cu))
    graphed.train()
    assert_equal([graphed(x.double().float(), cu)], [graphed.block(x, cu)])
    captured(graphed, 2, StructureMismatch=1)
    graphed.reset()
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 3, StructureMismatch=1)


@torch.no_grad()
def test_reset_gives_memory_back_and_a_call_captures_again(device):
    graphed = graphed_mixer(device)
    x, cu = pack((5, 3), device)
    before = graphed(x, cu)
    assert graphed.held_bytes() > 24 * 8 * 4
    graphed.reset()
    assert graphed.held_bytes() == 0
    assert torch.equal(graphed(x, cu), before)
    captured(graphed, 2)


@torch.no_grad()
def test_two_blocks_interleaved(device):
    a, b = graphed_mixer(device), graphed_mixer(device)
    for lengths in PACKS[:3]:
        x, cu = pack(lengths, device)
        assert_equal([a(x, cu), b(x, cu), a(x, cu)], [a.block(x, cu), b.block(x, cu), a.block(x, cu)])
    captured(a, 6)
    captured(b, 3)


def test_an_outer_capture_holds_the_block_itself(device):
    inner = graphed_mixer(device)
    x, cu = pack((5, 3), device)
    with torch.no_grad():
        inner(x, cu)

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = inner

            def forward(self, x, cu_seqlens):
                return self.inner(x, cu_seqlens) + 1
        outer = capture(Outer(), TIER)
        assert_equal([outer(x, cu)], [inner.block(x, cu) + 1])
    captured(outer, 1)
    assert inner.stats.inlined >= 1


def test_reasons_are_replay_errors():
    for error in (TierOverflow, TierUnderflow, StructureMismatch, StaleAddress, SlotInUse):
        assert issubclass(error, ReplayError)
