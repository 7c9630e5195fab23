"""A frame of any codec to raw KV.

  python3 tests/reference/decode.py FRAME SPEC TOKENS [PROFILE [REFERENCES]] > RAW

SPEC is a stored ModelSpec (storage/kv/model_spec.cc), TOKENS are the block's token ids as u32. REFERENCES are the blocks
that a referenced frame names, one behind the other: 16 bytes of node, u32 first_position, token ids, raw KV.
"""

import pathlib
import struct
import sys

import frame as frames
import lossless
import model
import profile as profiles
import residual
import rotated
from damage import Damage, NewerFormat, Reader, WrongQuestion, crc32c, require


def parse_references(data: bytes, spec) -> list:
    reader = Reader(data, "references")
    found = []
    while reader.left() > 0:
        found.append(residual.Reference(node=reader.bytes(16), first_position=reader.number("I"),
                                        tokens=tuple(reader.array("I", spec.block_tokens)),
                                        raw=reader.bytes(spec.raw_bytes())))
    return found


def decode(frame, spec, tokens, profile=None, references=()) -> bytes:
    """`frame` is parsed, as are `spec` and `profile`."""
    if frame.model != spec.id:
        raise WrongQuestion("frame: of another model")
    require(frame.raw_bytes == spec.raw_bytes(), "frame: raw_bytes is not that of the model")
    if frame.codec == frames.RAW:
        require(frame.section_bytes == frames.raw_section_bytes(spec.layer_bytes()), "frame: sections of a raw frame")
        return frame.body
    if frame.tokens_crc32c != crc32c(struct.pack(f"<{len(tokens)}I", *tokens)):
        raise WrongQuestion("frame: of other tokens")
    if spec.layout_tag and (frame.codec != frames.LOSSLESS or frame.profile != frames.NO_PROFILE):
        raise WrongQuestion("frame: KV in an order of its engine's own is raw, or lossless without a profile")
    if frame.codec == frames.ROTATED:
        return rotated.decode(frame, spec)
    if frame.profile == frames.NO_PROFILE:
        return lossless.decode(frame, spec)
    if profile is None:
        raise WrongQuestion(f"frame: needs profile {frame.profile.hex()}")
    return residual.decode(frame, spec, profile, tokens, references=references)


def main(paths) -> None:
    frame, spec, tokens, *more = [pathlib.Path(path).read_bytes() for path in paths]
    parsed_spec = model.parse(spec)
    profile = profiles.parse(more[0]) if more else None
    references = parse_references(more[1], parsed_spec) if len(more) > 1 else ()
    require(len(tokens) % 4 == 0, "tokens: not a whole number of u32")
    token_ids = struct.unpack(f"<{len(tokens) // 4}I", tokens)
    sys.stdout.buffer.write(decode(frames.parse(frame), parsed_spec, token_ids, profile, references))


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5, 6):
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except (Damage, NewerFormat, WrongQuestion, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
