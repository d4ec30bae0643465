"""The `lmtier` command: parses the arguments, runs a subcommand from `commands`, and reports errors."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from lmtier._version import __version__
from lmtier.errors import ConfigError, InUseError, LMTierError, TierError
from lmtier.tools.commands import checking, forgetting, planning, prompts, serving, watching
from lmtier.tools.terminal import complain

_GROUPS = (serving, watching, forgetting, prompts, checking, planning)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. The subcommand defines the exit statuses beside these:

    2: misuse, or settings with which it can never work. 75, as in sysexits.h: worth to try again later.
    """
    try:
        args = _parser().parse_args(argv)
        return int(args.run(args))
    except LMTierError as error:
        complain(str(error))
        if isinstance(error, InUseError):
            return os.EX_TEMPFAIL
        return 2 if isinstance(error, ConfigError | TierError) else 1
    except KeyboardInterrupt:
        return 130


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence, as for each other mistake."""
        raise ConfigError(f"{message}; {self.prog} --help shows the usage")


def _parser() -> ArgumentParser:
    parser = _Parser(prog="lmtier", description="Tiered KV-cache offload for LLM serving.")
    parser.add_argument("--version", action="version", version=f"lmtier {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (command for group in _GROUPS for command in group.COMMANDS):
        description = command.description or f"{command.help[:1].upper()}{command.help[1:]}."
        subparser = subparsers.add_parser(command.name, help=command.help, description=description)
        command.options(subparser)
        subparser.set_defaults(run=command.run)
    return parser
