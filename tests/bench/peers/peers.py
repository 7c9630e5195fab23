"""The peers: how each is installed, started and measured. One class per peer.

Every peer gets the same blocks: incompressible, put under fresh keys into a fresh server, read
back and checked. Servers and clients sit on 127.0.0.1.
"""

import contextlib
import dataclasses
import json
import pathlib
import urllib.request

from environment import SOURCES, Environment, PeerError, drop_page_cache
from processes import Server, free_port, run_client

LOOKUP_BLOCK_BYTES = 256 << 10
LOOKUP_KEYS = 256  # blocks of a prompt of 4,096 tokens
LOOKUP_REPEATS = 100
LOOKUP_PROMPTS = 16
DISK_THREADS = (1, 4)
DISK_TURNS = 2


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one round asks of each peer."""

    block_sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]  # (clients, blocks per request)
    bytes_moved: int  # per put and per get
    disk_bytes_moved: int

    def block_count(self, block_bytes):
        return self.bytes_moved // block_bytes

    def cells(self):
        for block_bytes in self.block_sizes:
            for clients, batch in self.shapes:
                yield block_bytes, clients, batch

    def looks_up(self, block_bytes, clients, batch):
        return (block_bytes, clients, batch) == (LOOKUP_BLOCK_BYTES, 1, 1)


class Peer:
    """Base: `install` once, then `measure` once per round, which yields rows."""

    name: str

    def __init__(self, environment: Environment, build: pathlib.Path):
        self.environment = environment
        self.build = build

    def install(self):
        pass

    def measure(self, workload: Workload):
        raise NotImplementedError


class TcpFloor(Peer):
    name = "tcp"

    def install(self):
        self.program = self.environment.c_program("tcp_floor")

    def measure(self, workload):
        for block_bytes, clients, batch in workload.cells():
            for op in ("put", "get"):
                yield from run_client([
                    self.program, "--op", op, "--block-bytes", block_bytes, "--clients", clients,
                    "--batch", batch, "--blocks", workload.block_count(block_bytes)])


class PayloadStore(Peer):
    """kvtrie's own block files, in process: what its network and index add is left out. Beside
    them (rows of peer o_direct) the floor of any store on disk: blocks at fixed places of one
    preallocated file, in turns with the store, since the speed of a disk changes by the minute."""

    name = "payload-store"

    def install(self):
        self.program = built_program(self.build, "payload_store_bench")

    def measure(self, workload):
        for block_bytes in workload.block_sizes:
            for threads in DISK_THREADS:
                yield from run_client([
                    self.program, "--threads", threads, "--block-bytes", block_bytes,
                    "--blocks", workload.disk_bytes_moved // block_bytes,
                    "--raw", "--rounds", DISK_TURNS,
                    "--path", self.environment.fresh_folder(self.name)])


class Redis(Peer):
    """Redis through a client that copies nothing twice: better than any stock client."""

    name = "redis"
    persistence = ("--appendonly", "no")

    def install(self):
        self.environment.debian_packages("redis-server")
        self.program = self.environment.c_program("redis_client")

    def measure(self, workload):
        for key_space, (block_bytes, clients, batch) in enumerate(workload.cells()):
            with self._server() as (server, port):
                client = [self.program, "--port", port, "--server-pid", server.pid,
                          "--key-space", key_space, "--block-bytes", block_bytes,
                          "--clients", clients, "--blocks", workload.block_count(block_bytes)]
                for op in ("put", "get"):
                    yield from run_client([*client, "--batch", batch, "--op", op])
                if workload.looks_up(block_bytes, clients, batch):
                    yield from run_client([*client, "--batch", LOOKUP_KEYS, "--op", "lookup",
                                           "--repeat", LOOKUP_REPEATS])

    @contextlib.contextmanager
    def _server(self):
        folder, port = self.environment.fresh_folder(self.name), free_port()
        with Server(["redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", folder,
                     "--loglevel", "warning", "--save", "", *self.persistence],
                    folder / "log") as server:
            server.wait_for_port(port)
            yield server, port


class RedisAof(Redis):
    name = "redis-aof"
    # Without the last option Redis forks and rewrites its file in the middle of a run.
    persistence = ("--appendonly", "yes", "--appendfsync", "everysec",
                   "--auto-aof-rewrite-percentage", "0")


class PythonPeer(Peer):
    """A peer whose client is a Python module, driven by python_client.py."""

    client_variables: dict[str, str] = {}
    warm_up_bytes = 0

    def measure_store(self, workload, port, server_pids, clients):
        batches = [batch for some, batch in workload.shapes if some == clients]
        return run_client([
            self.python, SOURCES / "python_client.py", "--store", self.name, "--port", port,
            "--server-pids", comma_list(server_pids), "--clients", clients,
            "--block-bytes", comma_list(workload.block_sizes), "--batches", comma_list(batches),
            "--bytes", workload.bytes_moved, "--warm-up-bytes", self.warm_up_bytes],
            **self.client_variables)


class Mooncake(PythonPeer):
    """Master and segment in two processes; the client lends no memory."""

    name = "mooncake"
    # MC_STORE_MEMCPY=0: never take the short cut of copying within the client's machine.
    client_variables = {"MC_STORE_MEMCPY": "0", "GLOG_minloglevel": "2"}
    segment_bytes = 1 << 30
    warm_up_bytes = segment_bytes // 4 * 3  # a segment in use has all its pages

    def install(self):
        # The wheel's TCP build, too, links against the RDMA libraries.
        self.environment.debian_packages("libibverbs1", "librdmacm1", "libnuma1")
        self.python = self.environment.venv(
            "mooncake", ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.2.6"])

    def measure(self, workload):
        for clients in sorted({clients for clients, _ in workload.shapes}):
            folder, port = self.environment.fresh_folder(self.name), free_port()
            master = Server([self._master_program(), "--rpc_address", "127.0.0.1",
                             "--rpc_port", port, "--metrics_host", "127.0.0.1",
                             "--metrics_port", free_port(), "--logtostderr=true",
                             "--minloglevel=1"], folder / "master.log")
            segment = Server([self.python, SOURCES / "mooncake_segment.py", port,
                              self.segment_bytes], folder / "segment.log",
                             **self.client_variables)
            with master:
                master.wait_for_port(port)
                with segment:
                    segment.wait_until(lambda: "ready" in segment.log_text().split())
                    yield from self.measure_store(workload, port, [master.pid, segment.pid],
                                                  clients)

    def _master_program(self):
        packages = self.python.parent.parent / "lib"
        for program in packages.glob("*/site-packages/mooncake/mooncake_master"):
            return program
        raise PeerError("mooncake_master is not in the package")


class LMCache(PythonPeer):
    """LMCache's lm:// server."""

    name = "lmcache"
    client_variables = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING",
                        "PYTHONWARNINGS": "ignore"}

    def install(self):
        # Without dependencies, then only what the server and its messages import. Nearly all of it
        # is PyTorch, which has no smaller build on PyPI than the one with CUDA.
        self.python = self.environment.venv(
            "lmcache", ["--no-deps", "lmcache==0.5.6"],
            ["torch==2.15.0", "numpy==2.2.6", "aiohttp", "cachetools", "numba",
             "prometheus_client<=0.24.1", "psutil", "py-cpuinfo", "pyyaml", "requests",
             "sortedcontainers"])

    def measure(self, workload):
        for clients in sorted({clients for clients, _ in workload.shapes}):
            folder, port = self.environment.fresh_folder(self.name), free_port()
            with Server([self.python, "-m", "lmcache.v1.server", "127.0.0.1", port],
                        folder / "log", **self.client_variables) as server:
                server.wait_for_port(port, 120)
                yield from self.measure_store(workload, port, [server.pid], clients)


class Kvtrie(Peer):
    """kvtrie over TCP. Each cell: put into a fresh store, get, then get again after the server
    was restarted and the page cache dropped."""

    name = "kvtrie"
    lane = "grpc"

    def install(self):
        self.server_program = built_program(self.build, "kvtrie-server")
        self.client_program = built_program(self.build, "kvtrie")

    def measure(self, workload):
        for block_bytes, clients, batch in workload.cells():
            folder = self.environment.fresh_folder(self.name)
            blocks = workload.block_count(block_bytes)
            cell = {"block_bytes": block_bytes, "clients": clients, "batch": batch}
            with self._server(folder) as address:
                yield self._row(address, "put", cell, blocks)
                yield self._row(address, "get", cell, blocks)
                if self.lane == "grpc" and workload.looks_up(block_bytes, clients, batch):
                    for prompts in (1, LOOKUP_PROMPTS):
                        yield self._lookup_row(address, block_bytes, blocks, prompts)
            if self.lane == "grpc":
                yield self._cold_row(folder, cell, blocks) | {"op": "get_disk"}

    @contextlib.contextmanager
    def _server(self, folder):
        ready_file = folder / "ready.json"
        ready_file.unlink(missing_ok=True)
        with Server([self.server_program, "--data_dir", folder / "store",
                     "--listen", "127.0.0.1:0", "--admin_listen", "127.0.0.1:0",
                     "--http_listen", "127.0.0.1:0", "--ready_file", ready_file],
                    folder / "log") as server:
            ready = server.wait_until(lambda: read_json(ready_file))
            server.wait_until(lambda: memory_is_taken(ready["metrics"]))
            yield ready["listen"]

    def _row(self, address, op, cell, blocks, *flags):
        """The CLI's row; one that failed does not take the other cells along."""
        try:
            return run_client([
                self.client_program, "--server", address, "bench", op,
                "--block-bytes", cell["block_bytes"], "--blocks", blocks,
                "--clients", cell["clients"], "--batch", cell["batch"], "--json",
                "--lane", self.lane, *flags])[-1] | cell
        except PeerError as error:
            return {"op": op, "reason": str(error)} | cell

    def _cold_row(self, folder, cell, blocks):
        try:
            drop_page_cache()
        except PeerError as error:
            return {"reason": str(error)} | cell
        with self._server(folder) as address:
            return self._row(address, "get", cell, blocks, "--cold")

    def _lookup_row(self, address, block_bytes, blocks, prompts):
        cell = {"block_bytes": block_bytes, "clients": 1, "batch": LOOKUP_KEYS}
        row = self._row(address, "lookup", cell, blocks, "--prompts", prompts)
        return row | {"batch": LOOKUP_KEYS * prompts}  # keys per request, as with every peer


class KvtrieShm(Kvtrie):
    """kvtrie's shared memory lane between processes of one host."""

    name = "kvtrie-shm"
    lane = "shm"


PEERS = {peer.name: peer for peer in (TcpFloor, Redis, RedisAof, Mooncake, LMCache,
                                      PayloadStore, Kvtrie, KvtrieShm)}
ROW_ORDER = ("o_direct", *PEERS)


def memory_is_taken(metrics_address):
    """Whether the server has what it takes from the system after its start, in the background."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as page:
        values = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines()
                      if not line.startswith("#"))
    taken, limit = (float(values[f"kvtrie_memory_{name}_bytes"])
                    for name in ("prefaulted", "tier_limit"))
    return taken >= limit


def built_program(build, name):
    program = build / name
    if not program.exists():
        raise PeerError(f"{name} is not in the build folder")
    return program


def read_json(path):
    """The object in the file, or None while it is not there or not whole."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def comma_list(numbers):
    return ",".join(str(number) for number in numbers)
