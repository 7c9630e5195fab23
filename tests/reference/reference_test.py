"""Reads tests/golden/v1 with the decoder of this folder, which is written from the pages of storage/codec alone.

Run by ctest with any Python 3.11; needs nothing but the standard library.
"""

import dataclasses
import pathlib
import struct
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import decode
import dtypes
import frame as frames
import lossless
import model
import profile as profiles
import residual
import rotated
from damage import Damage, NewerFormat, WrongQuestion, crc32c

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


class Case:
    """One frame of v1/codec, and what it decodes to."""

    def __init__(self, path: pathlib.Path):
        self.name = str(path.relative_to(GOLDEN))
        self.bytes = path.read_bytes()
        block, coding = path.stem.split("_", 1)
        self.coding = coding
        self.profile_path = path.parent.parent / "profile.bin"
        self.spec = model.parse((path.parent / "spec.bin").read_bytes())
        tokens = (path.parent / f"{block}_tokens.bin").read_bytes()
        self.tokens = struct.unpack(f"<{self.spec.block_tokens}I", tokens)
        references = path.with_name(f"{block}_references.bin")
        self.references = decode.parse_references(references.read_bytes(), self.spec) if references.exists() else []
        restored = path.with_name(f"{path.stem}_kv.bin")
        self.raw = (restored if restored.exists() else path.with_name(f"{block}_kv.bin")).read_bytes()

    @property
    def profile(self):
        if self.profile_path not in _PROFILES:
            _PROFILES[self.profile_path] = profiles.parse(self.profile_path.read_bytes())
        return _PROFILES[self.profile_path]

    def decode(self, data=None, frame=None):
        return decode.decode(frame or frames.parse(self.bytes if data is None else data), self.spec, self.tokens,
                             self.profile, self.references)


_PROFILES = {}
CASES = [Case(path) for path in sorted(GOLDEN.glob("v1/codec/*/*/*_*.bin"))
         if not path.stem.endswith(("_kv", "_tokens", "_references"))]


def reseal(data: bytes) -> bytes:
    """The frame with checksums that are right for its bytes."""
    section_count, header_bytes = struct.unpack("<II", data[12:20])
    data = bytearray(data)
    at = header_bytes
    for i in range(section_count):
        entry = 56 + 8 * i
        size = int.from_bytes(data[entry:entry + 4], "little")
        data[entry + 4:entry + 8] = struct.pack("<I", crc32c(data[at:at + size]))
        at += size
    used = 56 + 8 * section_count
    data[used:used + 4] = struct.pack("<I", crc32c(data[:used]))
    return bytes(data)


class ReferenceTest(unittest.TestCase):

    def assert_same(self, got: bytes, want: bytes, dtype: int):
        if got != want:
            got, want = dtypes.read(dtype, got), dtypes.read(dtype, want)
            other = [i for i in range(len(want)) if i >= len(got) or got[i] != want[i]]
            self.fail(f"{len(other)} of {len(want)} numbers differ, the first at {other[0]}")

    def test_every_frame_decodes_to_its_bytes(self):
        self.assertGreater(len(CASES), 40)
        for case in CASES:
            with self.subTest(case.name):
                self.assert_same(case.decode(), case.raw, case.spec.dtype)

    def test_frames_use_what_the_format_has(self):
        """Else the test above would claim more than it shows."""
        codecs, exponents = set(), set()
        escapes = low_bits = left_out = exact_tokens = first_tokens = in_table = sections = 0
        mixed = several = cut = 0
        for case in CASES:
            frame = frames.parse(case.bytes)
            codecs.add((frame.codec, frame.codec != frames.RAW and frame.profile != frames.NO_PROFILE))
            if frame.codec not in (frames.LOSSLESS, frames.RESIDUAL, frames.REFERENCED):
                continue
            if frame.profile == frames.NO_PROFILE:
                continue
            case.decode(frame=frame)
            body = residual.Body(frame, case.spec, case.profile, case.tokens, references=case.references)
            if body.references:
                left = case.spec.block_tokens - len(body.references) - len(body.exact_tokens) - body.first_token
                mixed += left > 0
                several += len(case.references) > 1
                cut += any(t - 1 in body.references and t + 1 in body.references for t in body.exact_tokens)
            exact_tokens += len(body.exact_tokens)
            first_tokens += body.first_token
            sections += len(frame.section_bytes) > 1
            in_table += any(token in case.profile.table_rows for token in case.tokens)
            values = [q for rows in frame.values for row in rows if row is not None for q in row]
            escapes += sum(abs(q) >= 64 << 8 for q in values)
            low_bits += sum(64 <= abs(q) < 64 << 8 for q in values)
            left_out += sum(residual.NOT_CODED in scales for plane in case.profile.planes for scales in plane.scales)
            exponents.add(case.profile.group_count)
        self.assertEqual(codecs, {(frames.RAW, False), (frames.LOSSLESS, False), (frames.LOSSLESS, True),
                                  (frames.RESIDUAL, True), (frames.ROTATED, False), (frames.REFERENCED, True)})
        self.assertEqual(exponents, {0, 1, 2})
        for count in (escapes, low_bits, left_out, exact_tokens, first_tokens, in_table, sections, mixed, several, cut):
            self.assertGreater(count, 0)

    def test_leading_sections_give_leading_layers(self):
        seen = 0
        for case in CASES:
            frame = frames.parse(case.bytes)
            if case.coding not in ("high", "near_exact", "small", "exact") or len(frame.section_bytes) == 1:
                continue
            for sections in range(1, len(frame.section_bytes)):
                with self.subTest(f"{case.name}, {sections} sections"):
                    part = residual.decode(frame, case.spec, case.profile, case.tokens, sections)
                    layers = residual.Body(frame, case.spec, case.profile, case.tokens).layers[sections - 1]
                    self.assertEqual(len(part), sum(case.spec.layer_bytes()[:layers]))
                    self.assertGreater(len(part), 0)
                    self.assert_same(part, case.raw[:len(part)], case.spec.dtype)
                    seen += 1
        self.assertGreater(seen, 0)

    def test_every_changed_byte_is_refused(self):
        for case in CASES:
            with self.subTest(case.name):
                header_bytes = int.from_bytes(case.bytes[16:20], "little")
                body = range(header_bytes, len(case.bytes), 1 if len(case.bytes) < 1200 else 211)
                for at in (*range(header_bytes), *body):
                    damaged = bytearray(case.bytes)
                    damaged[at] ^= 1 << at % 8
                    with self.assertRaises((Damage, NewerFormat), msg=at):
                        frames.parse(bytes(damaged))

    def test_cut_and_longer_frames_are_refused(self):
        for case in CASES:
            with self.subTest(case.name):
                for damaged in (case.bytes[:-1], case.bytes[:60], case.bytes[:3], b"", case.bytes + b"\0"):
                    with self.assertRaises(Damage):
                        frames.parse(damaged)

    def test_damage_under_right_checksums_is_named_or_decodes(self):
        """What a checksum does not see must not stop the reader in another way than by naming it."""
        for case in CASES:
            with self.subTest(case.name):
                header_bytes = int.from_bytes(case.bytes[16:20], "little")
                for at in range(header_bytes, len(case.bytes), max((len(case.bytes) - header_bytes) // 4, 1)):
                    damaged = bytearray(case.bytes)
                    damaged[at] ^= 1 << at % 8
                    try:
                        self.assertEqual(len(case.decode(reseal(bytes(damaged)))), len(case.raw))
                    except (Damage, NewerFormat, WrongQuestion):
                        pass

    def test_other_tokens_models_and_profiles_are_refused(self):
        for case in CASES:
            with self.subTest(case.name):
                frame = frames.parse(case.bytes)
                if frame.codec == frames.RAW:
                    continue
                with self.assertRaises(WrongQuestion):
                    decode.decode(frame, case.spec, (case.tokens[0] ^ 1, *case.tokens[1:]), case.profile)
                if frame.profile != frames.NO_PROFILE:
                    others = [other.profile for other in CASES if other.profile_path != case.profile_path]
                    for profile in (None, others[0]):
                        with self.assertRaises(WrongQuestion):
                            decode.decode(frame, case.spec, case.tokens, profile)

    def test_other_references_are_refused(self):
        cases = [case for case in CASES if case.references]
        self.assertGreater(len(cases), 3)
        for case in cases:
            frame = frames.parse(case.bytes)
            for change in ({"node": bytes(16)}, {"first_position": 7}, {"raw": bytes(len(case.raw))},
                           {"tokens": tuple(token + 1 for token in case.references[-1].tokens)}):
                others = case.references[:-1] + [dataclasses.replace(case.references[-1], **change)]
                with self.subTest(f"{case.name}, {change.keys()}"), self.assertRaises(WrongQuestion):
                    decode.decode(frame, case.spec, case.tokens, case.profile, others)

    def test_a_changed_byte_of_a_profile_is_refused(self):
        paths = sorted({case.profile_path for case in CASES})
        self.assertGreater(len(paths), 1)
        for path in paths:
            data = path.read_bytes()
            for at in (*range(92), *range(92, len(data), len(data) // 5)):
                damaged = bytearray(data)
                damaged[at] ^= 1 << at % 8
                with self.assertRaises((Damage, NewerFormat), msg=at):
                    profiles.parse(bytes(damaged))
            for damaged in (data[:-1], data + b"\0", data[:1023], b""):
                with self.assertRaises(Damage):
                    profiles.parse(damaged)

    def test_corrupt_frames_are_refused(self):
        paths = sorted(GOLDEN.glob("corrupt/frame_*.bin"))
        self.assertGreater(len(paths), 0)
        for path in paths:
            with self.subTest(path.name), self.assertRaises(Damage):
                frames.parse(path.read_bytes())


class BodyTest(unittest.TestCase):
    """Bodies that make_codec.py wrote, by code that these modules share nothing with."""

    def spec(self, dtype, layers, block_tokens):
        return model.Spec(id=b"", codec_key=b"", dtype=dtype, layers=layers, pairing=model.NO_ROPE, theta=0, rotary_dims=0,
                          scaling=b"", block_tokens=block_tokens, dtype_bytes=dtypes.BYTES[dtype])

    def frame(self, name: str):
        body = (GOLDEN / "v1" / f"{name}.bin").read_bytes()
        return frames.Frame(codec=0, quality=0, model=b"", raw_bytes=0, section_bytes=[], body=body)

    def test_lossless(self):
        sys.path.insert(0, str(GOLDEN))
        import make_codec
        for name, (dtype, _, _) in make_codec.DTYPES.items():
            with self.subTest(name):
                layers, block_tokens, noise_layer = make_codec.LOSSLESS_BLOCK
                block = make_codec.golden_codes(name, layers, block_tokens, noise_layer)
                raw = b"".join(dtypes.write(dtype, row) for kinds in block for rows in kinds for row in rows)
                self.assertEqual(lossless.decode(self.frame(f"lossless_{name}"), self.spec(dtype, layers, block_tokens)), raw)

    def test_rotated(self):
        """Those bodies were decoded in double precision: a number may be rounded to the other side, and what cancels
        leaves float32's errors of numbers of about 100.
        """
        spec = self.spec(dtypes.BFLOAT16, [(2, 16, 12), (1, 5, 0)], 24)
        for bits in ("23", "45"):
            raw = rotated.decode(self.frame(f"rotated_{bits}"), spec)
            decoded = (GOLDEN / "v1" / f"rotated_{bits}_decoded.bin").read_bytes()
            got, want = [[dtypes.number(spec.dtype, code) for code in dtypes.read(spec.dtype, data)] for data in (raw, decoded)]
            self.assertEqual(len(got), len(want))
            for a, b in zip(got, want):
                if a == a or b == b:
                    self.assertLessEqual(abs(a - b), abs(b) / 128 + 1e-4)


if __name__ == "__main__":
    unittest.main()
