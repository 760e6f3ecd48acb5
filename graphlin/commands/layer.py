"""What the command lines about one layer share: its options, and the layer, tiers and calls that they describe."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphlin.backends import get_backend
from graphlin.layers import GatedDeltaNet, KimiDeltaAttention
from graphlin.tier import CHUNK_SIZES, Tier, largest_first

LAYERS = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Sizes:
    """Of a layer, and of what it is captured for, where the command line does not say."""

    hidden: int
    heads: int
    head_dim: int
    tier: tuple[int, int]


MODEL = Sizes(hidden=2048, heads=16, head_dim=128, tier=(4096, 32))
TINY = Sizes(hidden=32, heads=1, head_dim=16, tier=(48, 3))  # for Triton's interpreter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--layer", choices=LAYERS, default="gdn",
                        help="Gated DeltaNet or Kimi Delta Attention (default: gdn)")
    parser.add_argument("--hidden", type=_count, metavar="WIDTH", help=f"width of its input (default: {MODEL.hidden})")
    parser.add_argument("--heads", type=_count, metavar="H", help=f"query and key heads (default: {MODEL.heads})")
    parser.add_argument("--value-heads", type=_count, metavar="HV", help="value heads, a multiple of H (default: H)")
    parser.add_argument("--head-dim", type=_count, metavar="K", help=f"width of a head (default: {MODEL.head_dim})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and input (default: bf16)")
    parser.add_argument("--tier", type=tokens_and_seqs, action="append", metavar="TOKENS,SEQS", dest="tiers",
                        help="a bound to capture for; give several for a ladder (default: {},{})".format(*MODEL.tier))
    parser.add_argument("--chunk-size", type=int, choices=CHUNK_SIZES, default=64, help="tokens in a chunk (default: 64)")
    parser.add_argument("--slots", type=_count, default=1,
                        help="forwards that may wait for their backward (default: 1)")
    parser.add_argument("--inference", action="store_true", help="forwards alone, without gradients")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def find_device(name: str) -> torch.device:
    """The device of this name; raises ValueError where this machine or graphlin has none."""
    try:
        device = torch.empty(0, device=name).device
        get_backend(device)
    except (RuntimeError, AssertionError) as error:  # PyTorch asserts that it was built for CUDA
        raise ValueError(f"--device: {name!r} can't be used here: {str(error).splitlines()[0]}") from error
    return device


def make_layer(arguments: argparse.Namespace, device: torch.device, sizes: Sizes = MODEL) -> torch.nn.Module:
    """The layer on a device; `sizes` are those of options that were not given. Raises ValueError where they don't fit."""
    options = dict(hidden_size=arguments.hidden or sizes.hidden, num_heads=arguments.heads or sizes.heads, expand_v=1,
                   head_dim=arguments.head_dim or sizes.head_dim, num_v_heads=arguments.value_heads,
                   chunk_size=arguments.chunk_size)
    with torch.device(device):
        return LAYERS[arguments.layer](**options).to(DTYPES[arguments.dtype])


def make_tiers(arguments: argparse.Namespace, sizes: Sizes = MODEL) -> Sequence[Tier]:
    """The tiers, largest first."""
    return largest_first(Tier(*tier, chunk_size=arguments.chunk_size) for tier in arguments.tiers or [sizes.tier])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def tokens_and_seqs(text: str) -> tuple[int, int]:
    """The two numbers of `4096,32` or `4096x32`."""
    match = re.fullmatch(r"(\d+)[,x](\d+)", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise argparse.ArgumentTypeError(f"expected tokens and sequences, such as 4096,32, found {text!r}")
    return int(match[1]), int(match[2])
