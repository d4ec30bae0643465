"""The `lmtier` command: parses the arguments, runs a subcommand from `commands`, and reports errors."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import NoReturn

from lmtier._version import __version__
from lmtier.config import suggest
from lmtier.errors import ConfigError, InUseError, LMTierError, TierError, excerpt
from lmtier.tools.commands import checking, forgetting, planning, prompts, serving, watching
from lmtier.tools.exits import Exit
from lmtier.tools.terminal import ReaderGone, complain, say

_COMMANDS = tuple(
    command
    for group in (serving, watching, forgetting, prompts, checking, planning)
    for command in group.COMMANDS
)
_NAMES = [command.name for command in _COMMANDS]


def main(argv: Sequence[str] | None = None) -> Exit:
    """Runs the command, and returns an `Exit`."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        parser = make_parser()
        if not arguments:
            say(parser.format_help().rstrip())
            return Exit.MISUSE
        if not arguments[0].startswith("-") and arguments[0] not in _NAMES:
            raise ConfigError(f"there is no command {excerpt(arguments[0])}{suggest(arguments[0], _NAMES)}")
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise ConfigError(
                f"{excerpt(unknown[0])} is no argument of lmtier {arguments[0]}; "
                f"lmtier {arguments[0]} --help shows what is"
            )
        ended: Exit = args.run(args)
        return ended
    except ReaderGone:
        return Exit.NO_READER
    except LMTierError as error:
        complain(str(error))
        if isinstance(error, InUseError):
            return Exit.TRY_AGAIN
        return Exit.MISUSE if isinstance(error, ConfigError | TierError) else Exit.NO
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence, as for each other mistake."""
        raise ConfigError(f"{message}; {self.prog} --help shows the usage")


def make_parser() -> ArgumentParser:
    parser = _Parser(
        prog="lmtier",
        description="Tiered KV-cache offload for LLM serving.",
        epilog="exit codes:\n" + "\n".join(f"  {code:<3}  {code.meaning}" for code in Exit),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lmtier {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        description = command.description or f"{command.help[:1].upper()}{command.help[1:]}."
        subparser = subparsers.add_parser(command.name, help=command.help, description=description)
        command.options(subparser)
        subparser.set_defaults(run=command.run)
    return parser
