"""What llmc's commands do that click's do not: how they end, and how they show their help."""

from __future__ import annotations

import signal
from typing import Any

import click

from llmc.errors import UserError
from llmc.terminal import OutputClosed


class MainGroup(click.Group):
    """Turns UserError into one line and exit code 2, as click does for a wrong option; a reader of the output that has
    gone and Ctrl-C into the codes that a shell has for them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"llmc: error: {error}", err=True)
            ctx.exit(2)
        except OutputClosed:
            ctx.exit(128 + signal.SIGPIPE)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first sentence of every command, which click would cut at 45 characters."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(1000)) for name in sorted(self.commands)])


_PRECISIONS = ("int8", "int4", "bf16", "fp32")


class BuildCommand(click.Command):
    """Shows the precisions as the one choice that they are."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = [(option.name, option.get_help_record(ctx)) for option in options]
        precisions = [record for name, record in records if record and name in _PRECISIONS]
        with formatter.section("Precision, one of"):
            formatter.write_dl([(flag, text.removeprefix("Precision: ")) for flag, text in precisions])
        with formatter.section("Options"):
            formatter.write_dl([record for name, record in records if record and name not in _PRECISIONS])
