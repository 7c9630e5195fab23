"""python -m kvtrie.calibrate"""

import sys

from kvtrie.calibrate import options
from kvtrie.errors import KvtrieError


def main() -> int:
    try:
        parsed = options.parse()
        try:
            from kvtrie.calibrate import run  # torch takes seconds to load, and --help does not need it
        except ImportError as missing:
            raise KvtrieError(f"{missing}: pip install './client/python[calibrate]'") from missing
        return run.calibrate(parsed)
    except KvtrieError as error:
        print(f"kvtrie.calibrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nkvtrie.calibrate: ended; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
