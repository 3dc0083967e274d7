"""The help of commands, which rich_click prints.

rich_click is imported only for help and for usage errors, because its import takes 3 % of the time of `specc validate`.
"""

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich_click import RichContext


class HelpContext(click.Context):
    """A context that prints help and usage with rich_click.

    Each usage error has a context, which names the command. Click's parser raises some errors without a context.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if isinstance(error, click.UsageError) and error.ctx is None:
            error.ctx = self
        return super().__exit__(kind, error, traceback)

    def get_help(self) -> str:
        self.color = True  # rich has already decided whether the text has colors
        return self._rich().get_help()

    def get_usage(self) -> str:
        return self._rich().get_usage()

    def _rich(self) -> "RichContext":
        import rich_click as rich

        class Group(rich.RichGroup):
            def list_commands(self, ctx: click.Context) -> list[str]:
                return list(self.commands)

        rich.rich_click.STYLE_HELPTEXT = ""
        kind = (
            partial(Group, commands=self.command.commands)
            if isinstance(self.command, click.Group)
            else rich.RichCommand
        )
        shown = kind(name=self.command.name, params=self.command.params, help=self.command.help)
        names = self.help_option_names
        return rich.RichContext(shown, parent=self.parent, info_name=self.info_name, help_option_names=names)
