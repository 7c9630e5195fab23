"""The command `kvtrie profile`."""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping

from kvtrie.errors import KvtrieError


class Kvtrie:
    """Runs the command. Its progress goes to the terminal, its errors become KvtrieError.

    Thread-safe.
    """

    def __init__(self, program: str | None = None):
        """program: path of the command; None: it is looked for in PATH."""
        found = shutil.which(program or "kvtrie")
        if found is None:
            raise KvtrieError(f"{program}: is no program that can be run" if program else
                              "no command kvtrie in PATH: build target kvtrie, and name it with --kvtrie")
        self._program = found

    def digest(self) -> str:
        """Names the program by its content: another one may fit and code otherwise."""
        return hashlib.sha256(pathlib.Path(self._program).read_bytes()).hexdigest()

    def profile(self, verb: str, *arguments: object, flags: Mapping[str, object] | None = None) -> dict:
        """Runs `kvtrie profile VERB ARGUMENTS --FLAG VALUE`, and gives the JSON object that it prints.

        A flag that is True has no value; one that is None or False is left out.
        """
        command = [self._program, "profile", verb, *map(str, arguments), "--json"]
        for flag, value in (flags or {}).items():
            if value is None or value is False:
                continue
            command.append(f"--{flag}" if value is True else f"--{flag}={value}")
        sys.stderr.flush()
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                                  if verb == "code" else None, text=True, check=False)
        except OSError as error:
            raise KvtrieError(f"{self._program}: cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            said = (done.stderr or "").strip() or "see above"
            raise KvtrieError(f"kvtrie profile {verb}: exit code {done.returncode}: {said}")
        try:
            answer = json.loads(done.stdout)
        except ValueError as error:
            raise KvtrieError(f"kvtrie profile {verb}: printed no JSON; is {self._program} of this release?") from error
        return answer if isinstance(answer, dict) else {}

    def put(self, path: pathlib.Path, target: str) -> str:
        """Stores a profile with a server, and gives its id."""
        answer = self.profile("put", path, flags={"server": target})
        return answer.get("profile_id", "")
