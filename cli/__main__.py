"""`python -m specc.cli`, as `specc`."""

from specc.cli.app import main

main()
