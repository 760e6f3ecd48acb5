"""Writes .github/workflows/ci.yml from the device matrix in ci/lanes.py; `--check` fails if the file differs."""

import sys
from pathlib import Path

from lanes import LANES, Lane

WORKFLOW = Path(__file__).resolve().parent.parent / ".github" / "workflows" / "ci.yml"

HEAD = """\
# Made by ci/workflow.py from ci/lanes.py: change those, then run `python ci/workflow.py`.
name: ci
on:
  push: { branches: [main] }
  pull_request:
  workflow_dispatch:
permissions: { contents: read }
concurrency: { group: "ci-${{ github.ref }}", cancel-in-progress: true }
jobs:
"""

HOSTED_JOB = """\
  {name}:
    # {about}
    runs-on: {runner}
    timeout-minutes: {minutes}
    env: {{ PIP_EXTRA_INDEX_URL: "https://download.pytorch.org/whl/cpu" }}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{ python-version: "3.11" }}
      - run: python ci/lane.py {name}
"""

CONTAINER_JOB = """\
  {name}:
    # {about}
    runs-on: {runner}
    container: {container}
    timeout-minutes: {minutes}
    steps:
      - uses: actions/checkout@v4
      - run: python ci/lane.py {name}
"""

DEVICE_JOB = """\
  {name}:
    # {about}. Runs where the repository variable DEVICE_RUNNERS names the label.
    if: contains(vars.DEVICE_RUNNERS, '{runner}')
    runs-on: [self-hosted, {runner}]
    timeout-minutes: {minutes}
    steps:
      - uses: actions/checkout@v4
      - run: python -m pip install -e '.[test]'
      - run: python ci/lane.py {name}
"""


def job(row: Lane) -> str:
    """The job of a lane, or a comment that says what the lane waits for."""
    if row.waits_for:
        return f"  # {row.name} ({row.about}) waits for {row.waits_for}.\n"
    text = DEVICE_JOB if not row.hosted else CONTAINER_JOB if row.container else HOSTED_JOB
    return text.format(name=row.name, about=row.about, runner=row.runner, container=row.container, minutes=row.minutes)


def workflow() -> str:
    """The text of the workflow file."""
    return HEAD + "\n".join(job(row) for row in LANES)


def main() -> int:
    """Writes the workflow, or compares it."""
    if "--check" not in sys.argv[1:]:
        WORKFLOW.parent.mkdir(parents=True, exist_ok=True)
        WORKFLOW.write_text(workflow())
        return 0
    if WORKFLOW.exists() and WORKFLOW.read_text() == workflow():
        return 0
    print(f"{WORKFLOW} differs from ci/lanes.py; run `python ci/workflow.py` and commit the result.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
