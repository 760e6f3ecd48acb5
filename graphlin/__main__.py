"""`python -m graphlin COMMAND`."""

import argparse
import sys
from importlib import import_module

import graphlin

# Each module has HELP, add_arguments(parser) and run(arguments) -> exit status.
COMMANDS = {"demo": "graphlin.demo.command", "price": "graphlin.commands.price", "verify": "graphlin.commands.verify",
            "bench": "graphlin.bench.command", "tune": "graphlin.bench.tune_command"}


def main(argv: list[str] | None = None) -> int:
    """Runs one command, or without any prints what there is; returns the exit status: 0 right, 1 wrong results, 2 wrong usage
    or no device."""
    parser = argparse.ArgumentParser(prog="python -m graphlin", description="Graph capture of linear attention blocks.")
    parser.add_argument("--version", action="version", version=f"graphlin {graphlin.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module_name in COMMANDS.items():
        module = import_module(module_name)
        command = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
