"""What a store of sessions takes when they share what they can, and what that does to the model.

The sessions of workload.json, with a real model's KV, go into real servers, in the order in which they come:

  no sharing         each session by itself, raw
  prefix sharing     raw blocks, equal prefixes once
  + codec            the server codes blocks at level high, and drops the exact ones
  + references       the same, with a profile that codes the same text under another prefix as a difference

Exact frames stay beside coded ones while the sessions come, as they do until space is needed; then they are dropped,
and what is left is measured: frames, and metadata on the disk. The profile is stored once per model, and told apart. The longest
sessions of each group are restored from each server, and the model's distributions over a text behind them are
compared with those on the exact cache: mean KL, in nat.

The last rows try the paper's d_T (arXiv:2604.15356): one session is stored whole, each later one without the blocks
that it has in common with the nearest of those before. Read as a similarity, the nearest shares most, which is what
a trie shares anyway; read as the distance that the paper calls it, the nearest shares least. Computed, not stored.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence

_TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_TESTS / "model"), str(_TESTS / "bench/quality")]
# pylint: disable=wrong-import-position
import numpy as np

import codec_tool
import judge
import kv_blocks
import kv_files
import kvtrie_stub
import main_job
import pairs
import references
import server_process
import smollm2_tokenizer
import smollm2_weights
import workers
import workload
import workload_kv
from workload_kv import BLOCK_TOKENS

NO_SHARING, PREFIX, CODEC, REFERENCES = "no sharing", "prefix sharing", "+ codec", "+ references"
D_T_SIMILARITY, D_T_DISTANCE = "nearest by d_T, a similarity", "nearest by d_T, a distance"
_HIGH = kvtrie_stub.types_pb2.QUALITY_HIGH
_CODE_SECONDS_MAX = 1800
_WAVE_SESSIONS = 25


@dataclasses.dataclass(frozen=True)
class Upload:
    """The first token_count tokens of a session."""

    session: workload.Session
    token_count: int

    @property
    def block_count(self) -> int:
        return self.token_count // BLOCK_TOKENS


@dataclasses.dataclass(frozen=True)
class Point:
    """What frames take after a wave of uploads, without exact ones where there are coded ones."""

    sessions: int
    turns: int  # of each session, at most
    tokens: int  # of all sessions
    frame_bytes: int


@dataclasses.dataclass(frozen=True)
class Stored:
    """What came of one server. block_bytes: of each session's blocks, as readers at level high get them.
    fine_blocks: that were coded to be references. kl: of each token behind each judged session."""

    points: list[Point]
    bytes_stored: int
    block_bytes: dict[str, tuple[int, ...]]
    fine_blocks: int
    kl: dict[str, np.ndarray]

    @property
    def mean_kl(self) -> float:
        return float(np.concatenate(list(self.kl.values())).mean()) if self.kl else 0.0


class Server:
    """A server of its own, with or without a profile to code blocks with. Ends with its context."""

    def __init__(self, folder: pathlib.Path, profile: pathlib.Path | None):
        flags = ("--noprefault_memory", "--memory_tier_bytes=64MiB")
        if profile is not None:
            flags += ("--recode_level=high", "--recode_cpu_percent=100")
        self._process = server_process.ServerProcess(server_process.server_binary(), folder, flags)
        self._folder = folder
        self._profile = profile
        self._quality = kvtrie_stub.types_pb2.QUALITY_EXACT if profile is None else _HIGH
        self._config = smollm2_weights.load_config()
        self._stub: kvtrie_stub.KvtrieStub | None = None

    def __enter__(self) -> "Server":
        self._process.__enter__()
        self._start()
        return self

    def __exit__(self, *error) -> None:
        if self._stub is not None:
            self._stub.close()
        self._process.__exit__(*error)

    def _start(self) -> None:
        addresses = self._process.start()
        self._metrics_address = addresses.metrics
        self._stub = kvtrie_stub.KvtrieStub(addresses.listen, addresses.admin)
        registered = self._stub.register_model(main_job.model_spec(self._config))
        self._model_id, self._block_bytes = registered.model_id, registered.raw_block_bytes
        if self._profile is not None and not registered.profile_id:
            codec_tool.put_profile(self._profile, addresses.listen)

    def put(self, upload: Upload, kv: workload_kv.WorkloadKv) -> None:
        token_ids = upload.session.token_ids[:upload.token_count]
        self._stub.put(self._model_id, token_ids, kv.blocks(upload.session, upload.token_count), upload.session.name)

    def frame_bytes(self) -> int:
        """Of the frames that are kept when space is needed, once all is coded."""
        if self._profile is None:
            return self._stub.usage().stored_bytes
        deadline = time.monotonic() + _CODE_SECONDS_MAX
        while self.metric("kvtrie_recode_waiting_blocks") > 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"blocks wait to be coded for {_CODE_SECONDS_MAX} s")
            time.sleep(0.1)
        if self.metric("kvtrie_recode_failed_blocks_total") > 0:
            raise RuntimeError("some blocks could not be coded")
        types = kvtrie_stub.types_pb2
        return sum(usage.stored_bytes for usage in self._stub.status().codecs
                   if usage.codec in (types.CODEC_RESIDUAL, types.CODEC_REFERENCED))

    def keep_coded(self) -> int:
        """Drops exact frames where there are coded ones. What frames and the files of the metadata take then, without
        its journal for people. Starts the server anew: the log of the metadata becomes a table."""
        if self._profile is not None:
            self._stub.keep_at_most(_HIGH)
        self._stub.close()
        self._process.stop()
        self._start()
        files = [path for path in (self._folder / "data/meta").iterdir() if not path.name.startswith("LOG")]
        return self._stub.usage().stored_bytes + sum(512 * path.stat().st_blocks for path in files)

    def block_bytes(self, session: workload.Session) -> tuple[int, ...]:
        return self._stub.lookup(self._model_id, session.token_ids, self._quality).stored_bytes

    def restore(self, token_ids: Sequence[int]) -> np.ndarray:
        """The KV of whole blocks, float32 as judge.py has it."""
        match = self._stub.lookup(self._model_id, token_ids, self._quality)
        if match.block_count != len(token_ids) // BLOCK_TOKENS:
            raise RuntimeError(f"{match.block_count} of {len(token_ids) // BLOCK_TOKENS} blocks are stored")
        blocks = self._stub.fetch(self._model_id, match, match.block_count, self._block_bytes, self._quality)
        return np.concatenate([kv_blocks.unpack_block(self._config, bytes(block), BLOCK_TOKENS) for block in blocks],
                              axis=2)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self._metrics_address}/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise KeyError(name)


def store(name: str, waves: Sequence[Sequence[Upload]], profile: pathlib.Path | None, kv: workload_kv.WorkloadKv,
          judged: Sequence[workload.Session]) -> Stored:
    """Puts wave after wave, and measures after each."""
    with tempfile.TemporaryDirectory(prefix="kvtrie-sharing-") as folder, Server(pathlib.Path(folder), profile) as server:
        progress = workers.Progress(name, sum(map(len, waves)))
        reached: dict[str, Upload] = {}
        points, done = [], 0
        for wave in waves:
            for upload in wave:
                server.put(upload, kv)
                reached[upload.session.name] = upload
                done += 1
                progress.show(done)
            points.append(Point(len(reached), max(turns_of(upload) for upload in reached.values()),
                                sum(upload.token_count for upload in reached.values()), server.frame_bytes()))
        progress.finish()
        fine_blocks = int(server.metric("kvtrie_refined_blocks_total"))
        bytes_stored = server.keep_coded()
        block_bytes = {upload.session.name: server.block_bytes(upload.session) for upload in reached.values()}
        kl = {session.name: judge_restored(session, kv, server.restore) for session in judged} if profile else {}
    return Stored(points, bytes_stored, block_bytes, fine_blocks, kl)


def turns_of(upload: Upload) -> int:
    return sum(turn.end <= upload.token_count for turn in upload.session.turns)


def judge_restored(session: workload.Session, kv: workload_kv.WorkloadKv,
                   restore: Callable[[Sequence[int]], np.ndarray]) -> np.ndarray:
    """KL over what might come behind the session, computed on all of its whole blocks."""
    begin = len(session.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    rest = (*session.token_ids[begin:], *session.continuation)
    exact = judge.continuation(workers.model(), kv.kv(session)[:, :, :begin], rest)
    return judge.diverge(exact, judge.continuation(workers.model(), restore(session.token_ids[:begin]), rest), rest).kl


def by_arrival(of: workload.Workload) -> list[list[Upload]]:
    """Whole sessions, some at a time."""
    uploads = [Upload(session, len(session.token_ids)) for session in of.sessions]
    return [uploads[at:at + _WAVE_SESSIONS] for at in range(0, len(uploads), _WAVE_SESSIONS)]


def by_turn(of: workload.Workload) -> list[list[Upload]]:
    """The first turn of all sessions, then the second of those that have one, and so on."""
    turns = max(len(session.turns) for session in of.sessions)
    return [[Upload(session, session.turns[turn].end) for session in of.sessions if turn < len(session.turns)]
            for turn in range(turns)]


def nearest_blocks(sessions: Sequence[workload.Session], is_distance: bool) -> int:
    """Blocks that are stored where each session shares with the nearest one before it alone.

    d_T of two sessions is the surprisal of the prefix that they share, here in tokens of 3.75 bits each, as the store
    estimates what it was told nothing of.
    """
    stored, before = 0, []
    for session in sessions:
        shared = [_common_tokens(session.token_ids, other) for other in before]
        nearest = (min(shared) if is_distance else max(shared)) if shared else 0
        stored += len(session.token_ids) // BLOCK_TOKENS - nearest // BLOCK_TOKENS
        before.append(session.token_ids)
    return stored


def _common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Documents that stood before under another prefix: what their blocks took where they were coded against that, and
    what they take alone."""

    documents: int
    bytes_alone: int
    bytes_again: int


def repeats(sessions: Sequence[workload.Session], alone: Stored, again: Stored) -> Repeats:
    """Of each document behind each prefix, once, the blocks that hold some of it. Those count that were coded against
    others: that take less than alone."""
    known = set()
    found = Repeats(0, 0, 0)
    for session in sessions:
        for _, begin, end in session.documents:
            if session.token_ids[:end] in known:
                continue
            known.add(session.token_ids[:end])
            blocks = slice(begin // BLOCK_TOKENS, -(-end // BLOCK_TOKENS))
            of_alone = sum(alone.block_bytes[session.name][blocks])
            of_again = sum(again.block_bytes[session.name][blocks])
            if of_again < of_alone / 2:
                found = Repeats(found.documents + 1, found.bytes_alone + of_alone, found.bytes_again + of_again)
    return found


def rows(of: workload.Workload, stored: dict[str, Stored]) -> list[dict]:
    """A row for each way to store all sessions."""
    block_bytes = kv_blocks.block_bytes(smollm2_weights.load_config(), BLOCK_TOKENS)
    bytes_raw = block_bytes * sum(len(session.token_ids) // BLOCK_TOKENS for session in of.sessions)
    taken = {NO_SHARING: (bytes_raw, 0.0)}
    for name, result in stored.items():
        taken[name] = (result.bytes_stored, result.mean_kl)
    for name, is_distance in ((D_T_SIMILARITY, False), (D_T_DISTANCE, True)):
        taken[name] = (block_bytes * nearest_blocks(of.sessions, is_distance), 0.0)
    prefix = taken[PREFIX][0] if PREFIX in taken else None
    return [{"name": name, "bytes_raw": bytes_raw, "bytes_stored": bytes_stored, "ratio": bytes_raw / bytes_stored, "kl": kl,
             "over_prefix_sharing": prefix and prefix / bytes_stored}
            for name, (bytes_stored, kl) in taken.items()]


def table(found: Sequence[dict]) -> str:
    lines = [f"{'':30}{'raw MB':>10}{'stored MB':>11}{'ratio':>8}{'over prefix':>13}{'mean KL':>10}"]
    for row in found:
        lines.append(f"{row['name']:30}{row['bytes_raw'] / 1e6:10,.0f}{row['bytes_stored'] / 1e6:11,.1f}{row['ratio']:8.1f}"
                     f"{row['over_prefix_sharing']:13.1f}{row['kl']:10.4f}")
    return "\n".join(lines)


def kl_table(of: workload.Workload, stored: dict[str, Stored]) -> str:
    """Mean KL by the domain of the text, over the judged sessions."""
    domains = {session.name: session.domain for session in of.sessions}
    lines = [f"{'mean KL':30}" + "".join(f"{domain:>10}" for domain in dict.fromkeys(sorted(domains.values())))]
    for way, result in stored.items():
        of_domain = {}
        for name, kl in result.kl.items():
            of_domain.setdefault(domains[name], []).append(kl)
        lines.append(f"{way:30}" + "".join(f"{np.concatenate(of_domain[domain]).mean():10.4f}"
                                           for domain in sorted(of_domain)))
    return "\n".join(lines)


def growth_table(title: str, unit: str, points: dict[str, list[Point]]) -> str:
    """KB per session after each wave."""
    lines = [title, f"{unit:>9}{'tokens':>10}" + "".join(f"{name:>16}" for name in points) + f"{'ratio':>8}"]
    token_bytes = kv_blocks.block_bytes(smollm2_weights.load_config(), 1)
    for own in zip(*points.values()):
        first = own[0]
        number = first.turns if unit == "turns" else first.sessions
        kilobytes = "".join(f"{point.frame_bytes / point.sessions / 1e3:16,.0f}" for point in own)
        lines.append(f"{number:9}{first.tokens:10,}{kilobytes}{token_bytes * first.tokens / own[-1].frame_bytes:8.1f}")
    return "\n".join(lines)


def profiles(pool: workers.Pool, folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Fitted to other packages' texts, and claiming what levels promise: what they keep is measured here."""
    base = references.base_profile(pool)
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    samples = references.prepare("pairs-fit", pairs.fit_pairs(tokenizer), pool)
    with_differences = references.fit_differences(base, samples, references.Way("differences", "against"), folder)
    return {name: codec_tool.seal_unmeasured(draft, folder / f"{index}.kvp")
            for index, (name, draft) in enumerate(((CODEC, base), (REFERENCES, with_differences)))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there, one per line")
    parser.add_argument("--png", type=pathlib.Path, help="draw bytes per session there")
    parser.add_argument("--quick", action="store_true", help="few sessions: does it all run?")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compute KV (default: 2)")
    options = parser.parse_args()
    start = time.monotonic()
    of = workload.make(smollm2_tokenizer.SmolLM2Tokenizer(), options.quick)
    judged = [session for session in of.sessions if session.name in of.judged]
    with workers.Pool(options.jobs) as pool, tempfile.TemporaryDirectory(prefix="kvtrie-sharing-") as name:
        kv = workload_kv.prepare(of, pool)
        with_codec = profiles(pool, pathlib.Path(name))
        ways = {PREFIX: None, **with_codec}
        stored = {way: store(way, by_arrival(of), profile, kv, judged) for way, profile in ways.items()}
        turns = {way: store(f"{way}, by turns", by_turn(of), profile, kv, []).points for way, profile in ways.items()}
        profile_bytes = with_codec[REFERENCES].stat().st_size
    found = rows(of, stored)
    print(f"{len(of.sessions)} sessions of {len({s.group for s in of.sessions})} groups, "
          f"{sum(len(s.token_ids) for s in of.sessions):,} tokens, {of.distinct_tokens:,} of them distinct; of these "
          f"{of.private_share:.0%} private to one session\n")
    print(table(found))
    again = repeats(of.sessions, stored[CODEC], stored[REFERENCES])
    if again.documents:
        print(f"\n{again.documents} times a document was coded against another prefix's: "
              f"{again.bytes_again / again.bytes_alone:.3f} of what it takes alone; "
              f"{stored[REFERENCES].fine_blocks} blocks were coded finer for it")
    print("\n" + kl_table(of, {way: stored[way] for way in (CODEC, REFERENCES)}))
    print(f"\nThe profile, once for the model and not in the table: {profile_bytes / 1e6:.1f} MB")
    points = {way: result.points for way, result in stored.items()}
    print("\n" + growth_table("KB per session, as sessions come", "sessions", points))
    print("\n" + growth_table("KB per session, as turns come", "turns", turns))
    print(f"\n{time.monotonic() - start:.0f} s")
    if options.png:
        draw(points, turns, options.png)
    if options.json:
        kv_files.write_atomically(options.json, "".join(json.dumps(row) + "\n" for row in found).encode())
    return 0


def draw(by_sessions: dict[str, list[Point]], by_turns: dict[str, list[Point]], path: pathlib.Path) -> None:
    """Bytes per session over the number of sessions, and over their turns."""
    import matplotlib  # pylint: disable=import-outside-toplevel
    matplotlib.use("agg")
    from matplotlib import pyplot  # pylint: disable=import-outside-toplevel

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for own, points_of_ways, unit in ((axes[0], by_sessions, "sessions"), (axes[1], by_turns, "turns")):
        for way, points in points_of_ways.items():
            own.plot([getattr(point, unit) for point in points],
                     [point.frame_bytes / point.sessions / 1e6 for point in points], marker="o", label=way)
        own.set_yscale("log")
        own.set_xlabel(f"{unit} stored" if unit == "sessions" else "turns of each session")
        own.xaxis.get_major_locator().set_params(integer=True)
        own.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MB per session")
    axes[0].legend(frameon=False)
    figure.suptitle("What a session takes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
