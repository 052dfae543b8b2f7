"""``python -m nvprof_kit`` is ``nvprof-kit``."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def main() -> NoReturn:
    """Import the command line and run it. Ctrl-C meanwhile ends quietly, with the status that it has later.

    The process ends without taking its modules apart one by one, which takes an eighth of a second with pandas.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from nvprof_kit._cli import main as run

    signal.signal(signal.SIGINT, before)
    try:
        run()
    except SystemExit as end:
        if threading.active_count() > 1 or not isinstance(end.code, int):
            raise
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(end.code)


if __name__ == "__main__":
    main()
