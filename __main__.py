"""`fusegrad COMMAND`, `python -m fusegrad COMMAND`: one module per command.

Exit codes: 0 as asked for, 1 a mistake in what was asked, 2 compiled and eager differ, 3 a mistake of fusegrad.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from .ir.errors import FusegradError
from .runtime.commands.output import described, require_outputs
from .runtime.report.command_result import INTERNAL, OK, USERS, CommandResult
from .runtime.report.terminal import show
from .runtime.settings.suggestions import suggestion

__place_of_calls__ = "the command line"
"""The place of an error that no line of the user's raises; `argument_meant` says which of its words."""


class Command(Protocol):
    """What a command's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> CommandResult: ...


COMMANDS = {
    "demo": "train a small language model with eager and with compiled Functions, and compare",
    "explain": "say what a compiled Function becomes: kernels, bytes, what is not compiled and why",
    "check": "compare a compiled Function with the one you wrote",
    "bisect": "name the first step after which a compiled Function differs from the one you wrote",
    "export": "write a compiled Function as a Triton module, a bundle, a graph or a picture",
    "profile": "time a compiled Function, and model its kernels on a GPU",
    "bench": "measure kernels, bytes, registers and host time (part of the sources, not of a wheel)",
    "tune": "time configurations of a Function's kernels on the GPU at hand, and keep the fastest",
    "cache": "look at, check, or empty the cache of compiled kernels",
    "doctor": "say what this machine can do, and what to install for the rest",
}
"""What each command is for. Its module is imported when it is asked for: most of them need torch."""


def module_of(command: str) -> Command:
    """The module of a command."""
    module: Any = importlib.import_module(f"{__package__}.runtime.commands.{command}")
    return module  # type: ignore[no-any-return]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = [_shielded(a) for a in (sys.argv[1:] if arguments is None else arguments)]
    if not given:
        parser("")[0].print_help()
        return OK
    options = parsed(given)
    try:
        require_outputs(options)
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            answer = module_of(options.command).run(options)
        _print(options, answer)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: not an error
        return OK
    except OSError as error:
        return _refused(given, options, described(options, error))
    except FusegradError as error:
        return _failed(given, options, error) if error.speaks == "inside" else _refused(given, options, error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _failed(given, options, error)
    return answer.code


def _shielded(argument: str) -> str:
    """A negative number such as -1e-6 with a blank in front, so that it is taken for no option."""
    return f" {argument}" if re.fullmatch(r"-(\d|\.\d|inf\b)[\w.+-]*", argument) else argument


def _print(options: argparse.Namespace, answer: CommandResult) -> None:
    if options.json:
        print(json.dumps(answer.facts, indent=1, default=str))
    else:
        show(answer.blocks)
    sys.stdout.flush()


def _refused(given: Sequence[str], options: argparse.Namespace, error: FusegradError) -> int:
    text = str(error).replace(f"at:   {__place_of_calls__}\n", f"at:   {argument_meant(given, error)}\n", 1)
    print(f"fusegrad {options.command}: {text}", file=sys.stderr)
    if options.json:
        print(json.dumps({"error": {"class": type(error).__name__, "code": error.code, "message": text}}))
    return USERS


def argument_meant(given: Sequence[str], error: FusegradError) -> str:
    """The words of a command line that an error's facts name, `--target 490` say; all of them where none is named."""
    facts = " ".join(str(fact) for name, fact in error.facts.items() if name not in ("fix", "known"))
    arguments = sorted(_arguments(given), key=lambda words: words[0].startswith("-"), reverse=True)
    named = (words for words in arguments if _is_named(words[-1], facts))
    return shlex.join(next(named, ["fusegrad", *given]))


def _arguments(given: Sequence[str]) -> Iterator[list[str]]:
    """Each argument with the option before it."""
    option = ""
    for word in given[1:]:
        if word.startswith("-"):
            option, _, value = word.partition("=")
            if value:
                yield [option, value]
        else:
            yield [option, word.strip()] if option not in ("", "--args") else [word.strip()]


def _is_named(value: str, facts: str) -> bool:
    """True for a value, or one of a list with commas, that stands in a text as a word."""
    return any(re.search(rf"(?<![\w.]){re.escape(part)}(?![\w.])", facts) for part in {value, *value.split(",")} - {""})


def _failed(given: Sequence[str], options: argparse.Namespace, error: Exception) -> int:
    """A mistake of fusegrad: what went wrong in a line, and the file that shows it again."""
    from .runtime.commands import crash_report

    path = crash_report.write_report(given, options, error)
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"fusegrad {options.command}: internal error [FG900]: {what}\n  written: {path}\n"
          "  fix:     please report it with that file", file=sys.stderr)  # fmt: skip
    if options.json:
        told = {"class": type(error).__name__, "code": "FG900", "message": what, "reproducer": str(path)}
        print(json.dumps({"error": told}))
    return INTERNAL


# ------------------------------------------------------------------ the parser
class Parser(argparse.ArgumentParser):
    """Says what may have been meant, and ends with the exit code for a user's mistake."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USERS, f"{self.prog}: error: {message}{self._meant(message)}\n")

    def _meant(self, message: str) -> str:
        chosen = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if chosen:
            return _did_you_mean(chosen[1], [choice.strip("'") for choice in chosen[2].split(", ")])
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        return _did_you_mean(unknown[1], self._option_string_actions) if unknown else ""


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = suggestion(name, known)
    return f"\n  did you mean {near}?" if near else ""


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; what a command hands on to another program is in `rest`."""
    named = next((word for word in given if not word.startswith("-")), "")
    top, commands = parser(named)
    options, rest = top.parse_known_args(given)
    if options.command is None:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest and not hasattr(options, "rest"):
        commands[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options


def parser(only: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and the parser of each command. only: the one whose arguments are wanted."""
    top = Parser("fusegrad", description="Compiles custom autograd Functions into Triton kernels.")
    top.add_argument("--version", action="version", version=_version())
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        own: Any = commands.add_parser(name, help=summary, description=summary)
        if only in (None, name):
            own.add_argument("--json", action="store_true", help="print what was found as JSON")
            module_of(name).add_arguments(own)
    return top, dict(commands.choices)


def _version() -> str:
    from . import __version__

    return f"fusegrad {__version__}"


if __name__ == "__main__":
    sys.exit(main())
