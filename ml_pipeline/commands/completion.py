"""completion: let the shell complete commands, options, run folders and settings with Tab."""

from __future__ import annotations

import argparse
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from ml_pipeline.config.train import RUN_ROOT
from ml_pipeline.shelves import command_modules

HELP = 'complete words with Tab: eval "$(ml-pipeline completion bash)", also zsh and fish'

_OWN_KEYS_OF_STUDY = ("n_trials=", "n_jobs=", "space=", "storage=", "trust=")

# A shell splits words in its own way, so each passes the whole line. No space follows a key.
_SCRIPTS = {
    "bash": """
_ml_pipeline() {
    local IFS=$'\\n'
    COMPREPLY=($("${COMP_WORDS[0]}" completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    if [[ ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace; fi
}
complete -o default -F _ml_pipeline ml-pipeline
""",
    "zsh": """
_ml_pipeline() {
    local -a found
    found=("${(@f)$("${words[1]}" completion zsh --line "$LBUFFER" 2>/dev/null)}")
    if [[ -z "$found" ]]; then _files; return; fi
    compadd -Q -S '' -- ${(M)found:#*[=.]}
    compadd -Q -- ${found:#*[=.]}
}
compdef _ml_pipeline ml-pipeline
""",
    "fish": """
complete -c ml-pipeline -a '(ml-pipeline completion fish --line (commandline -cp | string collect))'
""",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(_SCRIPTS))
    parser.add_argument("--line", help="print the words that may end this line; for the shell")


def run(options: Namespace) -> None:
    if options.line is None:
        print(_SCRIPTS[options.shell].strip())
        return
    current, found = completions(options.line)
    # bash completes what follows the last = or : of a word.
    skipped = max(current.rfind("="), current.rfind(":")) + 1 if options.shell == "bash" else 0
    for word in found:
        print(word[skipped:])


def completions(line: str) -> tuple[str, list[str]]:
    """The word at the end of the line, and the words that may replace it."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote is open
        words = line.split()
    current = words.pop() if not line[-1:].isspace() else ""
    found = dict.fromkeys(_found(words[1:], current))
    return current, [each for each in found if each.startswith(current)]


def _found(words: Sequence[str], current: str) -> Iterable[str]:
    """``words``: those before the current one, without the name of the program."""
    commands = {name.replace("_", "-"): module for name, module in command_modules().items()}
    if not words:
        return sorted([*commands, "--help", "--version"])
    if words[0] not in commands:
        return []
    if words[0] == "train":
        return _settings(words[1:], current)
    if words[:2] == ["study", "start"] and len(words) > 2:
        return [*_OWN_KEYS_OF_STUDY, *_settings(words[3:], current)]
    parser = ArgumentParser()
    import_module(commands[words[0]]).add_arguments(parser)
    return _arguments(parser, words[1:], current)


def _settings(words: Sequence[str], current: str) -> Iterable[str]:
    from ml_pipeline.assembly.completion import words_of_train

    key, has_value, _ = current.partition("=")
    if has_value and key in ("resume", "init_from"):
        return (f"{key}={run}" for run in _runs())
    return words_of_train(words, current)


def _arguments(parser: ArgumentParser, words: Sequence[str], current: str) -> Iterator[str]:
    """Options, their choices, subcommands, runs and studies."""
    options = {name: each for each in parser._actions for name in each.option_strings}
    last = options.get(words[-1]) if words else None
    if last is not None and last.nargs != 0:
        yield from _values(last)
        return
    if current.startswith("-"):
        yield from (name for name in options if name.startswith("--"))
        return
    plain = [word for word in words if not word.startswith("-")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            if not plain:
                yield from action.choices
            elif plain[0] in action.choices:
                rest = words[words.index(plain[0]) + 1 :]
                yield from _arguments(action.choices[plain[0]], rest, current)
        elif not action.option_strings:
            yield from _values(action)


def _values(action: argparse.Action) -> Iterable[str]:
    if action.choices is not None:
        return map(str, action.choices)
    name = str(action.metavar or action.dest)
    if re.search("run|policy|player", name, re.IGNORECASE):
        return _runs()
    if name == "NAME" and action.dest == "name":  # of a study
        return [path.parent.name for path in sorted(Path("studies").glob("*/study.yaml"))]
    return []


def _runs() -> Iterator[str]:
    yield "latest"
    for path in sorted(Path(RUN_ROOT).glob("*/*/config.yaml"), reverse=True):
        yield str(path.parent)
