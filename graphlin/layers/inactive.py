"""Rows of a packed batch that belong to no sequence."""

import torch


def zero_inactive_rows(hidden_states: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`hidden_states [1, T, D]` with exact zeros at and after row `cu_seqlens[-1]`, decided on the device.

    A linear layer sums x·dy over all rows for its weight gradient, so a NaN in a row that no sequence owns would reach
    it even where dy is 0.

    >>> zero_inactive_rows(torch.full((1, 3, 1), float("nan")), torch.tensor([0, 0])).flatten().tolist()
    [0.0, 0.0, 0.0]
    """
    rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    return hidden_states.masked_fill((rows >= cu_seqlens[-1])[None, :, None], 0)
