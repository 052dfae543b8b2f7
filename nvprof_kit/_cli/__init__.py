"""The command line: it runs a verb, and turns errors into one line and an exit status.

Verbs import what they need when they run, so that ``--help`` and ``--version`` are fast.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from nvprof_kit import __version__
from nvprof_kit._cli.verb import group
from nvprof_kit._result.formats import title
from nvprof_kit.errors import NvprofKitError

_COMPLETE = "_NVPROF_KIT_COMPLETE"
"""Set by a shell that asks for completions, as click's scripts do."""

_OBJECTS = 1_000_000
"""New objects until Python looks for cyclic garbage; its default is some hundred or thousand, but importing pandas
alone makes a hundred thousand that live until the end, and each collection visits them all.
"""


click.version_option(__version__, message="nvprof-kit %(version)s", help="Print the version and exit.")(group)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 a gate failed, 2 bad input or usage, 3 a needed tool is missing, 70 a
    defect of this package.

    Errors are one line on stderr; for a defect, the line has the path of a file with the traceback.
    """
    _prepare_streams()
    if instruction := os.environ.get(_COMPLETE):
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(group, {}, "nvprof-kit", _COMPLETE, instruction))
    usual = gc.get_threshold()
    if usual[0]:  # 0: it is switched off
        gc.set_threshold(max(usual[0], _OBJECTS), *usual[1:])
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        with group.make_context("nvprof-kit", arguments) as context:
            group.invoke(context)
        sys.stdout.flush()
        status = 0
    except click.exceptions.Exit as end:
        status = end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = error.exit_code
    except click.ClickException as error:
        where = getattr(getattr(error, "ctx", None), "command_path", "nvprof-kit")
        status = _complain(f"{error.format_message().rstrip('.')} (see {where} --help)", error.exit_code)
    except NvprofKitError as error:
        status = _complain(str(error), error.exit_code)
    except BrokenPipeError:  # stdout was closed early: `nvprof-kit layers run.sqlite | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except (KeyboardInterrupt, click.Abort):
        status = 128 + signal.SIGINT
    except MemoryError:
        status = _complain("out of memory; free some, raise `ulimit -v`, or capture fewer steps", 2)
    except OSError as error:
        status = _complain(f"{error.filename or 'stdout'}: {error.strerror or error}", 2)
    except Exception as error:
        status = _complain(_unforeseen(error), os.EX_SOFTWARE)
    finally:
        gc.freeze()  # all objects are then old, and the usual threshold has not to look through them at once
        gc.unfreeze()
        gc.set_threshold(*usual)
    atexit.register(gc.freeze)  # else Python looks through all that pandas imported once more, for 90 ms
    sys.exit(status)


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (``2>&-``): no opened file may get its descriptor
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open until the process ends
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # print ``?`` for characters that the terminal's encoding lacks


def _complain(message: str, exit_code: int) -> int:
    print("nvprof-kit:", title(message), file=sys.stderr)
    return exit_code


def _unforeseen(error: Exception) -> str:
    """The message for a defect of this package; the traceback goes to a separate file."""
    error_text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="nvprof-kit-", suffix=".traceback", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            traceback.print_exception(error, file=file)
    except OSError:
        traceback.print_exception(error)
        return f"a defect of nvprof-kit ({error_text}): please report it with the traceback above"
    return f"a defect of nvprof-kit ({error_text}): please report it with {file.name}"
