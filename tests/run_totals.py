"""Adds up the results of run.sh: says what was skipped and why, and ends in one line of totals.

  run_totals.py RESULTS_FOLDER STAGE...

The folder holds JUnit files (of ctest and pytest) and recorded.tsv (stage, test, result). Exit code 1 when
anything failed, or a test stage of those named ran nothing.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree

# The result file of each stage that tests.
_FILES = {
    "test-release": "release.xml",
    "test-asan": "asan.xml",
    "test-tsan": "tsan.xml",
    "test-model": "model.xml",
    "test-python": "python.xml",
    "crash": "crash.xml",
}
_RECORDED = {"fuzz", "peers", "sharing"}


def main() -> int:
    folder, stages = pathlib.Path(sys.argv[1]), sys.argv[2:]
    passed, skipped, failed = 0, [], []
    ran = {}
    for stage in stages:
        if stage in _FILES:
            ran[stage] = 0
            for name, result, reason in _junit(folder / _FILES[stage]):
                ran[stage] += result != "skipped"
                passed += result == "passed"
                if result == "skipped":
                    skipped.append(f"{stage}: {name}: {reason}")
                if result == "failed":
                    failed.append(f"{stage}: {name}")
        elif stage in _RECORDED:
            ran[stage] = 0
    recorded = folder / "recorded.tsv"
    stages_failed = []
    for line in recorded.read_text().splitlines() if recorded.exists() else []:
        stage, name, result = line.split("\t")
        if result == "stage-failed":
            stages_failed.append((stage, name))
            continue
        ran[stage] = ran.get(stage, 0) + 1
        passed += result == "passed"
        if result == "failed":
            failed.append(f"{stage}: {name}")
    # A stage that fails without a failed test (a build, a crash of the runner) counts as one.
    failed += [f"{stage}: {name}" for stage, name in stages_failed
               if not any(entry.startswith(f"{stage}: ") for entry in failed)]
    failed += [f"{stage}: ran no test" for stage, count in ran.items()
               if count == 0 and not any(entry.startswith(f"{stage}: ") for entry in failed)]

    for title, entries in (("Skipped", skipped), ("Failed", failed)):
        if entries:
            print(f"\n{title}:")
            print("\n".join(f"  {entry}" for entry in entries))
    print(f"\n{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or passed == 0 and ran else 0


def _junit(path: pathlib.Path):
    """(name, "passed" | "failed" | "skipped", reason) of each test of a file; nothing if there is none."""
    if not path.exists():
        return
    try:
        tree = xml.etree.ElementTree.parse(path)
    except xml.etree.ElementTree.ParseError as error:
        yield path.name, "failed", str(error)
        return
    for case in tree.iter("testcase"):
        name = case.get("name", "?")
        if case.get("status") == "disabled":
            continue  # run by another test, as its child
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed", ""
        elif skip is not None:
            yield name, "skipped", _reason(skip, case.findtext("system-out") or "")
        else:
            yield name, "passed", ""


def _reason(skip: xml.etree.ElementTree.Element, output: str) -> str:
    """GoogleTest prints the reason between the test's start and its 'SKIPPED' line; pytest has it as message."""
    if match := re.search(r": Skipped\n(.*?)\n*\[  SKIPPED \]", output, re.DOTALL):
        return " ".join(match[1].split()) or "no reason given"
    return " ".join((skip.get("message") or "no reason given").split())


if __name__ == "__main__":
    sys.exit(main())
