"""KV cache <-> the store's raw KV blocks.

A block is K and V of `block_tokens` consecutive tokens, in this order of bytes:

  [layer][K, V][token][KV head][dim], bfloat16, little-endian; K after RoPE, half-split pairing

Block i holds tokens i * block_tokens and following. Tokens of a partly filled last block have no
block.
"""

from collections.abc import Sequence

import numpy as np

import smollm2
import smollm2_weights


def block_bytes(config: smollm2_weights.ModelConfig, block_tokens: int) -> int:
    """Size of one block."""
    return 2 * config.layer_count * 2 * block_tokens * config.kv_head_count * config.head_dim


def full_block_count(cache: smollm2.KvCache, block_tokens: int) -> int:
    return cache.length // block_tokens


def pack_block(cache: smollm2.KvCache, block_index: int, block_tokens: int) -> bytes:
    """The bytes of one full block.

    Errors: IndexError when the cache does not hold all of the block's tokens.
    """
    if not 0 <= block_index < full_block_count(cache, block_tokens):
        raise IndexError(f"block {block_index} of {cache.length} tokens, {block_tokens} per block")
    tokens = slice(block_index * block_tokens, (block_index + 1) * block_tokens)
    kv = np.stack([cache.k[:, :, tokens], cache.v[:, :, tokens]], axis=1)
    bf16_bits = np.ascontiguousarray(kv.swapaxes(2, 3)).view(np.uint32) >> 16
    return bf16_bits.astype("<u2").tobytes()


def pack_blocks(cache: smollm2.KvCache, block_tokens: int, first_block: int = 0) -> list[bytes]:
    """All full blocks from `first_block` on."""
    block_count = full_block_count(cache, block_tokens)
    return [pack_block(cache, index, block_tokens) for index in range(first_block, block_count)]


def unpack_block(config: smollm2_weights.ModelConfig, block: bytes,
                 block_tokens: int) -> np.ndarray:
    """Float32 [layers, 2 (K, V), tokens, KV heads, head_dim] of one block.

    Errors: ValueError when the length is not that of a block.
    """
    if len(block) != block_bytes(config, block_tokens):
        raise ValueError(f"{len(block)} bytes are not a block of {block_tokens} tokens")
    bf16_bits = np.frombuffer(block, "<u2").reshape(config.layer_count, 2, block_tokens,
                                                    config.kv_head_count, config.head_dim)
    return (bf16_bits.astype(np.uint32) << 16).view(np.float32)


def append_blocks(cache: smollm2.KvCache, blocks: Sequence[bytes], block_tokens: int) -> None:
    """Appends stored blocks to a cache, as if their tokens had been computed.

    Errors: ValueError when the cache ends inside a block or has too little room, or a block has the
    wrong size.
    """
    if cache.length % block_tokens != 0:
        raise ValueError(f"{cache.length} tokens are no whole number of blocks of {block_tokens}")
    if cache.length + len(blocks) * block_tokens > cache.max_tokens:
        raise ValueError(f"{len(blocks)} blocks do not fit behind {cache.length} tokens")
    for block in blocks:
        kv = unpack_block(cache.config, block, block_tokens).swapaxes(2, 3)
        tokens = slice(cache.length, cache.length + block_tokens)
        cache.k[:, :, tokens], cache.v[:, :, tokens] = kv[:, 0], kv[:, 1]
        cache.length += block_tokens
