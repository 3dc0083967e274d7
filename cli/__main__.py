"""Runs the command line as `python -m specc.cli`."""

import sys

try:
    from specc.cli.app import main
except ModuleNotFoundError as error:
    if (error.name or "specc.").startswith("specc."):
        raise  # a module of specc is missing, which is a bug
    help = "in the folder of its pyproject.toml: pip install -e ."
    print(f"error: E002 {error.name} is not installed\n  = help: {help}", file=sys.stderr)
    sys.exit(3)

main()
