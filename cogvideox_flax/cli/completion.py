"""`cogvideox completion`: a script for the shell that completes commands, options and their choices."""

from __future__ import annotations

import argparse
import shlex

from cogvideox_flax.cli.arguments import make_parser

_BASH = """\
_cogvideox() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words={commands}; else
    case "${{COMP_WORDS[1]}} $prev" in
{choices}
      *) case "${{COMP_WORDS[1]}} ${{cur:0:1}}" in
{options}
        esac;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -o bashdefault -F _cogvideox cogvideox
"""


def completion(args: argparse.Namespace) -> None:
    """Print the script."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](_options()), end="")


def _options() -> dict[str, list[tuple[list[str], list[str], str]]]:
    """Command -> the flags, the choices and the help of each of its options."""
    commands = {}
    for name, command in make_parser().commands.items():
        actions = [action for action in command._actions if action.help != argparse.SUPPRESS]
        commands[name] = [(list(each.option_strings), _choices(each), (each.help or "") % {}) for each in actions]
    return commands


def _choices(action: argparse.Action) -> list[str]:
    """What an option or a position takes, where that is few words."""
    if action.choices is not None:
        return [str(each) for each in action.choices]
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return metavar[1:-1].split(",") if metavar.startswith("{") else []  # of an option of the request


def _bash(commands: dict[str, list[tuple[list[str], list[str], str]]]) -> str:
    choices = [
        f"      {'|'.join(shlex.quote(f'{name} {flag}') for flag in flags)}) words={shlex.quote(' '.join(words))};;"
        for name, options in commands.items()
        for flags, words, _ in options
        if flags and words
    ]
    options = []
    for name, each in commands.items():
        flags = " ".join(flag for names, _, _ in each for flag in names)
        positions = " ".join(word for names, words, _ in each if not names for word in words)
        options += [f"        '{name} -') words={shlex.quote(flags)};;", f"        '{name} '*) words='{positions}';;"]
    names = shlex.quote(" ".join(commands))
    return _BASH.format(commands=names, choices="\n".join(choices), options="\n".join(options))


def _zsh(commands: dict[str, list[tuple[list[str], list[str], str]]]) -> str:
    return "#compdef cogvideox\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(commands)


def _fish(commands: dict[str, list[tuple[list[str], list[str], str]]]) -> str:
    lines = [f"complete -c cogvideox -n __fish_use_subcommand -f -a {shlex.quote(' '.join(commands))}"]
    for name, options in commands.items():
        start = f"complete -c cogvideox -n '__fish_seen_subcommand_from {name}'"
        for flags, words, what in options:
            names = [f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}" for each in flags]
            takes = [f"-xa {shlex.quote(' '.join(words))}"] if words else []
            lines.append(" ".join([start, *names, *takes, "-d", shlex.quote(what)]) if names or words else "")
    return "\n".join(filter(None, lines)) + "\n"
