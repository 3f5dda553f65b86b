"""Command line: `python -m rnnt COMMAND`.  Each command lives in a module of its own."""

import argparse
import sys

import rnnt
from rnnt import check
from rnnt.bench import command as bench
from rnnt.plan import add_command as add_plan_command


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rnnt", description="RNN-T loss without the [B, T, U+1, V] tensor.")
    parser.add_argument("--version", action="version", version=f"rnnt {rnnt.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    check.add_command(commands)
    bench.add_command(commands)
    add_plan_command(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
