"""The arguments of contexts and of what takes one, and a group of one rank."""

import pytest
import torch
import torch.distributed as dist

import graphlin
from graphlin.errors import HostSync, UnsupportedModule
from graphlin.layers import GatedDeltaNet
from graphlin.parallel import context_parallel
from tests.inputs import cu_of
from tests.ops.op_cases import OP_CASES, assert_bitwise, each_op
from tests.parallel.layouts import run_part

CU, OFFSETS = torch.tensor([0, 5, 12]), torch.tensor([0, 12])


@pytest.fixture
def alone(tmp_path):
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@each_op
def test_one_rank_is_the_op_bit_for_bit(case, device, alone):
    lengths = (5, 0, 12)
    drawn, cu = case.draw(20, len(lengths), device), cu_of(lengths, device)
    cp = context_parallel(None, cu, torch.tensor([0, 17], device=device))
    assert_bitwise(run_part(case, drawn, cp), case.run(drawn, cu), "on one rank")


@each_op
def test_gradients_of_states_may_lie_in_memory_in_any_order(case, device, alone):
    lengths = (5, 0, 12)
    drawn, cu = case.draw(20, len(lengths), device), cu_of(lengths, device)
    cp = context_parallel(None, cu, torch.tensor([0, 17], device=device))
    turned = drawn | {"dht": drawn["dht"].mT.contiguous().mT}
    assert_bitwise(run_part(case, turned, cp), case.run(drawn, cu), "of turned gradients")


def test_without_a_process_group():
    with pytest.raises(ValueError, match=r"group: expected a process group, found none; call .*init_process_group"):
        context_parallel(None, CU, OFFSETS)


@pytest.mark.parametrize(("arguments", "message"), [
    (("nccl", CU, OFFSETS), r"group: expected a torch\.distributed process group .* found 'nccl'"),
    ((None, CU.float(), OFFSETS), r"cu_seqlens_global: expected dtype int32, int64, found float32"),
    ((None, CU[:1], OFFSETS), r"cu_seqlens_global: expected at least 2 entries \(one sequence\), found 1"),
    ((None, CU, CU), r"token_offsets: expected shape \[2\], found \[3\]"),
    ((None, CU.tolist(), OFFSETS), r"cu_seqlens_global: expected a tensor, found list"),
])
def test_wrong_arguments(arguments, message, alone):
    with pytest.raises((TypeError, ValueError), match=message):
        context_parallel(*arguments)


@pytest.mark.parametrize(("cu", "offsets", "message"), [
    ([1, 5, 12], [0, 12], r"cu_seqlens_global: expected to start at 0, found 1"),
    ([0, 13, 12], [0, 12], r"cu_seqlens_global: expected values that never decrease, found 13 then 12 at index 2"),
    ([0, 5, 12], [0, 11], r"token_offsets: expected to end at or after the last token, 12, found 11"),
])
def test_wrong_values_are_told_on_request(cu, offsets, message, device, alone):
    cu, offsets = torch.tensor(cu, device=device), torch.tensor(offsets, device=device)
    context_parallel(None, cu, offsets)
    with pytest.raises(ValueError, match=message):
        context_parallel(None, cu, offsets, validate=True)


class Validating(torch.nn.Module):
    """A block that checks values, which takes the host."""

    def forward(self, x, cu_seqlens, token_offsets):
        context_parallel(None, cu_seqlens, token_offsets, validate=True)
        return x * 2


def test_validate_is_refused_in_a_capture(device, alone):
    graphed = graphlin.capture(Validating(), graphlin.Tier(tokens=16, seqs=2))
    with pytest.raises(HostSync):
        graphed(torch.zeros(1, 12, 4, device=device), CU.to(device), OFFSETS.to(device))


class Keeping(torch.nn.Module):
    """A block with a context of its caller's."""

    def __init__(self, cp):
        super().__init__()
        self.layer, self.cp = GatedDeltaNet(hidden_size=16, head_dim=16, num_heads=1, expand_v=1, chunk_size=16), cp

    def forward(self, x):
        return self.layer(x, cp_context=self.cp)


def test_a_context_from_outside_is_refused_in_a_capture(device, alone):
    block = Keeping(context_parallel(None, CU.to(device), OFFSETS.to(device))).to(device)
    x = torch.randn(1, 12, 16, device=device)
    with pytest.raises(UnsupportedModule, match=r"cp_context was made outside the capture, .* call context_parallel in"):
        graphlin.capture(block, graphlin.Tier(tokens=16, seqs=2, chunk_size=16))(x)
    assert block(x).isfinite().all()


def test_what_is_no_context(device):
    case = OP_CASES[0]
    with pytest.raises(TypeError, match=r"cp_context: expected what .*context_parallel returns, found str"):
        run_part(case, case.draw(12, 2, device), "cp")


def test_a_context_comes_without_other_sequences(device, alone):
    case, cp = OP_CASES[0], context_parallel(None, CU.to(device), OFFSETS.to(device))
    with pytest.raises(ValueError, match=r"cu_seqlens: expected None with cp_context, .* pass the whole batch's cu_seqlens to"):
        run_part(case, case.draw(12, 2, device), cp, cu_seqlens=CU.to(device))
    layer = GatedDeltaNet(hidden_size=16, head_dim=16, num_heads=1, expand_v=1).to(device)
    with pytest.raises(ValueError, match=r"chunk_indices: expected None with cp_context"):
        layer(torch.zeros(1, 12, 16, device=device), chunk_indices=torch.zeros(3, 2, device=device), cp_context=cp)


def test_a_group_without_a_backend_for_the_device(request, tmp_path):
    if request.config.option.device != "host":
        pytest.skip("a context on the CPU, whose kernels run in the interpreter alone")
    dist.init_process_group("cuda:gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        cp = context_parallel(None, CU, OFFSETS)
        with pytest.raises(ValueError, match=r"group: expected .* a backend for tensors on cpu, found one for cuda:gloo"):
            cp.all_gather("rows", torch.zeros(3))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("group", ["gloo", dist.GroupMember.NON_GROUP_MEMBER])
def test_what_is_no_group_to_capture_with(group):
    with pytest.raises(TypeError, match=r"group: expected a torch\.distributed process group that this rank is in, found"):
        graphlin.capture(Validating(), graphlin.Tier(tokens=16, seqs=2), group=group)


def test_ranks_that_capture_together_warm_up(alone):
    with pytest.raises(ValueError, match=r"num_warmup_iters: expected at least 2 with a group, found 1"):
        graphlin.capture(Validating(), graphlin.Tier(tokens=16, seqs=2), num_warmup_iters=1, group=dist.group.WORLD)
