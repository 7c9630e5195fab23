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
    """Says on stderr how far something is: at once, at the end, and in between not too often."""

    def __init__(self, what: str, total: int):
        self._what, self._total = what, total
        self._start = self._last = time.monotonic()
        self._print(0)

    def show(self, done: int) -> None:
        """Says it where it is time to."""
        if time.monotonic() - self._last >= (_TERMINAL_SECONDS if _on_terminal() else _LOG_SECONDS):
            self._print(done)

    def finish(self) -> None:
        self._print(self._total, end="\n")

    def _print(self, done: int, end: str = "") -> None:
        self._last = time.monotonic()
        line = f"{self._what}: {done}/{self._total}, {self._last - self._start:.0f} s"
        if _on_terminal():
            print(f"\r{line}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _on_terminal() -> bool:
    return sys.stderr.isatty()


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
