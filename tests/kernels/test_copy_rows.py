import pytest
import torch

from graphlin.kernels.copy_rows import RowCopy, deliver, is_deliverable


def cu_seqlens(device, *ends, dtype=torch.int32):
    return torch.tensor([0, *ends], device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_active_rows_arrive_and_nothing_else(device, dtype):
    copy = RowCopy(torch.zeros(1, 40, 3, 50, device=device, dtype=dtype), dim=1)
    for tokens, ends in ((30, (5, 20)), (40, (40,)), (12, (0, 3, 3)), (0, (0,)), (7, (7,))):
        x = torch.randn(1, tokens, 3, 50)
        x = x.to(dtype) if dtype.is_floating_point else (x * 10).to(dtype)
        x[:, ends[-1]:] = float("nan") if dtype.is_floating_point else 1
        copy(x.to(device), cu_seqlens(device, *ends))
        assert torch.equal(copy.static[:, :ends[-1]].cpu(), x[:, :ends[-1]])
        assert not copy.static[:, ends[-1]:].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tail_of_cu_seqlens_repeats_the_last_end(device, dtype):
    copy = RowCopy(torch.zeros(1, 16, 4, device=device), dim=1)
    static_cu = torch.full((71,), -1, device=device, dtype=dtype)      # more than one block of entries
    for ends in ((3, 9), (16,), (1, 2, 3, 4)):
        copy(torch.ones(1, 16, 4, device=device), cu_seqlens(device, *ends, dtype=dtype), static_cu)
        assert static_cu.tolist() == [0, *ends] + [ends[-1]] * (70 - len(ends))


def test_wrong_ends_stay_inside_the_tensors(device):
    copy = RowCopy(torch.zeros(1, 8, 2, device=device), dim=1)
    x = torch.randn(1, 5, 2, device=device)
    copy(x, cu_seqlens(device, 100))
    assert torch.equal(copy.static[:, :5], x) and not copy.static[:, 5:].any()
    copy(x, cu_seqlens(device, -3))
    assert not copy.static.any()


def test_without_cu_every_row_is_active_and_outer_dims_are_strided(device):
    copy = RowCopy(torch.zeros(2, 3, 10, 4, device=device), dim=2)
    for tokens in (7, 3, 10):
        x = torch.randn(2, 3, tokens, 4, device=device)
        copy(x, None)
        assert torch.equal(copy.static[:, :, :tokens], x) and not copy.static[:, :, tokens:].any()


def test_strided_input_is_copied_by_value(device):
    copy = RowCopy(torch.zeros(1, 6, 4, device=device), dim=1)
    x = torch.randn(4, 6, device=device).T[None]
    copy(x, cu_seqlens(device, 6))
    assert torch.equal(copy.static, x)


@pytest.mark.parametrize("lazy", [torch._neg_view, torch.conj, lambda x: x.conj().imag])
def test_lazy_signs_are_copied_by_value(device, lazy):
    x = lazy(torch.randn(1, 6, 4, device=device, dtype=torch.complex64))
    copy = RowCopy(torch.zeros(1, 8, 4, device=device, dtype=x.dtype), dim=1)
    copy(x, cu_seqlens(device, 5))
    assert torch.equal(copy.static[:, :5], x.resolve_conj().resolve_neg()[:, :5]) and not copy.static[:, 5:].any()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_dtypes_that_triton_lacks_are_copied_bit_for_bit(device, dtype):
    for shape, dim in (((1, 6, 4), 1), ((2, 6), 1)):
        x = torch.randn(shape).mul(9).abs().to(device, dtype)
        copy = RowCopy(torch.zeros(shape, device=device, dtype=dtype), dim=dim)
        copy(x, cu_seqlens(device, 5))
        kept, rest = copy.static.narrow(dim, 0, 5), copy.static.narrow(dim, 5, 1)
        assert torch.equal(kept.contiguous().view(torch.uint8), x.narrow(dim, 0, 5).contiguous().view(torch.uint8))
        assert not rest.contiguous().view(torch.uint8).any()


def test_the_buffer_itself_is_not_copied(device):
    copy = RowCopy(torch.zeros(1, 6, 4, device=device), dim=1)
    static_cu = torch.zeros(4, device=device, dtype=torch.int32)
    copy.static.fill_(3.0)
    copy(copy.static, cu_seqlens(device, 2), static_cu)
    assert (copy.static == 3.0).all()
    assert static_cu.tolist() == [0, 2, 2, 2]
    copy(torch.ones(1, 2, 4, device=device), cu_seqlens(device, 2), static_cu)
    assert (copy.static[:, :2] == 1.0).all() and not copy.static[:, 2:].any()      # its rows counted as left behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.float8_e5m2, torch.bool])
def test_rows_are_delivered_to_where_the_last_copy_said(device, dtype):
    mailbox = torch.zeros(1, 2, device=device, dtype=torch.int64)
    copy = RowCopy(torch.zeros(1, 40, 4, device=device), dim=1, mailbox=mailbox)
    static_cu = torch.zeros(3, device=device, dtype=torch.int32)
    source = torch.randn(1, 40, 80).mul(9).to(device, dtype)
    for tokens in (7, 40, 1, 0, 23):
        memory = torch.randn(42, 80).mul(9).to(device, dtype)
        before, target = memory.clone(), memory[1:tokens + 1]
        x, offset = torch.ones(1, tokens, 4, device=device), target.data_ptr() - source.data_ptr()
        copy(x, cu_seqlens(device, tokens), static_cu, offset)
        deliver(source, 1, mailbox)
        before[1:tokens + 1] = source[0, :tokens]
        assert torch.equal(memory.view(torch.uint8), before.view(torch.uint8))


def test_nothing_is_delivered_to_nowhere(device):
    mailbox = torch.zeros(1, 2, device=device, dtype=torch.int64)
    copy = RowCopy(torch.zeros(1, 8, 4, device=device), dim=1, mailbox=mailbox)
    source, target = torch.randn(8, 4, device=device), torch.zeros(8, 4, device=device)
    x, cu, static_cu = torch.ones(1, 6, 4, device=device), cu_seqlens(device, 5), torch.zeros(4, device=device, dtype=torch.int32)
    copy(x, cu, static_cu, target.data_ptr() - source.data_ptr())
    copy(x, cu, static_cu)                                     # the next copy takes it back
    kept = source.clone()
    deliver(source, 0, mailbox)
    assert not target.any() and torch.equal(source, kept) and mailbox.tolist() == [[0, 6]]


def test_addresses_are_told_apart_to_the_last_bit(device):
    mailbox = torch.zeros(1, 2, device=device, dtype=torch.int64)
    copy = RowCopy(torch.zeros(1, 8, 4, device=device), dim=1, mailbox=mailbox)
    static_cu = torch.zeros(2, device=device, dtype=torch.int32)
    for offset in (16, -16, (1 << 31) - 16, 1 << 31, -(1 << 31) - 16, (1 << 47) + 48, -(1 << 47) + 48):
        copy(torch.ones(1, 3, 4, device=device), cu_seqlens(device, 3), static_cu, offset)
        assert mailbox.tolist() == [[offset, 3]]


@pytest.mark.parametrize("make, dim, can", [
    (lambda: torch.zeros(1, 5, 4), 1, True), (lambda: torch.zeros(5, 2, 2), 0, True),
    (lambda: torch.zeros(5, 16, dtype=torch.int8), 0, True), (lambda: torch.zeros(24)[4:].view(5, 4), 0, True),
    (lambda: torch.zeros(1, 5, 3), 1, False), (lambda: torch.zeros(5), 0, False), (lambda: torch.zeros(2, 5, 4), 1, False),
    (lambda: torch.zeros(5, 8)[:, :4], 0, False), (lambda: torch.zeros(4, 5).T, 0, False),
    (lambda: torch.zeros(24)[2:22].view(5, 4), 0, False), (lambda: torch._neg_view(torch.zeros(5, 4)), 0, False),
    (lambda: torch.zeros(5, 4, dtype=torch.complex64).conj(), 0, False), (lambda: torch.zeros(5, 4).to_sparse(), 0, False),
])
def test_what_can_be_delivered_lies_together_in_vectors_of_16_bytes(make, dim, can):
    assert is_deliverable(make(), dim) == can
