"""`python -m graphlin price`."""

import argparse
import json
import sys
from dataclasses import replace

import torch
from rich.console import Console

from graphlin.commands import layer
from graphlin.errors import GraphlinError
from graphlin.price import price

HELP = "Tell what the captured graphs of a layer would hold, without capturing them; needs no GPU."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    layer.add_arguments(parser)
    parser.add_argument("--device", help="device whose memory is priced (default: the GPU, or one of compute capability 9.0 "
                                         "where there is none; cpu prices the host's recordings)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the price; returns 0, or 2 if an argument or the device can't be used."""
    try:
        device = layer.find_device(arguments.device or ("cuda" if torch.cuda.is_available() else "meta"))
        with torch.set_grad_enabled(not arguments.inference):
            found = price(layer.make_layer(arguments, device), layer.make_tiers(arguments))
    except (ValueError, GraphlinError) as error:
        print(f"graphlin price: {error}", file=sys.stderr)
        return 2
    found = replace(found, slots=arguments.slots)
    if arguments.json:
        print(json.dumps({"device": str(device)} | found.as_json()))
    else:
        Console().print(found)
    return 0
