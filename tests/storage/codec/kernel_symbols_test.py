"""The files that are built for a better instruction set leave nothing behind that runs on a machine without it.

The linker keeps one copy of an inline function that several files have: were it that of codec_kernels_avx512.cc,
the whole program would need AVX-512. Nor may such a file run anything at start-up.

    kernel_symbols_test.py libkv_codec.a
"""

import re
import subprocess
import sys
import unittest

ARCHIVE = sys.argv.pop() if len(sys.argv) > 1 else "libkv_codec.a"


class KernelSymbolsTest(unittest.TestCase):
    def test_nothing_is_shared_with_other_files(self):
        listing = subprocess.run(["nm", "-C", ARCHIVE], check=True, capture_output=True, text=True).stdout
        members = {part.partition(":\n")[0]: part.partition(":\n")[2] for part in listing.split("\n\n")}
        looked_at = 0
        for name, symbols in members.items():
            match = re.search(r"codec_kernels_(avx\w+)\.cc", name)
            if not match:
                continue
            looked_at += 1
            for symbol in re.findall(r"^[0-9a-f]* +([WVu] .*|t _GLOBAL__sub_I.*)$", symbols, re.MULTILINE):
                if "personality" not in symbol:  # of the language, no code
                    self.assertIn(f"lanes_{match[1]}::", symbol, f"in {name.strip()}")
        self.assertEqual(looked_at, 2, f"{ARCHIVE} has not the files of this test")


if __name__ == "__main__":
    unittest.main(verbosity=2)
