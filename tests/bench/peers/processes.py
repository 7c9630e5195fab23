"""Servers and clients: each is started here and ended here, by its own pid."""

import json
import os
import signal
import socket
import subprocess
import time

from environment import PeerError

CLIENT_TIMEOUT_SECONDS = 600
POLL_SECONDS = 0.05


class Server:
    """A server process that lives as long as the `with` block. Its output goes to a log file."""

    def __init__(self, command, log, **variables):
        self._command = [str(part) for part in command]
        self._log = log
        self._variables = variables

    def __enter__(self):
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=log, env=os.environ | self._variables)
        self.pid = self._process.pid
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until(self, is_ready, seconds=60):
        """Polls `is_ready` until it is true; returns what it returned."""
        for _ in range(int(seconds / POLL_SECONDS)):
            ready = is_ready()
            if ready:
                return ready
            if self._process.poll() is not None:
                raise PeerError(f"{self._name()} ended at start: {self._last_words()}")
            time.sleep(POLL_SECONDS)
        raise PeerError(f"{self._name()} not ready after {seconds} s: {self._last_words()}")

    def wait_for_port(self, port, seconds=60):
        self.wait_until(lambda: accepts(port), seconds)

    def log_text(self):
        return self._log.read_text(errors="replace")

    def _name(self):
        return os.path.basename(self._command[0])

    def _last_words(self):
        lines = self.log_text().strip().splitlines()
        return lines[-1] if lines else "no message"


def run_client(command, **variables):
    """Runs a client to its end and returns the rows it printed, one JSON object per line."""
    command = [str(part) for part in command]
    # A session of its own, so that a time-out also ends the client's worker processes.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, start_new_session=True,
                          env=os.environ | variables) as process:
        try:
            output, errors = process.communicate(timeout=CLIENT_TIMEOUT_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise PeerError(f"client took over {CLIENT_TIMEOUT_SECONDS} s") from None
            raise
    name = os.path.basename(command[0])
    if process.returncode != 0:
        lines = errors.strip().splitlines() or ["no message"]
        raise PeerError(f"{name} exit code {process.returncode}: {lines[-1]}")
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if not rows:
        raise PeerError(f"{name} printed no row")
    return rows


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def accepts(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False
