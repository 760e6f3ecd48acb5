"""Runs lanes of ci/lanes.py by name: `python ci/lane.py [--short] NAME...`.

Every lane runs, whatever happened to those before it; the exit status is 1 if one failed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from lanes import LANES, Lane, lane

ROOT = Path(__file__).resolve().parent.parent


def run(row: Lane, short: bool) -> bool:
    """Runs the commands of a lane in the repository's root, up to the first that fails."""
    for command in (row.short if short else ()) or row.commands:
        print(f"\n== lane {row.name}: {command}", flush=True)
        if subprocess.run(command, shell=True, cwd=ROOT, stdin=subprocess.DEVNULL).returncode:
            return False
    return True


def main() -> int:
    """Runs the lanes that the command line names and prints how each ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="lanes to run; none: list them")
    parser.add_argument("--short", action="store_true", help="run the chosen subset of lanes that have one")
    options = parser.parse_args()
    if not options.names:
        print("\n".join(f"{row.name:<24}{row.about}" for row in LANES))
        return 0
    endings = []
    for row in [lane(name) for name in options.names]:
        begin = time.monotonic()
        passed = run(row, options.short)
        endings.append((row.name, passed, time.monotonic() - begin))
    print()
    for name, passed, seconds in endings:
        print(f"lane {name:<24}{'passed' if passed else 'FAILED'} in {seconds / 60:.1f} min")
    return 0 if all(passed for _, passed, _ in endings) else 1


if __name__ == "__main__":
    sys.exit(main())
