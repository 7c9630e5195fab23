"""kvtrie beside what could be used instead of it, on this machine, over loopback.

Installs the peers into a cached folder (the first time: some minutes, 6 GB, nearly all of it
PyTorch for LMCache), then measures all of them in turn, round by round, and prints one table of
medians and which of kvtrie's targets are met. A peer that does not start has a row that says why.

cpu_s_per_gb is user and system time of client and server together; keys_per_s counts blocks;
p50_us and p99_us are per request of `batch` blocks. GB are 10^9 bytes.

Nothing is pinned. Where the scheduler puts a client and its server decides short latencies: on
one core Redis answers an EXISTS of 256 keys in half the time that it takes on two. Other work on
the machine changes that, so compare p50 within one run, and best on a machine that is idle.
"""

import argparse
import json
import os
import pathlib
import resource
import signal
import sys
import time

import report
import targets
from environment import Environment, PeerError
from peers import PEERS, ROW_ORDER, Workload

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
CACHE = pathlib.Path(os.environ.get("KVTRIE_CACHE") or pathlib.Path.home() / ".cache/kvtrie") / "peers"
BLOCK_SIZES = (256 << 10, 1 << 20)
FULL = Workload(BLOCK_SIZES, ((1, 1), (1, 16), (4, 1), (4, 16)), 256 << 20, 512 << 20)
QUICK = Workload(BLOCK_SIZES, ((1, 1), (1, 16)), 64 << 20, 128 << 20)


def parse_options():
    parser = argparse.ArgumentParser(prog="peers.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS),
                        help=f"some of {','.join(PEERS)}")
    parser.add_argument("--build", type=pathlib.Path, default=REPOSITORY / "build" / "release",
                        help="folder of kvtrie-server and kvtrie (default build/release)")
    parser.add_argument("--quick", action="store_true",
                        help="a quarter of the bytes, one client, one round: does it all run?")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there, one per line")
    options = parser.parse_args()
    unknown = sorted(set(options.peers) - set(PEERS))
    if unknown:
        parser.error(f"no such peers: {', '.join(unknown)}")
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


def install_peers(names, environment, build):
    """The peers that can be measured, and a row for each that cannot."""
    peers, rows = [], []
    for name in names:
        peer = PEERS[name](environment, build)
        try:
            peer.install()
            peers.append(peer)
        except PeerError as error:
            rows.append({"peer": name, "reason": str(error)})
    return peers, rows


def measure(peer, workload):
    """One round of one peer; a failure ends the round and leaves a row with the reason."""
    rows = []
    try:
        for row in peer.measure(workload):
            rows.append({"peer": peer.name} | row)
    except (PeerError, OSError) as error:
        rows.append({"peer": peer.name, "reason": str(error)})
    return rows


def machine_busy_seconds():
    """CPU seconds that all processes of this machine have used."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _, _, irq, softirq = map(int, stat.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_busy_seconds():
    """CPU seconds of this process and of the servers and clients that it ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main():
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    environment = Environment(CACHE)
    peers, rows = install_peers(options.peers, environment, options.build.resolve())
    workload = QUICK if options.quick else FULL
    began, others_began = time.monotonic(), machine_busy_seconds() - own_busy_seconds()
    try:
        for round_number in range(1, options.rounds + 1):
            for peer in peers:
                peer_began = time.monotonic()
                rows += measure(peer, workload)
                print(f"  round {round_number} {peer.name}: {time.monotonic() - peer_began:.0f} s",
                      file=sys.stderr, flush=True)
    finally:
        environment.remove_data()

    others_seconds = machine_busy_seconds() - own_busy_seconds() - others_began
    busy_cores = others_seconds / (time.monotonic() - began)
    medians = report.median_rows(rows)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in medians))
    print(f"medians of {options.rounds} rounds, {workload.bytes_moved >> 20} MiB per put and get, "
          f"{os.cpu_count()} cores, of which other work kept {busy_cores:.1f} busy\n")
    print(report.table(medians, ROW_ORDER))
    print("\ntargets of kvtrie")
    print("\n".join(targets.verdicts(medians)))
    if not any(row["keys_per_s"] is not None for row in medians):
        sys.exit("no peer was measured")


if __name__ == "__main__":
    main()
