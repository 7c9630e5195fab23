"""The main job of the store, on a real model: chat sessions whose KV cache goes through the server.

Each prompt is looked up, its longest stored prefix is restored, only the rest is computed, and the new
blocks are put. Half-way, during a put, the server is killed (kill -9) and started again on its folder.
Then every session is asked once more and restored from the store, beside a computation from nothing.

Blocks have 16 tokens, as in vLLM. Sessions share every whole block up to where they diverge, so a small
block wastes little of that; at 360 KiB of this model's KV it is large enough for the price of one block
in a call not to matter. It divides the model's chunk of 64 tokens, so what is left to compute behind a
fully stored prompt is one chunk.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import statistics
import sys
import tempfile
import time

import grpc
import numpy as np

import kv_blocks
import kvtrie_stub
import main_job_report
import server_process
import smollm2
import smollm2_tokenizer
import smollm2_weights
import texts

BLOCK_TOKENS = 16
GREEDY_TOKENS = 16
GREEDY_PROMPT_TOKENS_MAX = 1000
PREFIX_PROMPT_TOKENS = 1024  # of which all but the last block are restored: a prefix of 1,008 tokens
PREFIX_RUNS = 3
QUICK_SESSIONS_PER_GROUP = 2


@dataclasses.dataclass(frozen=True)
class Prompt:
    session: texts.ChatSession
    turn: int  # from 1
    token_ids: list[int]

    @property
    def name(self) -> str:
        return f"{self.session.name} turn {self.turn}"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    cache: smollm2.KvCache
    logits: np.ndarray
    restored_blocks: int
    seconds: float  # until the first token was known


@dataclasses.dataclass
class SessionResult:
    """One session's last prompt, asked again: recomputed and restored."""

    name: str
    group: int
    tokens: int
    recompute_s: float
    restore_s: float
    cache_equal: bool
    logits_equal: bool
    greedy_equal: bool | None  # None: the prompt is too long to be compared


@dataclasses.dataclass
class Totals:
    """What the first pass did."""

    tokens: int = 0
    tokens_reused: int = 0
    bytes_put: int = 0
    blocks_put: int = 0
    bytes_put_by_group: list[int] = dataclasses.field(
        default_factory=lambda: [0] * texts.GROUP_COUNT)


def model_spec(config: smollm2_weights.ModelConfig) -> kvtrie_stub.types_pb2.ModelSpec:
    """The identity under which this model's KV is stored."""
    types = kvtrie_stub.types_pb2
    tokenizer = smollm2_weights.filled_cache_folder() / smollm2_weights.TOKENIZER_NAME
    run = types.LayerRun(layer_count=config.layer_count, kv_heads=config.kv_head_count,
                         k_head_dim=config.head_dim, v_head_dim=config.head_dim)
    return types.ModelSpec(
        name="SmolLM2-135M-Instruct",
        weights_revision=smollm2_weights.gguf_sha256(),
        tokenizer_digest=hashlib.sha256(tokenizer.read_bytes()).digest(),
        dtype=types.DTYPE_BFLOAT16,
        kv_groups=[types.KvGroup(layer_runs=[run])],
        rope=types.RopeSpec(pairing=types.ROPE_PAIRING_HALF_SPLIT, theta=config.rope_base),
        block_tokens=BLOCK_TOKENS)


class Engine:
    """The model in front of a store: what an inference engine does with each prompt."""

    def __init__(self, model: smollm2.SmolLM2):
        self.model = model
        self.block_bytes = kv_blocks.block_bytes(model.config, BLOCK_TOKENS)
        self.fetched_equal = True  # every block fetched so far had the bytes that were put
        self._put_digests: dict[bytes, bytes] = {}
        self._stub: kvtrie_stub.KvtrieStub | None = None
        self._model_id = b""

    @property
    def stub(self) -> kvtrie_stub.KvtrieStub:
        return self._stub

    def connect(self, addresses: server_process.Addresses) -> None:
        if self._stub is not None:
            self._stub.close()
        self._stub = kvtrie_stub.KvtrieStub(addresses.listen, addresses.admin)
        registered = self._stub.register_model(model_spec(self.model.config))
        if registered.raw_block_bytes != self.block_bytes:
            raise RuntimeError(f"the server takes {registered.raw_block_bytes} bytes for a block")
        self._model_id = registered.model_id

    def restore_and_compute(self, token_ids: list[int]) -> Answer:
        """Fetches the longest stored prefix and computes the rest, at least the last token."""
        start = time.perf_counter()
        match = self._stub.lookup(self._model_id, token_ids)
        block_count = min(match.block_count, (len(token_ids) - 1) // BLOCK_TOKENS)
        blocks = self._stub.fetch(self._model_id, match, block_count, self.block_bytes)
        cache = self.model.new_cache(len(token_ids) + GREEDY_TOKENS)
        kv_blocks.append_blocks(cache, blocks, BLOCK_TOKENS)
        logits = self.model.extend(cache, token_ids[cache.length:])
        int(np.argmax(logits))
        seconds = time.perf_counter() - start
        for index, block in enumerate(blocks):
            if self._put_digests.get(_path(token_ids, index)) != _digest(block):
                self.fetched_equal = False
        return Answer(cache, logits, block_count, seconds)

    def compute(self, token_ids: list[int]) -> Answer:
        """Computes everything, as without a store."""
        start = time.perf_counter()
        cache = self.model.new_cache(len(token_ids) + GREEDY_TOKENS)
        logits = self.model.extend(cache, token_ids)
        int(np.argmax(logits))
        return Answer(cache, logits, 0, time.perf_counter() - start)

    def put_new_blocks(self, prompt: Prompt, answer: Answer,
                       on_ack=lambda block_index: None) -> kvtrie_stub.PutResult:
        """Puts what was computed behind the restored blocks."""
        first = answer.restored_blocks
        blocks = dict(enumerate(kv_blocks.pack_blocks(answer.cache, BLOCK_TOKENS, first), first))
        if not blocks:
            return kvtrie_stub.PutResult(0, 0, 0)
        for index, block in blocks.items():
            self._put_digests[_path(prompt.token_ids, index)] = _digest(block)
        return self._stub.put(self._model_id, prompt.token_ids, blocks, prompt.session.name, on_ack)

    def stored_blocks(self, token_ids: list[int]) -> int:
        return self._stub.lookup(self._model_id, token_ids).block_count

    def greedy(self, answer: Answer) -> tuple[list[int], list[np.ndarray]]:
        """The next tokens and the logits that each was chosen from. Extends the answer's cache."""
        token_ids, logits = [], [answer.logits]
        for _ in range(GREEDY_TOKENS):
            token_ids.append(int(np.argmax(logits[-1])))
            logits.append(self.model.step(answer.cache, token_ids[-1]))
        return token_ids, logits


def _path(token_ids: list[int], block_index: int) -> bytes:
    """Names a block by all tokens up to its end."""
    end = (block_index + 1) * BLOCK_TOKENS
    return hashlib.sha256(kvtrie_stub.pack_tokens(token_ids[:end])).digest()


def _digest(block) -> bytes:
    return hashlib.sha256(block).digest()


def run(binary: pathlib.Path, quick: bool, say=print) -> dict:
    """Does the job in a temporary folder and returns its numbers, `per_session` among them."""
    say("loading the model and the chat sessions")
    model = smollm2.SmolLM2()
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    sessions = texts.chat_sessions(tokenizer)
    if quick:
        sessions = [s for group in range(texts.GROUP_COUNT)
                    for s in [s for s in sessions if s.group == group][:QUICK_SESSIONS_PER_GROUP]]
    prompts = _prompts(tokenizer, sessions)
    last_prompts = [max((p for p in prompts if p.session is session), key=lambda p: p.turn)
                    for session in sessions]
    engine = Engine(model)
    model.extend(model.new_cache(1), [0], logits="none")  # Maps the weights into memory.

    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvtrie-main-job-") as folder:
        with server_process.ServerProcess(binary, pathlib.Path(folder)) as server:
            engine.connect(server.start())
            totals, after_kill = _first_pass(engine, server, prompts, say)
            results = _second_pass(engine, last_prompts, say)
            prefix = _measure_prefix(engine, last_prompts, say)
            usage, status = engine.stub.usage(), engine.stub.status()
            findings = engine.stub.verify()
            engine.stub.close()
            server.stop()

    raw_blocks = [len(prompt.token_ids) // BLOCK_TOKENS for prompt in last_prompts]
    bytes_raw_by_group = [
        engine.block_bytes * sum(n for n, p in zip(raw_blocks, last_prompts)
                                 if p.session.group == group)
        for group in range(texts.GROUP_COUNT)
    ]
    compared = [r.greedy_equal for r in results if r.greedy_equal is not None]
    recompute_s = statistics.median(r.recompute_s for r in results)
    restore_s = statistics.median(r.restore_s for r in results)
    return {
        "sessions": len(sessions),
        "prompts": len(prompts),
        "tokens": totals.tokens,
        "tokens_reused": totals.tokens_reused,
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": engine.block_bytes,
        "bytes_raw": sum(bytes_raw_by_group),
        "bytes_stored": usage.stored_bytes,
        "bytes_disk": status.disk_bytes,
        "sharing": sum(bytes_raw_by_group) / usage.stored_bytes,
        "bytes_raw_by_group": bytes_raw_by_group,
        "bytes_stored_by_group": totals.bytes_put_by_group,
        "ttft_recompute_s": recompute_s,
        "ttft_restore_s": restore_s,
        "ttft_speedup": recompute_s / restore_s,
        **prefix,
        "cache_bit_equal": engine.fetched_equal and all(r.cache_equal for r in results),
        "logits_bit_equal": all(r.logits_equal for r in results),
        "greedy_equal": bool(compared) and all(compared),
        "greedy_sessions": len(compared),
        **after_kill,
        "verify_findings": len(findings),
        "seconds": time.perf_counter() - started,
        "per_session": [dataclasses.asdict(result) for result in results],
    }


def is_right(numbers: dict) -> bool:
    """Whether nothing was lost or changed. Speed is not judged here."""
    return (numbers["cache_bit_equal"] and numbers["logits_bit_equal"] and numbers["greedy_equal"]
            and numbers["lost_after_kill"] == 0 and numbers["verify_findings"] == 0
            and numbers["acknowledged_before_kill"] > 0)


def _prompts(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer,
             sessions: list[texts.ChatSession]) -> list[Prompt]:
    """First the first turn of all sessions, then the second, as users would come and come back."""
    prompts = [Prompt(session, turn, token_ids) for session in sessions
               for turn, token_ids in enumerate(session.turn_prompts(tokenizer), start=1)]
    return sorted(prompts, key=lambda prompt: prompt.turn)


def _first_pass(engine: Engine, server: server_process.ServerProcess, prompts: list[Prompt],
                say) -> tuple[Totals, dict]:
    totals, after_kill = Totals(), {}
    acknowledged: dict[str, tuple[Prompt, int]] = {}  # by session: its blocks known to be stored
    for number, prompt in enumerate(prompts, start=1):
        answer = engine.restore_and_compute(prompt.token_ids)
        acknowledged[prompt.session.name] = (prompt, answer.restored_blocks)

        def on_ack(block_index: int, prompt=prompt) -> None:
            acknowledged[prompt.session.name] = (prompt, block_index + 1)

        if number > len(prompts) // 2 and not after_kill and _new_blocks(prompt, answer) > 2:
            say("      kill -9 of the server during a put, and a new start on its folder")
            after_kill = _kill_during_put(engine, server, prompt, answer, acknowledged)
        put = engine.put_new_blocks(prompt, answer, on_ack)
        totals.tokens += len(prompt.token_ids)
        totals.tokens_reused += answer.restored_blocks * BLOCK_TOKENS
        totals.blocks_put += put.stored_blocks
        new_bytes = _new_blocks(prompt, answer) * engine.block_bytes
        totals.bytes_put_by_group[prompt.session.group] += new_bytes
        say(f"{number:3}/{len(prompts)} {prompt.name}: {len(prompt.token_ids)} tokens, "
            f"{answer.restored_blocks * BLOCK_TOKENS} restored, first token after "
            f"{answer.seconds:.2f} s, {put.stored_blocks} blocks put")
    return totals, after_kill


def _new_blocks(prompt: Prompt, answer: Answer) -> int:
    return len(prompt.token_ids) // BLOCK_TOKENS - answer.restored_blocks


def _kill_during_put(engine: Engine, server: server_process.ServerProcess, prompt: Prompt,
                     answer: Answer, acknowledged: dict[str, tuple[Prompt, int]]) -> dict:
    """Kills the server at the first acknowledgement of a put; counts what it then has lost."""

    def on_ack(block_index: int) -> None:
        acknowledged[prompt.session.name] = (prompt, block_index + 1)
        server.kill()

    try:
        engine.put_new_blocks(prompt, answer, on_ack)
    except (grpc.RpcError, kvtrie_stub.StoreError):
        pass  # The connection broke, as it must.
    server.kill()
    start = time.perf_counter()
    engine.connect(server.start())
    restart_seconds = time.perf_counter() - start
    lost = sum(max(0, block_count - engine.stored_blocks(prompt.token_ids))
               for prompt, block_count in acknowledged.values())
    return {
        "acknowledged_before_kill": sum(count for _, count in acknowledged.values()),
        "lost_after_kill": lost,
        "restart_s": restart_seconds,
    }


def _second_pass(engine: Engine, prompts: list[Prompt], say) -> list[SessionResult]:
    results = []
    for number, prompt in enumerate(prompts, start=1):
        restored = engine.restore_and_compute(prompt.token_ids)
        computed = engine.compute(prompt.token_ids)
        result = SessionResult(
            name=prompt.session.name,
            group=prompt.session.group,
            tokens=len(prompt.token_ids),
            recompute_s=computed.seconds,
            restore_s=restored.seconds,
            cache_equal=(kv_blocks.pack_blocks(restored.cache, BLOCK_TOKENS) ==
                         kv_blocks.pack_blocks(computed.cache, BLOCK_TOKENS)),
            logits_equal=_bits_equal(restored.logits, computed.logits),
            greedy_equal=None)
        if len(prompt.token_ids) <= GREEDY_PROMPT_TOKENS_MAX:
            restored_tokens, restored_logits = engine.greedy(restored)
            computed_tokens, computed_logits = engine.greedy(computed)
            result.greedy_equal = restored_tokens == computed_tokens
            result.logits_equal &= all(map(_bits_equal, restored_logits, computed_logits))
        results.append(result)
        say(f"{number:3}/{len(prompts)} {prompt.session.name} again: {result.tokens} tokens, "
            f"recomputed {result.recompute_s:.2f} s, restored {result.restore_s:.2f} s")
    return results


def _bits_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def _measure_prefix(engine: Engine, prompts: list[Prompt], say) -> dict:
    """Time to first token behind a stored prefix of 1,000 tokens, against computing all of it."""
    token_ids = max((prompt.token_ids for prompt in prompts), key=len)[:PREFIX_PROMPT_TOKENS]
    runs = []
    for _ in range(PREFIX_RUNS):
        restored, computed = engine.restore_and_compute(token_ids), engine.compute(token_ids)
        runs.append((computed.seconds, restored.seconds))
    recompute_s, restore_s = map(statistics.median, zip(*runs))
    say(f"      a prefix of {restored.restored_blocks * BLOCK_TOKENS} tokens in a prompt of "
        f"{len(token_ids)}: recomputed {recompute_s:.2f} s, restored {restore_s:.2f} s")
    return {
        "prefix_tokens": restored.restored_blocks * BLOCK_TOKENS,
        "prefix_recompute_s": recompute_s,
        "prefix_restore_s": restore_s,
        "prefix_speedup": recompute_s / restore_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a real model's KV cache through a server.")
    parser.add_argument("--quick", action="store_true", help="6 sessions instead of 24")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="draw the picture here")
    arguments = parser.parse_args()

    try:
        binary = server_process.server_binary()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    numbers = run(binary, arguments.quick, say=lambda line: print(line, flush=True))
    print("\n" + main_job_report.table(numbers))
    if arguments.png:
        main_job_report.draw(numbers, arguments.png)
        print(f"picture: {arguments.png}")
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers) + "\n", encoding="utf-8")
        print(f"numbers: {arguments.json}")
    print(json.dumps({name: value for name, value in numbers.items() if name != "per_session"}))
    return 0 if is_right(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
