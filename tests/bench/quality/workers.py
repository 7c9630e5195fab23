"""Work in processes that each hold the model, and what a person sees of it meanwhile.

One BLAS thread per process, which the model sets: the processes are the parallelism.
"""

import concurrent.futures
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import smollm2

_TERMINAL_SECONDS = 0.2  # between two lines, where each replaces the one before
_LOG_SECONDS = 10  # and where all of them stay


@functools.cache
def model() -> smollm2.SmolLM2:
    """This process's model."""
    return smollm2.SmolLM2()


class Progress:
    """Says on stderr how far something is, not too often. Nothing within the first two seconds."""

    def __init__(self, what: str, total: int):
        self._what, self._total = what, total
        self._start = time.monotonic()
        self._next = self._start + 2
        self._shown = False

    def show(self, done: int) -> None:
        """Says it where it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        terminal = sys.stderr.isatty()
        self._next = now + (_TERMINAL_SECONDS if terminal else _LOG_SECONDS)
        self._shown = True
        self._print(done, now, "" if terminal else "\n")

    def finish(self) -> None:
        if self._shown:
            self._print(self._total, time.monotonic(), "\n")

    def _print(self, done: int, now: float, end: str) -> None:
        start = "\r" if sys.stderr.isatty() else ""
        print(f"{start}{self._what}: {done}/{self._total}, {now - self._start:.0f} s", end=end,
              file=sys.stderr, flush=True)


class Pool:
    """Processes that start with the first task. Ends them when it is left as a context.

    Tasks are functions of modules and their arguments. With one process, tasks run in this one.
    """

    def __init__(self, process_count: int):
        self._process_count = process_count
        self._executor: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, what: str, tasks: Sequence[tuple[Callable, tuple]]) -> Iterator:
        """The results of all tasks, in the order of the tasks. An error of a task is raised here."""
        progress = Progress(what, len(tasks))
        for done, result in enumerate(self._results(tasks), start=1):
            progress.show(done)
            yield result
        progress.finish()

    def _results(self, tasks: Sequence[tuple[Callable, tuple]]) -> Iterator:
        if self._process_count == 1:
            for function, arguments in tasks:
                yield function(*arguments)
            return
        if self._executor is None:
            # Forked processes would inherit BLAS's threads in an unknown state.
            self._executor = concurrent.futures.ProcessPoolExecutor(
                self._process_count, multiprocessing.get_context("spawn"))
        futures = [self._executor.submit(function, *arguments) for function, arguments in tasks]
        for future in futures:
            yield future.result()
