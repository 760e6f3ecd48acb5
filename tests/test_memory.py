"""The poisoned memory that other tests run in does show what it is there to show."""

import pytest
import torch

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uninitialised_memory_is_poison(device, dtype):
    like = torch.zeros(3, 5, dtype=dtype, device=device).T
    for x in (torch.empty(5, 3, dtype=dtype, device=device), torch.empty_like(like), like.new_empty(5, 3),
              torch.empty_strided((5, 3), (1, 5), dtype=dtype, device=device)):
        assert x.shape == (5, 3) and x.dtype == dtype
        assert (x.isnan() if dtype.is_floating_point else x > 0).all()
    assert torch.empty_like(like).stride() == like.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("place", "side"), [(-1, "before"), (16, "after")])
def test_a_write_beside_a_tensor_is_seen(device, poisoned_memory, dtype, place, side):
    x = torch.empty(4, 4, dtype=dtype, device=device).fill_(1)
    x.as_strided((1,), (1,), x.storage_offset() + place).fill_(1)
    with pytest.raises(AssertionError, match=rf"memory {side} the tensor {dtype} \[4, 4\] of test_memory.py:\d+ was written"):
        poisoned_memory.check()
