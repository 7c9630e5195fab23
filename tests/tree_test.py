"""Holds the tree against its own rules: who may include whom, which file has which test, what README says.

Run by ctest with any Python 3.11; needs nothing but the standard library.
"""

import collections
import fnmatch
import os
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folder -> the folders that it may include besides itself. A folder without a row may hold no C++.
STORAGE = {"storage/base", "storage/kv", "storage/codec", "storage/meta", "storage/payload",
           "storage/trie", "storage/group", "storage/engine"}
LAYERS = {
    "storage/base": set(),
    "storage/kv": {"storage/base"},
    "storage/codec": {"storage/base", "storage/kv"},
    "storage/meta": {"storage/base", "storage/kv"},
    "storage/payload": {"storage/base", "storage/kv"},
    "storage/trie": {"storage/base", "storage/kv", "storage/meta"},
    "storage/group": {"storage/base", "storage/kv", "storage/meta", "storage/trie"},
    "storage/engine": STORAGE,
    "gpu": {"storage/base", "storage/kv", "storage/codec"},
    "proto": set(),
    "client": {"storage/base", "storage/kv", "storage/codec", "proto"},
    "server": {"storage/base", "storage/kv", "storage/tenant", "storage/engine", "proto", "client"},
    "server/worker": {"storage/base", "storage/kv", "storage/codec", "storage/trie", "proto", "client",
                      "gpu", "server"},
}

# Foreign headers with one home: pattern of the header -> pattern of the files that may include it. The tests of a
# file may include what the file may.
HOMES = {
    r"rocksdb/": r"storage/meta/",
    r"rados/": r"storage/(meta|payload)/(.*_)?rados",
    r"(cuda|cublas|cudnn|nvrtc|curand|cub/|thrust/)": r"gpu/",
    r"(oneapi|dnnl)": r"storage/codec/matrix_product",
    r"(grpcpp|grpc)/": r"(server|client|proto|e2e|bench)/",
    r"(oneapi|Eigen)/": r"storage/codec/",
}

# Tests that look at more than one folder, and what they need.
FREE_TESTS = {"tests/e2e", "tests/bench", "tests/fuzz"}

# Source files (or patterns of them) without an x_test.cc of their own, as parts of something larger -> the test of
# that. Keep it short: a file with something to claim has a test that claims it.
WITHOUT_OWN_TEST = {
    # Steps of a call, which mean nothing without a connection.
    "client/borrowed_slices.cc": "tests/client/client_test.cc",
    "client/channel_pool.cc": "tests/client/client_test.cc",
    "client/model_spec_from_proto.cc": "tests/server/wire_conversion_test.cc",
    "client/model_spec_to_proto.cc": "tests/client/client_test.cc",
    "client/put_connection.cc": "tests/client/client_test.cc",
    "client/raw_call.cc": "tests/client/client_test.cc",
    "client/status_from_grpc.cc": "tests/client/client_test.cc",
    "client/worker_call.cc": "tests/client/worker_backend_test.cc",
    "server/connection_limits.cc": "tests/server/kv_server_test.cc",
    "server/engine_put_host.cc": "tests/server/bulk_call_test.cc",
    "server/worker/codec_service.cc": "tests/server/worker/kv_worker_test.cc",
    # One call each.
    "client/admin_client.cc": "tests/client/ctl/cli_test.cc",
    "client/ctl/exit_code.cc": "tests/client/ctl/cli_test.cc",
    "client/ctl/verb*.cc": "tests/client/ctl/cli_test.cc",
    # main().
    "client/ctl/kvtrie_main.cc": "tests/client/ctl/cli_test.cc",
    "server/server_main.cc": "tests/model/main_job_test.py",
    "server/worker/worker_main.cc": "tests/client/worker_backend_test.cc",
    # Need a device, where all of it is tested as one; without CUDA, all there is is a message.
    "gpu/cuda_kernels.cu": "tests/gpu/cuda_device_test.cc",
    "gpu/cuda_products.cc": "tests/gpu/cuda_device_test.cc",
    "gpu/no_cuda_device.cc": "tests/gpu/backends_test.cc",
    # One source, built for each instruction set.
    "storage/codec/codec_kernels_*.cc": "tests/storage/codec/codec_kernels_test.cc",
    # Parts of the engine's class.
    "storage/engine/engine_describe.cc": "tests/storage/engine/engine_test.cc",
    "storage/engine/engine_eviction.cc": "tests/storage/engine/engine_space_test.cc",
    "storage/engine/engine_lookup.cc": "tests/storage/engine/engine_test.cc",
    "storage/engine/engine_paths.cc": "tests/storage/engine/engine_test.cc",
    "storage/engine/engine_publish.cc": "tests/storage/engine/engine_put_test.cc",
    "storage/engine/engine_removal.cc": "tests/storage/engine/engine_space_test.cc",
    "storage/engine/engine_sync.cc": "tests/storage/engine/engine_disk_test.cc",
    "storage/engine/engine_verify.cc": "tests/storage/engine/engine_recovery_test.cc",
}

# What this repository never says. Bracketed so that this file does not say it either.
FORBIDDEN = [
    r"/work[/]",
    r"\bshared[/](cases|codec|hooks|integration|peers|[A-Z]+[.]md|ops[.]md)",
    r"\b(DESIGN|CODE|FINDINGS|MEASURED)[.]md\b",
    r"\bpublic-reports[.]",
    r"\bissues (show|list|file)[ ]\d",
    r"(pypi|pythonhosted|npmjs)[.](org|com)",
    r"\b(deb|ftp|security|snapshot)[.]debian[.]org",
    r"\b(files|proxy|registry|static|index)[.](pythonhosted|golang|npmjs|crates)[.]",
]

_CXX = {".h", ".cc", ".c", ".cu"}
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
_GENERATED = "kvtrie/v1/"  # headers that protoc writes belong to proto


def _files():
    """All files of the tree, as paths from the root; build trees and caches are not part of it."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders
                            if name not in (".git", "build", "__pycache__", ".pytest_cache", ".cache"))
        # Of a worktree, .git is a file, which says where the repository is.
        found += [(pathlib.Path(folder) / name).relative_to(ROOT) for name in sorted(names) if name != ".git"]
    return found


FILES = _files()
CXX_FILES = [path for path in FILES if path.suffix in _CXX]


def _layer_of(path: str) -> str:
    """The row of LAYERS that a path belongs to; the first folder where there is none."""
    parts = path.split("/")
    two = "/".join(parts[:2])
    return two if parts[0] in ("storage", "tests") or two in LAYERS else parts[0]


def _includes():
    """(file, line number, bracket, header) of each include line of our C++ files."""
    for path in CXX_FILES:
        text = (ROOT / path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            if match := _INCLUDE.match(line):
                yield path.as_posix(), number, match[1], match[2]


def _owner(header: str) -> str | None:
    """The row of LAYERS that a header belongs to; None for a foreign one."""
    if header.startswith(_GENERATED):
        return "proto"
    return _layer_of(header) if (ROOT / header).is_file() else None


class TreeTest(unittest.TestCase):
    maxDiff = None

    def assert_none(self, findings, looked_at):
        self.assertGreater(looked_at, 0, "looked at nothing")
        if findings:
            self.fail("\n" + "\n".join(findings))

    def test_folders_include_only_what_the_table_allows(self):
        findings, looked_at = [], 0
        for path, number, _, header in _includes():
            if path.startswith("tests/"):
                continue
            looked_at += 1
            layer, owner = _layer_of(path), _owner(header)
            if layer not in LAYERS:
                findings.append(f"{path}:{number}: {layer} has no row in LAYERS")
            elif owner and owner != layer and owner not in LAYERS[layer]:
                findings.append(f"{path}:{number}: {layer} must not include {header}")
        self.assert_none(findings, looked_at)

    def test_tests_include_only_what_their_folder_may(self):
        """More would mean that a test of a lower folder leans on a higher one."""
        findings, looked_at = [], 0
        for path, number, _, header in _includes():
            if not path.startswith("tests/") or _layer_of(path) in FREE_TESTS:
                continue
            looked_at += 1
            layer, owner = _layer_of(path.removeprefix("tests/")), _owner(header)
            if layer not in LAYERS or owner is None or owner.startswith("tests"):
                continue
            if owner != layer and owner not in LAYERS[layer]:
                findings.append(f"{path}:{number}: tests of {layer} must not include {header}")
        self.assert_none(findings, looked_at)

    def test_our_headers_are_included_by_their_whole_path(self):
        findings, looked_at = [], 0
        for path, number, bracket, header in _includes():
            if path.startswith("tests/bench/peers/") or bracket == "<":
                continue
            looked_at += 1
            known = _owner(header) or header.split("/")[0] in (
                "absl", "gmock", "gtest", "google", "nlohmann", "oneapi", "prometheus", "rocksdb", "spdlog")
            if not known:
                findings.append(f"{path}:{number}: no such header of ours: {header}")
        self.assert_none(findings, looked_at)

    def test_foreign_headers_stay_in_their_home(self):
        findings, looked_at = [], 0
        for path, number, _, header in _includes():
            looked_at += 1
            for pattern, home in HOMES.items():
                if re.match(pattern, header) and not re.match(home, path.removeprefix("tests/")):
                    findings.append(f"{path}:{number}: {header} is included outside of {home}")
        self.assert_none(findings, looked_at)

    def test_each_source_file_has_its_test(self):
        sources = [path for path in CXX_FILES
                   if path.suffix in (".cc", ".cu") and path.parts[0] != "tests"]
        findings, used = [], set()
        for path in sources:
            test = pathlib.Path("tests") / path.with_name(path.stem + "_test.cc")
            exceptions = {pattern for pattern in WITHOUT_OWN_TEST
                          if fnmatch.fnmatchcase(path.as_posix(), pattern)}
            used |= exceptions
            has_test = (ROOT / test).is_file()
            if not has_test and not exceptions:
                findings.append(f"{path}: no {test}")
            if has_test and path.as_posix() in exceptions:
                findings.append(f"{path}: has a test now; take it off the list of exceptions")
        findings += [f"{pattern}: an exception that no file needs" for pattern in WITHOUT_OWN_TEST
                     if pattern not in used]
        findings += [f"{pattern}: its test {test} does not exist"
                     for pattern, test in WITHOUT_OWN_TEST.items() if not (ROOT / test).is_file()]
        self.assert_none(findings, len(sources))

    def test_each_source_file_is_built(self):
        """Sources are listed by hand; one that was forgotten would never be compiled."""
        findings = []
        listed = collections.defaultdict(str)
        for path in FILES:
            if path.name == "CMakeLists.txt":
                listed[path.parent] = (ROOT / path).read_text(encoding="utf-8")
        sources = [path for path in CXX_FILES if path.suffix in (".cc", ".cu")]
        for path in sources:
            near = [text for folder, text in listed.items()
                    if folder in path.parents or folder == pathlib.Path("tests")]
            if not any(re.search(rf"(?<![\w-]){re.escape(path.stem)}(?![\w-])", text) or
                       re.search(rf"kv_fuzz\({re.escape(path.stem.removesuffix('_fuzz'))}\b", text)
                       for text in near):
                findings.append(f"{path}: named in no CMakeLists.txt")
        self.assert_none(findings, len(sources))

    def test_cxx_file_names_are_unique(self):
        by_name = collections.defaultdict(list)
        for path in CXX_FILES:
            by_name[path.name].append(path.as_posix())
        findings = [f"{name}: {', '.join(paths)}" for name, paths in by_name.items()
                    if len(paths) > 1]
        self.assert_none(findings, len(by_name))

    def test_readme_names_every_folder(self):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        named = set(re.findall(r"^\| `([\w/]+?)/?` \|", readme, re.MULTILINE))
        folders = {path.parts[0] for path in FILES if len(path.parts) > 1}
        # Folders with a row of their own in LAYERS.
        folders |= {"/".join(path.parts[:2]) for path in FILES
                    if len(path.parts) > 2 and "/".join(path.parts[:2]) in LAYERS}
        folders = {folder for folder in folders if not folder.startswith(".")}
        self.assertGreater(len(named), 0, "README.md has no table of folders")
        self.assertEqual(sorted(named), sorted(folders))

    def test_links_of_documents_lead_somewhere(self):
        findings, looked_at = [], 0
        for path in FILES:
            if path.suffix != ".md":
                continue
            for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / path).read_text(encoding="utf-8")):
                looked_at += 1
                if "://" not in target and not (ROOT / path.parent / target).exists():
                    findings.append(f"{path}: dead link to {target}")
        self.assert_none(findings, looked_at)

    def test_no_file_says_what_is_not_ours_to_say(self):
        forbidden = [re.compile(pattern, re.IGNORECASE) for pattern in FORBIDDEN]
        findings, looked_at = [], 0
        for path in FILES:
            try:
                lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError:
                continue  # binary
            looked_at += 1
            for number, line in enumerate(lines, start=1):
                findings += [f"{path}:{number}: {match[0]}" for pattern in forbidden
                             if (match := pattern.search(line))]
        self.assert_none(findings, looked_at)


if __name__ == "__main__":
    unittest.main(verbosity=2)
