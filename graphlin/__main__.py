"""`python -m graphlin COMMAND`."""

import argparse
import sys
from importlib import import_module

# Each module has HELP, add_arguments(parser) and run(arguments) -> exit status.
COMMANDS = {"demo": "graphlin.demo.command", "bench": "graphlin.bench.command", "tune": "graphlin.bench.tune_command"}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 right, 1 wrong results, 2 wrong usage or no device."""
    parser = argparse.ArgumentParser(prog="python -m graphlin", description="Graph capture of linear attention blocks.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module_name in COMMANDS.items():
        module = import_module(module_name)
        command = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
