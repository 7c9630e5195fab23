"""A Mooncake process that only lends its memory to the pool: the storage node.

Arguments: master's port, segment size in bytes. Prints "ready" once the segment is mounted.
"""

import sys
import time

from mooncake.store import MooncakeDistributedStore

TRANSFER_BUFFER_BYTES = 64 << 20


def main():
    master_port, segment_bytes = int(sys.argv[1]), int(sys.argv[2])
    store = MooncakeDistributedStore()
    error = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, TRANSFER_BUFFER_BYTES, "tcp",
                        "", f"127.0.0.1:{master_port}")
    if error:
        sys.exit(f"mooncake setup: error {error}")
    print("ready", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
