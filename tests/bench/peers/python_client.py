"""Client of the peers that are reached from Python, one process per client.

Moves --bytes per put and per get for each block size and batch, then looks up keys, and prints
one JSON row per measurement. Runs in the peer's own virtual environment.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time

import numpy

LOOKUP_BLOCK_BYTES = 256 << 10
LOOKUP_KEYS = 256
WARM_UP_ID = 1 << 40  # above all measured ids


class MooncakeClient:
    """Lends no memory: each block crosses to the segment's process and back."""

    LOOKUP_REQUESTS = 400
    PUT_IS_ACKNOWLEDGED = True

    def __init__(self, port, buffer):
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        error = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 128 << 20, "tcp", "",
                                  f"127.0.0.1:{port}")
        if error:
            raise RuntimeError(f"mooncake setup: error {error}")
        self._address = buffer.ctypes.data
        if self._store.register_buffer(self._address, buffer.nbytes):
            raise RuntimeError("mooncake register_buffer failed")

    def make_key(self, block_id):
        return f"{block_id:032x}"

    def put(self, keys, block_bytes):
        if len(keys) == 1:
            errors = [self._store.put_from(keys[0], self._address, block_bytes)]
        else:
            errors = self._store.batch_put_from(keys, *self._places(keys, block_bytes))
        if any(errors):
            raise RuntimeError(f"mooncake put: errors {sorted(set(errors))}")

    def get(self, keys, block_bytes):
        if len(keys) == 1:
            sizes = [self._store.get_into(keys[0], self._address, block_bytes)]
        else:
            sizes = self._store.batch_get_into(keys, *self._places(keys, block_bytes))
        if any(size != block_bytes for size in sizes):
            raise RuntimeError(f"mooncake get: {sorted(set(sizes))} instead of {block_bytes}")

    def lookup(self, keys):
        return sum(found == 1 for found in self._store.batch_is_exist(keys))

    def finish_puts(self):
        pass

    def remove(self, keys):
        self._store.batch_remove(keys, True)  # True: in spite of the lease that a get leaves

    def _places(self, keys, block_bytes):
        addresses = [self._address + i * block_bytes for i in range(len(keys))]
        return addresses, [block_bytes] * len(keys)


class LMCacheClient:
    """Speaks lm:// with LMCache's own message classes, as its connector does."""

    LOOKUP_REQUESTS = 20  # one round trip per key: the protocol has no batch
    PUT_IS_ACKNOWLEDGED = False

    def __init__(self, port, buffer):
        import socket

        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1 import protocol
        from lmcache.v1.memory_management import MemoryFormat

        protocol.init_remote_metadata_info(1)
        self._key_class, self._protocol = CacheEngineKey, protocol
        self._format, self._torch = MemoryFormat(1), torch
        self._memory = memoryview(buffer)
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._last_key = None

    def make_key(self, block_id):
        return self._key_class(model_name="model", world_size=1, worker_id=0, chunk_hash=block_id,
                               dtype=self._torch.uint8)

    def put(self, keys, block_bytes):
        for i, key in enumerate(keys):
            self._send(self._protocol.ClientCommand.PUT, key, block_bytes)
            self._socket.sendall(self._memory[i * block_bytes:(i + 1) * block_bytes])
        self._last_key = keys[-1]

    def get(self, keys, block_bytes):
        for i, key in enumerate(keys):
            self._send(self._protocol.ClientCommand.GET, key, 0)
            if not self._receive_found():
                raise RuntimeError("lmcache get: missed")
            self._receive(self._memory[i * block_bytes:(i + 1) * block_bytes])

    def lookup(self, keys):
        return sum(self._exists(key) for key in keys)

    def finish_puts(self):
        """PUT has no answer; one to a request behind it says that it was taken."""
        if not self._exists(self._last_key):
            raise RuntimeError("lmcache put: the last block is not there")

    def remove(self, keys):
        pass  # the protocol cannot

    def _exists(self, key):
        self._send(self._protocol.ClientCommand.EXIST, key, 0)
        return self._receive_found()

    def _send(self, command, key, block_bytes):
        shape = self._torch.Size([block_bytes, 0, 0, 0])
        self._socket.sendall(self._protocol.ClientMetaMessage(
            command, key, block_bytes, self._format, self._torch.uint8, shape).serialize())

    def _receive_found(self):
        header = bytearray(self._protocol.ServerMetaMessage.packlength())
        self._receive(memoryview(header))
        message = self._protocol.ServerMetaMessage.deserialize(bytes(header))
        return message.code == self._protocol.ServerReturnCode.SUCCESS

    def _receive(self, target):
        while target:
            received = self._socket.recv_into(target)
            if not received:
                raise RuntimeError("lmcache closed the connection")
            target = target[received:]


CLIENTS = {"mooncake": MooncakeClient, "lmcache": LMCacheClient}


def move_blocks(client, memory, op, keys, first_id, block_bytes, batch):
    """Puts or gets all keys, `batch` per request; returns the latencies."""
    latencies = []
    request = client.put if op == "put" else client.get
    for first in range(0, len(keys), batch):
        request_keys = keys[first:first + batch]
        stamps = [(first_id + first + i).to_bytes(8, "little") for i in range(len(request_keys))]
        if op == "put":
            for i, stamp in enumerate(stamps):
                memory[i * block_bytes:i * block_bytes + 8] = stamp
                memory[(i + 1) * block_bytes - 8:(i + 1) * block_bytes] = stamp
        began = time.perf_counter()
        request(request_keys, block_bytes)
        latencies.append(time.perf_counter() - began)
        if op == "get":
            for i, stamp in enumerate(stamps):
                if (memory[i * block_bytes:i * block_bytes + 8] != stamp
                        or memory[(i + 1) * block_bytes - 8:(i + 1) * block_bytes] != stamp):
                    raise RuntimeError("a block came back wrong")
    if op == "put":
        client.finish_puts()
    return latencies


def look_up(client, keys):
    """Asks for LOOKUP_KEYS stored keys per request; returns the latencies."""
    latencies = []
    groups = [keys[i:i + LOOKUP_KEYS] for i in range(0, len(keys), LOOKUP_KEYS)]
    for i in range(client.LOOKUP_REQUESTS):
        group = groups[i % len(groups)]
        began = time.perf_counter()
        found = client.lookup(group)
        latencies.append(time.perf_counter() - began)
        if found != len(group):
            raise RuntimeError(f"lookup found {found} of {len(group)} stored keys")
    return latencies


def warm_up(client, index, options):
    """Opens the connections that a first request would wait for; touches the server's memory."""
    batch, block_bytes = max(options.batches), max(options.block_bytes)
    block_count = max(batch, options.warm_up_bytes // options.clients // block_bytes)
    first_id = WARM_UP_ID + index * block_count
    keys = [client.make_key(first_id + i) for i in range(block_count)]
    for first in range(0, block_count, batch):
        client.put(keys[first:first + batch], block_bytes)
    client.finish_puts()
    client.get(keys[:batch], block_bytes)
    client.remove(keys)


def worker(options, index, pipe, barrier):
    """Carries out the jobs that come through the pipe, on one connection."""
    try:
        buffer_bytes = max(options.batches) * max(options.block_bytes)
        buffer = numpy.frombuffer(bytearray(os.urandom(buffer_bytes)), dtype=numpy.uint8)
        memory = memoryview(buffer).cast("B")
        client = CLIENTS[options.store](options.port, buffer)
        warm_up(client, index, options)
        pipe.send(None)
        for op, block_bytes, batch, block_count, first_id in iter(pipe.recv, None):
            first_id += index * block_count
            keys = [client.make_key(first_id + i) for i in range(block_count)]
            barrier.wait()
            cpu_began, began = time.process_time(), time.monotonic()
            latencies = []
            if op == "lookup":
                latencies = look_up(client, keys)
            elif op == "remove":
                client.remove(keys)
            else:
                latencies = move_blocks(client, memory, op, keys, first_id, block_bytes, batch)
            pipe.send((began, time.monotonic(), time.process_time() - cpu_began, latencies))
    except Exception as error:  # the parent reports it and ends the run
        barrier.abort()
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # Mooncake's destructors can hang


class Measurer:
    """The worker processes, and the arithmetic from their answers to rows."""

    def __init__(self, options):
        self._options = options
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(options.clients)
        self._workers = []
        for index in range(options.clients):
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(options, index, theirs, barrier))
            process.start()
            self._workers.append((process, ours))
        self._answers()

    def run(self, op, block_bytes, batch, block_count, first_id):
        for _, pipe in self._workers:
            pipe.send((op, block_bytes, batch, block_count // self._options.clients, first_id))
        return self._answers()

    def measure(self, op, block_bytes, batch, block_count, first_id):
        server_cpu_began = self._server_cpu_seconds()
        answers = self.run(op, block_bytes, batch, block_count, first_id)
        cpu_seconds = self._server_cpu_seconds() - server_cpu_began
        cpu_seconds += sum(cpu for _, _, cpu, _ in answers)
        seconds = max(end for _, end, _, _ in answers) - min(began for began, *_ in answers)
        latencies = sorted(latency for *_, some in answers for latency in some)
        row = {"op": op, "block_bytes": block_bytes, "clients": self._options.clients,
               "batch": batch}
        if op == "lookup":
            row["keys_per_s"] = len(latencies) * batch / seconds
        else:
            moved = block_count // self._options.clients * self._options.clients
            row["keys_per_s"] = moved / seconds
            row["gb_per_s"] = moved * block_bytes / 1e9 / seconds
            row["cpu_s_per_gb"] = cpu_seconds / (moved * block_bytes / 1e9)
        if op != "put" or CLIENTS[self._options.store].PUT_IS_ACKNOWLEDGED:
            row["p50_us"] = latencies[(len(latencies) - 1) // 2] * 1e6
            row["p99_us"] = latencies[(len(latencies) - 1) * 99 // 100] * 1e6
        print(json.dumps(row), flush=True)

    def close(self):
        for process, pipe in self._workers:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
            process.join()

    def _answers(self):
        answers = [pipe.recv() for _, pipe in self._workers]
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:
            self.close()
            sys.exit(min(errors, key=lambda error: "BrokenBarrier" in error))
        return answers

    def _server_cpu_seconds(self):
        # Linux: the clock of all threads of another process (clock_getcpuclockid).
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in self._options.server_pids)


def integers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", choices=CLIENTS, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server-pids", type=integers, required=True)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--block-bytes", type=integers, default=[256 << 10])
    parser.add_argument("--batches", type=integers, default=[1])
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--warm-up-bytes", type=int, default=0)
    options = parser.parse_args()
    measurer = Measurer(options)
    first_id = 0
    for block_bytes in options.block_bytes:
        block_count = options.bytes // block_bytes
        for batch in options.batches:
            measurer.measure("put", block_bytes, batch, block_count, first_id)
            measurer.measure("get", block_bytes, batch, block_count, first_id)
            if (block_bytes, options.clients, batch) == (LOOKUP_BLOCK_BYTES, 1, 1):
                measurer.measure("lookup", block_bytes, LOOKUP_KEYS,
                                 block_count // LOOKUP_KEYS * LOOKUP_KEYS, first_id)
            measurer.run("remove", block_bytes, batch, block_count, first_id)
            first_id += block_count
    measurer.close()


if __name__ == "__main__":
    main()
