"""A kvtrie-server, or a kvtrie-worker, of one's own: started, killed, started again."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

_START_SECONDS = 60
_STOP_SECONDS = 60


def server_binary() -> pathlib.Path:
    """The built server: below KVTRIE_BUILD, default build/release.

    Errors: FileNotFoundError says how to build it.
    """
    return _binary("kvtrie-server")


def worker_binary() -> pathlib.Path:
    """The built worker; as server_binary."""
    return _binary("kvtrie-worker")


def _binary(name: str) -> pathlib.Path:
    root = pathlib.Path(__file__).resolve().parents[2]
    build = pathlib.Path(os.environ.get("KVTRIE_BUILD") or root / "build" / "release")
    path = build / name
    if path.is_file():
        return path.resolve()
    raise FileNotFoundError(f"no {name} below {build}: run tests/run.sh --stage build-release")


@dataclasses.dataclass(frozen=True)
class Addresses:
    listen: str
    admin: str  # of a worker: empty
    metrics: str


class _Process:
    """At most one process of a program that says in a ready file when it serves.

    Use as a context manager: its end kills the process and, after an exception, prints its log.
    """

    def __init__(self, command: list[str], log_path: pathlib.Path, ready_path: pathlib.Path):
        self.log_path = log_path
        self._ready_path = ready_path
        self._command = [*command, f"--ready_file={ready_path}"]
        self._process: subprocess.Popen | None = None

    def __enter__(self):
        return self

    def __exit__(self, exception_type, *_) -> None:
        try:
            if exception_type is not None and self._process is not None:
                print(f"server (exit code so far {self._process.poll()}):\n{self._log_tail()}",
                      file=sys.stderr)
        finally:
            self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> Addresses:
        """Returns once the server serves. Errors: RuntimeError with the end of its log."""
        self._ready_path.unlink(missing_ok=True)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=log, env=_environment())
        deadline = time.monotonic() + _START_SECONDS
        while not self._ready_path.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self._log_tail()}")
            time.sleep(0.01)
        ready = json.loads(self._ready_path.read_text(encoding="utf-8"))
        return Addresses(ready["listen"], ready.get("admin", ""), ready["metrics"])

    def kill(self) -> None:
        """kill -9. Nothing happens where no server runs."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """SIGTERM. Errors: RuntimeError unless the server ends by itself, with exit code 0."""
        self._process.terminate()
        try:
            code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = "none in time"
        if code != 0:
            raise RuntimeError(f"the server's exit code is {code}:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        if not self.log_path.exists():
            return "its log is gone"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])


class ServerProcess(_Process):
    """One data folder and at most one server process on it."""

    def __init__(self, binary: pathlib.Path, folder: pathlib.Path, flags: tuple[str, ...] = ()):
        super().__init__([
            str(binary), f"--data_dir={folder / 'data'}", "--listen=127.0.0.1:0",
            "--admin_listen=127.0.0.1:0", "--http_listen=127.0.0.1:0", *flags
        ], folder / "server.log", folder / "ready.json")


class WorkerProcess(_Process):
    """At most one worker process; its log lies in the folder."""

    def __init__(self, binary: pathlib.Path, folder: pathlib.Path, flags: tuple[str, ...] = ()):
        super().__init__([str(binary), "--listen=127.0.0.1:0", "--http_listen=127.0.0.1:0", *flags],
                         folder / "worker.log", folder / "worker-ready.json")


def _environment() -> dict[str, str]:
    """Without the variables of build and tests: the server refuses KVTRIE_ names that it does not know."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVTRIE_")}
