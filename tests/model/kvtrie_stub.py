"""A thin client of the server over stubs that are made from proto/ at run time.

It does what the main job needs and nothing else: no retries, no batches. The C++ library in client/ is
the real client; this one shows that any language with gRPC can speak to the server.
"""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import queue
import sys
from collections.abc import Callable, Mapping, Sequence

import crc32c
import grpc
import numpy as np
from grpc_tools import protoc

import whole_folder

_PROTO_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "proto"
_CHUNK_BYTES_MAX = 1 << 20
_MESSAGE_BYTES_MAX = 16 << 20
_UNARY_SECONDS = 30
_STREAM_SECONDS = 300


def _stub_folder() -> pathlib.Path:
    """The folder with the generated modules, which are made where they are missing."""
    protos = sorted(_PROTO_FOLDER.rglob("*.proto"))
    digest = hashlib.sha256(importlib.metadata.version("grpcio-tools").encode())
    for path in protos:
        digest.update(path.read_bytes())
    root = pathlib.Path(os.environ.get("KVTRIE_CACHE") or pathlib.Path.home() / ".cache" / "kvtrie")

    def generate(folder: pathlib.Path) -> None:
        arguments = ["protoc", f"-I{_PROTO_FOLDER}", f"--python_out={folder}",
                     f"--grpc_python_out={folder}", *map(str, protos)]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc failed on {_PROTO_FOLDER}")

    return whole_folder.fill_once(root / f"stubs-{digest.hexdigest()[:16]}", generate)


sys.path.insert(0, str(_stub_folder()))
# pylint: disable=wrong-import-position
from kvtrie.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, types_pb2


class StoreError(Exception):
    """The server answered with an error for one item, or with bytes that are not what it promised."""


@dataclasses.dataclass(frozen=True)
class Match:
    """The stored part of a prompt: `block_count` leading blocks, named by 16 bytes each.

    stored_bytes: of each, the size of the smallest frame that is good enough.
    """

    block_count: int
    node_ids: bytes
    stored_bytes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class PutResult:
    stored_blocks: int
    duplicate_blocks: int
    bytes_sent: int


class KvtrieStub:
    """One connection to a server. Errors: grpc.RpcError of the call, StoreError."""

    def __init__(self, listen: str, admin: str):
        options = [("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
                   ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX)]
        self._channels = [grpc.insecure_channel(address, options) for address in (listen, admin)]
        self._cache = cache_pb2_grpc.CacheStub(self._channels[0])
        self._admin = admin_pb2_grpc.AdminStub(self._channels[1])

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def register_model(self, spec: types_pb2.ModelSpec) -> cache_pb2.RegisterModelResponse:
        return self._cache.RegisterModel(cache_pb2.RegisterModelRequest(spec=spec),
                                         timeout=_UNARY_SECONDS)

    def status(self) -> admin_pb2.GetStatusResponse:
        return self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=_UNARY_SECONDS)

    def usage(self) -> admin_pb2.GetUsageResponse:
        return self._admin.GetUsage(admin_pb2.GetUsageRequest(), timeout=_UNARY_SECONDS)

    def keep_at_most(self, quality: int) -> cache_pb2.SetRetentionResponse:
        """Of everything: where a frame of this quality is stored, a better and larger one is dropped."""
        request = cache_pb2.SetRetentionRequest(selection=cache_pb2.Selection(all=True), quality=quality)
        return self._cache.SetRetention(request, timeout=_STREAM_SECONDS)

    def verify(self) -> list[admin_pb2.Finding]:
        """What the server's check of its whole store finds, every frame read."""
        findings, done = [], False
        for answer in self._admin.Verify(admin_pb2.VerifyRequest(), timeout=_STREAM_SECONDS):
            findings += answer.findings
            done = answer.done
        if not done:
            raise StoreError("verify ended early")
        return findings

    def lookup(self, model_id: bytes, token_ids: Sequence[int],
               min_quality: int = types_pb2.QUALITY_EXACT) -> Match:
        """The longest prefix that is stored at this quality or better."""
        query = cache_pb2.LookupQuery(model_ids=[model_id], tokens=pack_tokens(token_ids),
                                      min_quality=min_quality, lease_ms=30_000, want_blocks=True)
        answer = self._cache.Lookup(cache_pb2.LookupRequest(queries=[query]),
                                    timeout=_UNARY_SECONDS)
        result, = answer.results
        _check(result.status)
        node_ids = result.blocks[0].node_ids if result.blocks else b""
        if len(node_ids) != 16 * result.matched_blocks:
            raise StoreError(f"{len(node_ids)} bytes of ids for {result.matched_blocks} blocks")
        stored_bytes = tuple(result.blocks[0].stored_bytes) if result.blocks else ()
        return Match(result.matched_blocks, node_ids, stored_bytes)

    def fetch(self, model_id: bytes, match: Match, block_count: int, block_bytes: int,
              min_quality: int = types_pb2.QUALITY_EXACT) -> list[memoryview]:
        """The first `block_count` blocks of a match, raw, each chunk's checksum verified.

        A block that is gone, incomplete or wrong is a StoreError.
        """
        if block_count == 0:
            return []
        request = cache_pb2.FetchRequest(model_id=model_id,
                                         node_ids=match.node_ids[:16 * block_count],
                                         encoding=types_pb2.ENCODING_RAW,
                                         min_quality=min_quality)
        fetched = memoryview(bytearray(block_count * block_bytes))
        blocks = [fetched[i * block_bytes:(i + 1) * block_bytes] for i in range(block_count)]
        received = [0] * block_count
        for answer in self._cache.Fetch(request, timeout=_STREAM_SECONDS):
            for result in answer.blocks:
                _check(result.status)
                if result.bytes != block_bytes:
                    raise StoreError(f"block {result.block_index} has {result.bytes} bytes")
            data, start = memoryview(answer.data), 0
            for chunk in answer.chunks:
                part = data[start:start + chunk.bytes]
                start += chunk.bytes
                if len(part) != chunk.bytes or crc32c.crc32c(part) != chunk.crc32c:
                    raise StoreError(f"block {chunk.block_index}: a chunk fails its checksum")
                blocks[chunk.block_index][chunk.offset:chunk.offset + chunk.bytes] = part
                received[chunk.block_index] += chunk.bytes
        if received != [block_bytes] * block_count:
            raise StoreError("the stream ended before all blocks were there")
        return blocks

    def put(self,
            model_id: bytes,
            token_ids: Sequence[int],
            blocks: Mapping[int, bytes],
            session: str = "",
            on_ack: Callable[[int], None] = lambda block_index: None) -> PutResult:
        """Offers `blocks` (by index, a run up to the last full one) and sends those that are missing.

        on_ack: called with the index of each block once it is safely stored.
        """
        first_block = min(blocks)
        announce = cache_pb2.PutAnnounce(
            put_id=1,
            prefix=types_pb2.Prefix(model_id=model_id, tokens=pack_tokens(token_ids)),
            first_block=first_block,
            session_id=session.encode(),
            restored_blocks=first_block,
            restored_quality=types_pb2.QUALITY_EXACT if first_block else 0,
            encoding=types_pb2.ENCODING_RAW)
        requests = queue.SimpleQueue()
        requests.put(cache_pb2.PutRequest(announces=[announce]))
        stored = duplicate = bytes_sent = 0
        finished = False
        try:
            for answer in self._cache.Put(iter(requests.get, None), timeout=_STREAM_SECONDS):
                for plan in answer.plans:
                    _check(plan.status)
                    for index in np.frombuffer(plan.missing_blocks, "<u4").tolist():
                        for request in _put_requests(index, blocks[index]):
                            requests.put(request)
                        bytes_sent += len(blocks[index])
                for ack in answer.acks:
                    _check(ack.status)
                    stored += not ack.duplicate
                    duplicate += ack.duplicate
                    on_ack(ack.block_index)
                if answer.dones:
                    finished = True
                    requests.put(None)  # Half-closes the stream, and the server ends it.
        finally:
            requests.put(None)
        if not finished:
            raise StoreError("the put ended early")
        return PutResult(stored, duplicate, bytes_sent)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, "<u4").tobytes()


def _put_requests(block_index: int, block: bytes):
    """The messages that carry one block."""
    for offset in range(0, len(block), _CHUNK_BYTES_MAX):
        data = block[offset:offset + _CHUNK_BYTES_MAX]
        chunk = types_pb2.Chunk(block_index=block_index, offset=offset, bytes=len(data),
                                crc32c=crc32c.crc32c(data), put_id=1)
        yield cache_pb2.PutRequest(chunks=[chunk], data=data)


def _check(status: types_pb2.ItemStatus) -> None:
    if status.code != 0:
        raise StoreError(f"{grpc.StatusCode(_code(status.code)).name}: {status.message}")


def _code(number: int) -> tuple[int, str]:
    return next(code.value for code in grpc.StatusCode if code.value[0] == number)
