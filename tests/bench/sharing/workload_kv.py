"""The KV of a workload's sessions, as the model computes it, kept in the cache.

What sessions have in common at their beginning is computed once: a folder has the KV of each group's system prompt,
of each document that follows it at once, and of each session behind that. Folders as those of kv_files.py.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

import judge
import kv_files
import smollm2_weights
import whole_folder
import workers
import workload

BLOCK_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class WorkloadKv:
    """bits: of a session, bfloat16 as u16 [layers, 2 (K, V), tokens, KV heads, head_dim]."""

    folder: pathlib.Path

    def bits(self, session: workload.Session) -> np.ndarray:
        names = dict.fromkeys((f"group-{session.group}", session.prefix_name, session.name))
        return np.concatenate([_load(self.folder / f"{name}.kv") for name in names], axis=2)

    def kv(self, session: workload.Session) -> np.ndarray:
        """The same as float32."""
        return (self.bits(session).astype(np.uint32) << 16).view(np.float32)

    def blocks(self, session: workload.Session, token_count: int) -> "Blocks":
        return Blocks(self.bits(session)[:, :, :token_count])


class Blocks(Mapping):
    """A session's whole blocks by index, as they are put."""

    def __init__(self, bits: np.ndarray):
        self._bits = bits

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise KeyError(index)
        tokens = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
        return np.ascontiguousarray(self._bits[:, :, tokens]).tobytes()

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._bits.shape[2] // BLOCK_TOKENS


def prepare(of: workload.Workload, pool: workers.Pool) -> WorkloadKv:
    """Computes what the cache lacks."""
    digest = hashlib.sha256(f"{kv_files.model_digest()} sharing".encode())
    for session in sorted(of.sessions, key=lambda session: session.name):
        digest.update(f"{session.name} {session.prefix_name} {session.shared_tokens} {session.token_ids}".encode())

    def compute(folder: pathlib.Path) -> None:
        by_prefix: dict[str, list[workload.Session]] = {}
        for session in of.sessions:
            by_prefix.setdefault(session.prefix_name, []).append(session)
        groups = {session.group: session for session in of.sessions}
        for _ in pool.run("KV of system prompts", [(_write_group, (folder, own)) for own in groups.values()]):
            pass
        # The longest first: processes end together.
        in_order = sorted(by_prefix.values(), key=lambda own: -sum(len(session.token_ids) for session in own))
        for _ in pool.run("KV of sessions", [(_write_sessions, (folder, own)) for own in in_order]):
            pass

    name = f"sharing-{digest.hexdigest()[:24]}"
    return WorkloadKv(whole_folder.fill_once(kv_files.cache_folder() / name, compute))


def _write_group(folder: pathlib.Path, session: workload.Session) -> None:
    model = workers.model()
    cache = model.new_cache(session.system_tokens)
    model.extend(cache, session.token_ids[:session.system_tokens], logits="none")
    _save(folder / f"group-{session.group}.kv", judge.get_kv(cache))


def _write_sessions(folder: pathlib.Path, sessions: list[workload.Session]) -> None:
    """All that begin with the same system prompt, and document if there is one."""
    model = workers.model()
    first = sessions[0]
    cache = model.new_cache(max(len(session.token_ids) for session in sessions))
    group = (_load(folder / f"group-{first.group}.kv").astype(np.uint32) << 16).view(np.float32)
    judge.set_cache(cache, group)
    if first.shared_tokens > first.system_tokens:
        model.extend(cache, first.token_ids[first.system_tokens:first.shared_tokens], logits="none")
        _save(folder / f"{first.prefix_name}.kv", judge.get_kv(cache, first.system_tokens))
    for session in sessions:
        cache.truncate(session.shared_tokens)
        model.extend(cache, session.token_ids[session.shared_tokens:], logits="none")
        _save(folder / f"{session.name}.kv", judge.get_kv(cache, session.shared_tokens))


def _save(path: pathlib.Path, kv: np.ndarray) -> None:
    path.write_bytes((kv.view(np.uint32) >> 16).astype("<u2").tobytes())


def _load(path: pathlib.Path) -> np.ndarray:
    config = smollm2_weights.load_config()
    return np.fromfile(path, "<u2").reshape(config.layer_count, 2, -1, config.kv_head_count, config.head_dim)
