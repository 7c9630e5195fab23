// Frame of the C clients: clients as threads, one latency per request, one JSON row at the end.
//
// A client program fills a BenchDriver and calls RunBench. Block ids run from 0 to --blocks - 1;
// each client owns an equal share and walks it --repeat times, --batch ids per request.
#pragma once

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
  const char* op;  // put, get, get_disk or lookup
  long block_bytes;
  long blocks;
  int clients;
  int batch;  // block ids per request
  int repeat;
  int port;
  int server_pid;  // 0: the server is part of this process
  const char* path;
  long key_space;  // keys of different spaces differ
} BenchOptions;

typedef struct {
  const BenchOptions* options;
  int index;
  char* buffer;  // batch * block_bytes, page-aligned
  int fd;
  void* scratch;  // owned by the driver
} BenchClient;

typedef struct {
  void (*open)(BenchClient* client);
  void (*request)(BenchClient* client, const long* block_ids, int count);
  void (*close)(BenchClient* client);
  void (*finish)(const BenchOptions* options);  // may be NULL; inside the measured time
  int shuffled;                                 // walk the ids in random order
} BenchDriver;

static inline void Die(const char* what) {
  perror(what);
  exit(2);
}

static inline void DieBadReply(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(3);
}

static inline double ClockSeconds(clockid_t clock) {
  struct timespec now;
  if (clock_gettime(clock, &now) != 0) Die("clock_gettime");
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

// User and system time of this process and, if there is one, of the server's.
static inline double CpuSeconds(int server_pid) {
  double seconds = ClockSeconds(CLOCK_PROCESS_CPUTIME_ID);
  clockid_t server_clock;
  if (server_pid > 0) {
    errno = clock_getcpuclockid(server_pid, &server_clock);
    if (errno != 0) Die("clock of the server process");
    seconds += ClockSeconds(server_clock);
  }
  return seconds;
}

static inline uint64_t NextRandom(uint64_t* state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static inline void FillRandom(char* bytes, size_t byte_count, uint64_t seed) {
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  for (size_t i = 0; i + 8 <= byte_count; i += 8) {
    const uint64_t value = NextRandom(&state);
    memcpy(bytes + i, &value, sizeof(value));
  }
}

static inline char* AllocatePages(size_t byte_count) {
  char* bytes = aligned_alloc(4096, (byte_count + 4095) / 4096 * 4096);
  if (bytes == NULL) Die("aligned_alloc");
  return bytes;
}

// The block id at both ends of a block shows that the right block came back whole.
static inline void StampBlock(char* block, size_t block_bytes, long block_id) {
  memcpy(block, &block_id, sizeof(block_id));
  memcpy(block + block_bytes - sizeof(block_id), &block_id, sizeof(block_id));
}

static inline void CheckStamp(const char* block, size_t block_bytes, long block_id) {
  if (memcmp(block, &block_id, sizeof(block_id)) != 0 ||
      memcmp(block + block_bytes - sizeof(block_id), &block_id, sizeof(block_id)) != 0) {
    DieBadReply("a block came back wrong");
  }
}

static inline const char* Option(int argc, char** argv, const char* name, const char* fallback) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], name) == 0) return argv[i + 1];
  }
  return fallback;
}

static inline BenchOptions ParseOptions(int argc, char** argv) {
  BenchOptions options = {
      .op = Option(argc, argv, "--op", "get"),
      .block_bytes = atol(Option(argc, argv, "--block-bytes", "262144")),
      .blocks = atol(Option(argc, argv, "--blocks", "1024")),
      .clients = atoi(Option(argc, argv, "--clients", "1")),
      .batch = atoi(Option(argc, argv, "--batch", "1")),
      .repeat = atoi(Option(argc, argv, "--repeat", "1")),
      .port = atoi(Option(argc, argv, "--port", "0")),
      .server_pid = atoi(Option(argc, argv, "--server-pid", "0")),
      .path = Option(argc, argv, "--path", ""),
      .key_space = atol(Option(argc, argv, "--key-space", "0")),
  };
  if (options.block_bytes < 16 || options.batch < 1 || options.clients < 1 || options.repeat < 1 ||
      options.blocks < (long)options.clients * options.batch) {
    DieBadReply("options: too small, or fewer blocks than clients * batch");
  }
  return options;
}

typedef struct {
  BenchClient client;
  const BenchDriver* driver;
  pthread_barrier_t* start;
  long* block_ids;
  long block_count;
  double* latency_us;
  long request_count;
} BenchThread;

static inline void* BenchThreadMain(void* argument) {
  BenchThread* thread = argument;
  BenchClient* client = &thread->client;
  const BenchOptions* options = client->options;
  client->buffer = AllocatePages((size_t)options->batch * (size_t)options->block_bytes);
  FillRandom(client->buffer, (size_t)options->batch * (size_t)options->block_bytes,
             (uint64_t)client->index + 1);
  thread->driver->open(client);
  pthread_barrier_wait(thread->start);
  for (int pass = 0; pass < options->repeat; ++pass) {
    for (long first = 0; first < thread->block_count; first += options->batch) {
      const long left = thread->block_count - first;
      const int count = left < options->batch ? (int)left : options->batch;
      const double began = ClockSeconds(CLOCK_MONOTONIC);
      thread->driver->request(client, thread->block_ids + first, count);
      thread->latency_us[thread->request_count++] = (ClockSeconds(CLOCK_MONOTONIC) - began) * 1e6;
    }
  }
  return NULL;
}

static inline int CompareDoubles(const void* left, const void* right) {
  const double a = *(const double*)left;
  const double b = *(const double*)right;
  return (a > b) - (a < b);
}

static inline void PrintRow(const BenchOptions* options, double seconds, double cpu_seconds,
                            double key_count, double* latency_us, long request_count) {
  qsort(latency_us, (size_t)request_count, sizeof(double), CompareDoubles);
  const double gigabytes = key_count * (double)options->block_bytes / 1e9;
  printf("{\"op\": \"%s\", \"block_bytes\": %ld, \"clients\": %d, \"batch\": %d, ", options->op,
         options->block_bytes, options->clients, options->batch);
  if (strcmp(options->op, "lookup") != 0) {
    printf("\"gb_per_s\": %.4f, \"cpu_s_per_gb\": %.4f, ", gigabytes / seconds,
           cpu_seconds / gigabytes);
  }
  printf("\"keys_per_s\": %.0f, \"p50_us\": %.1f, \"p99_us\": %.1f}\n", key_count / seconds,
         latency_us[(request_count - 1) / 2], latency_us[(request_count - 1) * 99 / 100]);
}

static inline int RunBench(const BenchOptions* options, const BenchDriver* driver) {
  const long share = options->blocks / options->clients;
  long* block_ids = malloc((size_t)options->blocks * sizeof(long));
  BenchThread* threads = calloc((size_t)options->clients, sizeof(BenchThread));
  pthread_t* handles = calloc((size_t)options->clients, sizeof(pthread_t));
  const long requests_per_client = (share + options->batch - 1) / options->batch * options->repeat;
  double* latency_us = malloc((size_t)(requests_per_client * options->clients) * sizeof(double));
  if (block_ids == NULL || threads == NULL || handles == NULL || latency_us == NULL) Die("malloc");

  uint64_t random = 88172645463325252ull;
  for (long i = 0; i < options->blocks; ++i) {
    const long other = driver->shuffled ? (long)(NextRandom(&random) % (uint64_t)(i + 1)) : i;
    if (other != i) block_ids[i] = block_ids[other];
    block_ids[other] = i;
  }
  pthread_barrier_t start;
  pthread_barrier_init(&start, NULL, (unsigned)options->clients + 1);
  for (int i = 0; i < options->clients; ++i) {
    threads[i] = (BenchThread){
        .client = {.options = options, .index = i, .fd = -1},
        .driver = driver,
        .start = &start,
        .block_ids = block_ids + i * share,
        .block_count = share,
        .latency_us = latency_us + i * requests_per_client,
    };
    if (pthread_create(&handles[i], NULL, BenchThreadMain, &threads[i]) != 0) Die("pthread_create");
  }
  pthread_barrier_wait(&start);
  const double cpu_began = CpuSeconds(options->server_pid);
  const double began = ClockSeconds(CLOCK_MONOTONIC);
  for (int i = 0; i < options->clients; ++i) pthread_join(handles[i], NULL);
  if (driver->finish != NULL) driver->finish(options);
  const double seconds = ClockSeconds(CLOCK_MONOTONIC) - began;
  const double cpu_seconds = CpuSeconds(options->server_pid) - cpu_began;
  for (int i = 0; i < options->clients; ++i) driver->close(&threads[i].client);
  PrintRow(options, seconds, cpu_seconds, (double)share * options->clients * options->repeat,
           latency_us, requests_per_client * options->clients);
  return 0;
}
