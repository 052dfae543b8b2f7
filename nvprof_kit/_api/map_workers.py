"""Processes that map captures.

Those of `multiprocessing` import the program that starts them, so a script that calls `open_job` outside of
``if __name__ == "__main__"`` would run again in each. These are interpreters that run `map_child.py` and nothing else.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Protocol

from nvprof_kit.errors import NvprofKitError, ToolError

_LONGEST_END_S = 5.0
"""How long an interrupted process may take to end."""


class Task(Protocol):
    """A `job_maps.MapTask`."""

    @property
    def capture(self) -> str:
        """The capture's path."""


def map_in_processes(tasks: Sequence[Task], count: int) -> Iterator[list[str]]:
    """Map captures in ``count`` processes, which end when all are mapped, one fails, or the iterator is closed.

    Yields:
        Names of each capture's maps, in the order of the tasks.

    Raises:
        CaptureError: A capture cannot be read, or its rank is unknown.
        ToolError: A process was killed.
    """
    workers = [_Worker() for _ in range(count)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def map_one(task: Task) -> list[str]:
        worker = idle.get()
        try:
            return worker.map(task)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(count)
    try:
        yield from pool.map(map_one, tasks)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.interrupt()
        for worker in workers:
            worker.wait()
        pool.shutdown()
        for worker in workers:
            worker.close()


class RemoteTraceback(Exception):
    """Where a process of its own raised the exception that this is the cause of."""

    def __str__(self) -> str:
        """The traceback as text."""
        return f'\n"""\n{self.args[0]}"""'


class _Worker:
    """A process that maps one capture at a time."""

    def __init__(self) -> None:
        # -I: import nothing from the current folder or the environment before this process's path is set
        command = [sys.executable, "-I", str(Path(__file__).with_name("map_child.py"))]
        # Ctrl-C in a terminal interrupts this process only, which then ends the others
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._ready = False
        self._send(sys.path)

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        tasks, answers = self._process.stdin, self._process.stdout
        assert tasks is not None and answers is not None
        return tasks, answers

    def _send(self, message: Any) -> None:
        tasks, _ = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `map` finds when it reads the answer
            tasks.write(pickle.dumps(message))
            tasks.flush()

    def _answer(self) -> Any:
        return pickle.load(self._pipes()[1])

    def map(self, task: Task) -> list[str]:
        """Map a capture in this process."""
        try:
            self._ready = self._ready or self._answer() == []
            self._send(task)
            answer = self._answer()
        except (EOFError, pickle.UnpicklingError):
            raise ToolError(f"{task.capture}: {self._ended()}") from None
        if isinstance(answer, list):
            return answer
        error, text = answer
        raise error from (None if isinstance(error, NvprofKitError) else RemoteTraceback(text))

    def _ended(self) -> str:
        status = self._process.wait()
        if status >= 0:
            return f"the process that maps it ended with status {status}"
        name = signal.Signals(-status).name
        hint = "; if memory ran out, use fewer workers" if -status == signal.SIGKILL else ""
        return f"the process that maps it was ended by {name}{hint}"

    def interrupt(self) -> None:
        """End the process; a task that runs removes its temporary files first."""
        if self._ready:
            self._process.send_signal(signal.SIGINT)
        else:
            self._process.kill()

    def wait(self) -> None:
        """Wait until the interrupted process has ended."""
        try:
            self._process.wait(_LONGEST_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close the pipes of the ended process, when no thread uses them."""
        tasks, answers = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # of a task that it did not read
            tasks.close()
        answers.close()
