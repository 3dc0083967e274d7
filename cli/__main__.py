"""Runs the command line as `python -m specc.cli`."""

from specc.cli.app import main

main()
