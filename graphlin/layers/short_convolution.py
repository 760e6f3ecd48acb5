"""The short causal convolution of a layer: a depthwise `Conv1d`'s parameters, run by the packed op."""

import torch
from torch import nn

from graphlin.ops.causal_conv1d import causal_conv1d


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution with silu over packed or dense sequences.

    Its parameters are those of a depthwise `nn.Conv1d`: weight `[channels, 1, width]`, bias `[channels]` or None. Input
    and output are `[B, T, channels]`, states `[N, channels, width]` with the newest token in the last slot. Keyword
    arguments go to `graphlin.ops.causal_conv1d`, which also says what it raises.

    >>> conv = ShortConvolution(256, 4)
    >>> y, state = conv(x, cu_seqlens=cu, output_final_state=True)
    """

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(self, x: torch.Tensor, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
                **packing) -> tuple[torch.Tensor, torch.Tensor | None]:
        return causal_conv1d(x, self.weight.squeeze(1), self.bias, initial_state=initial_state,
                             output_final_state=output_final_state, activation="silu", **packing)
