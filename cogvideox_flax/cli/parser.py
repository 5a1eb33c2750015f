"""An argument parser for people: one line for a mistake, a short help first, and what was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


def rarely(action: argparse.Action) -> None:
    """Leave an option to --help-all."""
    action.rare = True  # type: ignore[attr-defined]


class Parser(argparse.ArgumentParser):
    """`--help` shows the options that most runs need, `--help-all` those that are marked by `rarely` too.

    commands: name -> its parser, of the whole command line's parser.
    overview: what is printed where no command is given.
    """

    def __init__(self, **how: Any):
        super().__init__(**how, add_help=False)
        self.commands: Mapping[str, Parser] = {}
        self.overview = ""
        self.add_argument("-h", "--help", action=_Help, help="show this help and exit")
        self.add_argument("--help-all", action=_Help, help=argparse.SUPPRESS)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """What was given, as attributes. Leaves the process with code 2 and one line where something is wrong."""
        words = list(argv)
        if not words:
            self.exit(0, self.overview)
        if self.commands and not words[0].startswith("-") and words[0] not in self.commands:
            self._refuse_command(words[0])
        args, unknown = self.parse_known_args(words)
        if unknown:
            self.commands.get(words[0], self)._refuse_option(unknown[0].partition("=")[0])
        return args

    def _refuse_command(self, name: str) -> NoReturn:
        if " " in name.strip():
            self.error(f'expected a command first; did you mean {self.prog} generate "{name}"?')
        close = get_close_matches(name, self.commands, 1)
        known = f"did you mean {close[0]}?" if close else f"known are {', '.join(self.commands)}"
        self.error(f"there is no command {name!r}; {known}")

    def _refuse_option(self, name: str) -> NoReturn:
        if not name.startswith("-"):
            self.error(f"{name!r} is not expected after options; write texts in quotes, and before the options")
        close = get_close_matches(name, [flag for action in self._actions for flag in action.option_strings], 1)
        self.error(f"there is no option {name}" + (f"; did you mean {close[0]}?" if close else ""))

    def error(self, message: str) -> NoReturn:
        """Leave with code 2 and one line."""
        self.exit(2, f"error: {message.removeprefix('argument ')} (`{self.prog} --help`)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Leave with a message, on standard output where nothing is wrong."""
        if status == 0 and message:
            print(message, end="")
            message = None
        super().exit(status, message)

    def format_help(self, whole: bool = False) -> str:
        """The help; `whole`: of all options."""
        hidden = [] if whole else [action for action in self._actions if hasattr(action, "rare")]
        texts = [action.help for action in hidden]
        positional = [action for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *map(_shown, positional), "[options]"])
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action, help_text in zip(hidden, texts, strict=True):
                action.help = help_text
        return text + (f"\n{len(hidden)} more options: {self.prog} --help-all\n" if hidden else "")


class _Help(argparse.Action):
    def __init__(self, **how: Any):
        super().__init__(**how, nargs=0, default=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, flag: str | None = None) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.exit(0, parser.format_help(whole=flag == "--help-all"))


def _shown(positional: argparse.Action) -> str:
    name = str(positional.metavar or positional.dest.upper())
    return {"*": f"[{name} ...]", "?": f"[{name}]"}.get(str(positional.nargs), name)
