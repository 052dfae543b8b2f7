"""``python -I map_child.py``: map one capture after the other; started by `nvprof_kit._api.map_workers`.

Stdin is a stream of pickles: the search path of modules, then tasks. Stdout is a stream of pickles: an empty list when
tasks can come, then for each task the names of its maps, or the exception and its traceback as text.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback


def main() -> None:
    """Answer the tasks on stdin until it ends."""
    tasks = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not enter the answers
    sys.path[:] = pickle.load(tasks)
    from nvprof_kit._trace.files.own_process import keep_freed_memory, switch_threads_often

    keep_freed_memory()  # before NumPy is imported
    switch_threads_often()
    from nvprof_kit._api.job_maps import map_capture

    answers.write(pickle.dumps([]))
    answers.flush()
    while True:
        try:
            task = pickle.load(tasks)
        except EOFError:
            return
        try:
            answer = pickle.dumps(map_capture(task))
        except Exception as error:
            answer = _as_pickle(error, traceback.format_exc())
        answers.write(answer)
        answers.flush()


def _as_pickle(error: Exception, text: str) -> bytes:
    try:
        sent = pickle.dumps((error, text))
        pickle.loads(sent)  # some exceptions can be pickled, but not read back
    except Exception:
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))
    return sent


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # after what the task left on the disk was removed
        sys.exit(128 + signal.SIGINT)
