"""What kvtrie must reach beside its peers, as data, and the check of rows against it."""

import dataclasses

KIB_256 = 256 << 10
MIB_1 = 1 << 20
LOWER_IS_BETTER = {"cpu_s_per_gb", "p50_us", "p99_us"}


@dataclasses.dataclass(frozen=True)
class Figure:
    """The best value of one field among a peer's rows; None in a name matches any."""

    peer: str
    op: str
    field: str
    block_bytes: int | None = KIB_256
    clients: int | None = None
    batch: int | None = None

    def value(self, rows):
        names = {"peer": self.peer, "op": self.op, "block_bytes": self.block_bytes,
                 "clients": self.clients, "batch": self.batch}
        values = [row[self.field] for row in rows
                  if row[self.field] is not None
                  and all(wanted is None or row[name] == wanted for name, wanted in names.items())]
        best = min if self.field in LOWER_IS_BETTER else max
        return best(values, default=None)

    def __str__(self):
        shape = [f"{self.block_bytes >> 10} KiB"] if self.block_bytes else []
        shape += [f"{self.clients} clients"] if self.clients else []
        shape += [f"{self.batch} per request"] if self.batch else []
        return f"{self.peer} {self.op} {self.field} ({', '.join(shape)})"


@dataclasses.dataclass(frozen=True)
class Target:
    """`ours` compared with `factor` times the smallest of `limits`, figures or plain numbers."""

    ours: Figure
    relation: str
    factor: float
    limits: tuple[Figure | float, ...]

    def verdict(self, rows):
        """One line: met, missed, or unknown with what is missing."""
        ours = self.ours.value(rows)
        limits = [limit.value(rows) if isinstance(limit, Figure) else limit
                  for limit in self.limits]
        words = " and ".join(str(limit) for limit in self.limits)
        if len(self.limits) > 1:
            words = f"the smaller of {words}"
        if self.factor != 1:
            words = f"{self.factor:g} x {words}"
        missing = {figure.peer for figure, value in zip((self.ours, *self.limits), (ours, *limits))
                   if value is None}
        if missing:
            return (f"unknown  {self.ours} {self.relation} {words}: "
                    f"no figure of {', '.join(sorted(missing))}")
        limit = self.factor * min(limits)
        met = {"<": ours < limit, "<=": ours <= limit, ">=": ours >= limit}[self.relation]
        numbers = f"{ours:.6g} {self.relation} {limit:.6g}"
        return f"{'met' if met else 'missed':8} {self.ours} {self.relation} {words}: {numbers}"


def single(peer, field):
    return Figure(peer, "get", field, clients=1, batch=1)


def disk_target(op, block_bytes, threads):
    return Target(Figure("payload-store", op, "gb_per_s", block_bytes, threads), ">=", 0.8,
                  (Figure("o_direct", op, "gb_per_s", block_bytes, threads),))


def cold_get_target(block_bytes):
    return Target(Figure("kvtrie", "get_disk", "gb_per_s", block_bytes), ">=", 0.8,
                  (Figure("kvtrie", "get", "gb_per_s", block_bytes),
                   Figure("o_direct", "get_disk", "gb_per_s", block_bytes, clients=1)))


GET_CPU = Figure("kvtrie", "get", "cpu_s_per_gb")
PUT_CPU = Figure("kvtrie", "put", "cpu_s_per_gb")
REDIS_EXISTS = Figure("redis", "lookup", "p50_us", batch=256)

TARGETS = (
    Target(GET_CPU, "<=", 1, (0.75,)),
    Target(GET_CPU, "<", 1, (Figure("mooncake", "get", "cpu_s_per_gb"),
                             Figure("lmcache", "get", "cpu_s_per_gb"))),
    Target(Figure("kvtrie", "get", "gb_per_s"), ">=", 1, (Figure("mooncake", "get", "gb_per_s"),)),
    Target(single("kvtrie", "p50_us"), "<=", 3.5, (single("redis", "p50_us"),)),
    Target(single("kvtrie-shm", "p50_us"), "<=", 1, (single("redis", "p50_us"),)),
    Target(Figure("kvtrie-shm", "get", "cpu_s_per_gb"), "<=", 1, (0.25,)),
    Target(PUT_CPU, "<=", 1.6, (Figure("redis", "put", "cpu_s_per_gb"),)),
    Target(PUT_CPU, "<", 1, (Figure("redis-aof", "put", "cpu_s_per_gb"),)),
    *(disk_target(op, block_bytes, threads)
      for op in ("put", "get_disk") for block_bytes in (KIB_256, MIB_1) for threads in (1, 4)),
    cold_get_target(KIB_256),
    cold_get_target(MIB_1),
    Target(Figure("kvtrie", "lookup", "p50_us", batch=256), "<=", 1.5, (REDIS_EXISTS,)),
    Target(Figure("kvtrie", "lookup", "keys_per_s", batch=256 * 16), ">=", 0.5,
           (Figure("redis", "lookup", "keys_per_s", batch=256),)),
)


def verdicts(rows):
    return [target.verdict(rows) for target in TARGETS]
