"""A mistake of fusegrad while a command ran: a file that shows it again, and where it lies.

The file holds the call as a script (the class by its module, or its source), then versions, the command and the
traceback as comments.
"""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cache import entry_files
from ..cache import store as cache
from ..check.reproducer import source_of
from .arguments import call_of
from .output import write_beside

CALLS = {
    "explain": "print(fusegrad.explain({call}))",
    "check": "fusegrad.check({call})",
    "bisect": "fusegrad.bisect({call})",
    "export": 'print(fusegrad.export({call}, format="py"))',
    "profile": "print(fusegrad.profile({call}))",
    "tune": "from fusegrad.runtime.profile.tuning import tune_function\n\nprint(tune_function({call}))",
}
SCRIPT = '''"""An internal error of `fusegrad {command}`, seen with {versions}."""

{body}

# the command line: {arguments}
# {traceback}
'''


def write_report(arguments: Sequence[str], options: Any, error: BaseException) -> Path:
    """The file, in the working folder where that can be written to, else where temporary files are."""
    name = f"fusegrad-error-{options.command}-{cache.key_of(*arguments, type(error).__name__)[:8]}.py"
    return write_beside(name, script(arguments, options, error)).absolute()


def script(arguments: Sequence[str], options: Any, error: BaseException) -> str:
    """The text of the file."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    versions = {"Python": platform.python_version(), **entry_files.versions()}
    return SCRIPT.format(
        command=options.command,
        versions=", ".join(f"{name} {version}" for name, version in versions.items() if version),
        body=_body(arguments, options),
        arguments=" ".join(arguments),
        traceback=trace.replace("\n", "\n# "),
    )


def _body(arguments: Sequence[str], options: Any) -> str:
    """The call, of the very class; where that is not to be had, the command line itself."""
    try:
        return _call(options)
    except Exception:
        return f"import sys\n\nfrom fusegrad.__main__ import main\n\nsys.exit(main({list(arguments)!r}))"


def _call(options: Any) -> str:
    target, args = call_of(options)
    user = vars(target).get("_fusegrad_user_class", target) if isinstance(target, type) else target
    source = source_of(user, user.__name__)
    call = ", ".join([user.__name__, *map(repr, args)])
    file = str(getattr(sys.modules[user.__module__], "__file__", ""))
    folder = f"import sys\n\nsys.path.insert(0, {str(Path(file).parent)!r})\n"
    return f"{folder}import fusegrad\n{source}\n\n{CALLS[options.command].format(call=call)}"
