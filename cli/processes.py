"""Support for commands that run in several processes, one per GPU."""

import os
import sys
from typing import Any

import click
from click import get_current_context

from specc.cli.output import say


class Repeatable(click.Command):
    """A command that stores its arguments, so that it can start other processes with the same arguments. The options
    after `--` are options of torchrun.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        if args[end + 1 : end + 2] and not args[end + 1].startswith("-"):
            end = len(args)  # an argument of the command follows this `--`, not an option of torchrun
        ctx.meta["arguments"], ctx.meta["torchrun"] = [ctx.info_name, *args[:end]], args[end + 1 :]
        return super().parse_args(ctx, args[:end])


def given_arguments() -> list[str]:
    """Returns the name and the arguments of the running command. The class of the command must be Repeatable."""
    return list(get_current_context().meta["arguments"])


def torchrun_options() -> list[str]:
    """Returns the arguments after `--` of the running command. The class of the command must be Repeatable."""
    return list(get_current_context().meta["torchrun"])


def launched(gpus: int | None, spec: Any, target: str | None, world: Any = None) -> int | None:
    """Runs the current command in `gpus` processes, if the user requests several processes.

    Args:
        gpus: the number of processes; None if the user did not state a number.
        spec: the spec to run. The spec determines the devices.
        target: the target to run; None for the default target.
        world: the processes that already run the command; None for this process alone.

    Returns:
        The exit code of the processes. None if the function started no processes. The caller must then run the command.

    Raises:
        UsageError: if `world` does not have `gpus` processes, or the user gave options of torchrun without `gpus`.
        EnvironmentFailure: if this machine does not have enough GPUs.
    """
    from specc.runtime.distributed.launch import launch, launch_with_torchrun, require_devices, started_here

    command, torchrun = [sys.executable, "-P", "-m", "specc.cli", *given_arguments()], torchrun_options()
    if torchrun and gpus is None:
        raise click.UsageError("options of torchrun after `--` need --gpus N, the number of processes on this machine")
    if gpus is None or world is not None:
        if gpus is not None and gpus != (here := started_here(world.size)):
            raise click.UsageError(f"--gpus is {gpus}, but torchrun started {here} processes on this machine")
        return None
    require_devices(gpus, spec, target)
    if torchrun:
        return launch_with_torchrun(gpus, torchrun, command, say)
    return None if gpus == 1 else launch(gpus, command, say)


def end_with_parent() -> None:
    """Makes this process end if the sweep that started this process is killed. Does nothing for a process that no sweep
    started.
    """
    if "SPECC_LAUNCHER" in os.environ and "RANK" not in os.environ:
        from specc.runtime.distributed.launch import end_with_launcher

        end_with_launcher()


def joined_world() -> Any:
    from specc.runtime.distributed.world import joined

    return joined()
