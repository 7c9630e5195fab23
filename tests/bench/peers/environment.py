"""What the peers need on this machine, kept in one cached folder: packages, venvs, C programs."""

import os
import pathlib
import shutil
import subprocess
import sys

SOURCES = pathlib.Path(__file__).resolve().parent


class PeerError(Exception):
    """Why a peer has no figures; the text becomes the row's reason."""


class Environment:
    """The cached folder. A second call for the same thing costs nothing."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def debian_packages(self, *names):
        """Installs the Debian packages that are not there; that needs root."""
        missing = [name for name in names if not self._has_debian_package(name)]
        if not missing:
            return
        if os.geteuid() != 0:
            raise PeerError(f"needs Debian packages, install as root: {' '.join(missing)}")
        self._install(["apt-get", "update"])
        self._install(["apt-get", "install", "-y", "--no-install-recommends", *missing],
                      DEBIAN_FRONTEND="noninteractive")

    def venv(self, name, *installs):
        """Python of a virtual environment that holds `installs`, each one pip command's arguments.

        It is rebuilt when they change or an earlier attempt stopped half-way.
        """
        folder = self.folder / f"venv-{name}"
        python, complete = folder / "bin" / "python", folder / "complete"
        wanted = "\n".join(" ".join(install) for install in installs)
        if not complete.exists() or complete.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            self._install([sys.executable, "-m", "venv", folder])
            for install in installs:
                self._install([python, "-m", "pip", "install", "--quiet", "--no-cache-dir",
                               *install])
            complete.write_text(wanted)
        return python

    def c_program(self, name):
        """Compiles SOURCES/name.c unless the program is newer than every source."""
        program = self.folder / name
        sources = [SOURCES / f"{name}.c", *SOURCES.glob("*.h")]
        if not program.exists() or program.stat().st_mtime < max(
                source.stat().st_mtime for source in sources):
            self._install(["cc", "-O2", "-std=c17", "-D_GNU_SOURCE", "-Wall", "-o", program,
                           sources[0], "-lpthread"])
        return program

    def fresh_folder(self, name):
        """An empty folder for a server's data and logs."""
        folder = self.folder / "data" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def remove_data(self):
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def _has_debian_package(self, name):
        try:
            status = subprocess.run(["dpkg-query", "-W", "-f", "${db:Status-Status}", name],
                                    capture_output=True, text=True)
        except FileNotFoundError:
            raise PeerError("installs on Debian only: no dpkg-query") from None
        return status.stdout == "installed"

    def _install(self, command, **variables):
        command = [str(part) for part in command]
        print("  $", " ".join(command), file=sys.stderr, flush=True)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              env=os.environ | variables)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise PeerError(f"{' '.join(command[:4])}: {lines[-1]}")


def drop_page_cache():
    os.sync()
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise PeerError(f"cannot drop the page cache: {error.strerror}") from None
