"""Support for commands that run in several processes, one per GPU."""

import sys
from typing import Any

import rich_click as click
from click import get_current_context

from specc.cli.output import say


class Repeatable(click.RichCommand):
    """A command that stores its arguments as given, to run them in other processes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = [ctx.info_name, *args]
        return super().parse_args(ctx, args)


def launched(gpus: int, spec: Any, target: str | None) -> int | None:
    """Runs this command in `gpus` processes and returns their exit code. Returns None if `gpus` is 1: then this process
    runs the command itself. Raises as `require_devices`."""
    from specc.runtime.distributed.launch import launch, require_devices

    require_devices(gpus, spec, target)
    if gpus == 1:
        return None
    command = [sys.executable, "-P", "-m", "specc.cli", *get_current_context().meta["arguments"]]
    return launch(gpus, command, say)


def joined_world() -> Any:
    """Returns `specc.runtime.distributed.world.joined()`. Imports torch."""
    from specc.runtime.distributed.world import joined

    return joined()
