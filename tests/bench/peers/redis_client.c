// Redis as fast as a client can make it: RESP sent with writev, values received into the caller's
// buffer, no reply objects. put and get pipeline --batch commands; lookup is one EXISTS of --batch
// keys. Turning block ids into hash-like keys counts as part of the request.
#include "socket_io.h"

enum { kKeyBytes = 32, kHeaderBytes = 96 };

typedef struct {
  char (*headers)[kHeaderBytes];
  char (*replies)[kHeaderBytes];
  struct iovec* parts;
  char* command;  // the whole EXISTS command
  char value_header[32];
  size_t value_header_bytes;
} RedisScratch;

static void WriteHex(char* out, uint64_t value) {
  for (int i = 15; i >= 0; --i, value >>= 4) out[i] = "0123456789abcdef"[value & 15];
}

static void WriteKey(char* out, const BenchOptions* options, long block_id) {
  const uint64_t id = (uint64_t)options->key_space << 32 | (uint64_t)block_id;
  WriteHex(out, id * 0x9E3779B97F4A7C15ull);
  WriteHex(out + 16, id);
}

static void Open(BenchClient* client) {
  const size_t batch = (size_t)client->options->batch;
  RedisScratch* scratch = calloc(1, sizeof(RedisScratch));
  if (scratch == NULL) Die("calloc");
  scratch->headers = malloc(batch * kHeaderBytes);
  scratch->replies = malloc(batch * kHeaderBytes);
  scratch->parts = malloc(batch * 3 * sizeof(struct iovec));
  scratch->command = malloc(64 + batch * (kKeyBytes + 8));
  if (!scratch->headers || !scratch->replies || !scratch->parts || !scratch->command) Die("malloc");
  scratch->value_header_bytes =
      (size_t)snprintf(scratch->value_header, sizeof(scratch->value_header), "$%ld\r\n",
                       client->options->block_bytes);
  client->scratch = scratch;
  client->fd = ConnectLoopback(client->options->port);
}

static void Close(BenchClient* client) { close(client->fd); }

// *n $3 <verb> $32 <key>
static size_t WriteHeader(char* header, const char* verb, int argument_count,
                          const BenchOptions* options, long block_id) {
  const int verb_end =
      sprintf(header, "*%d\r\n$3\r\n%s\r\n$%d\r\n", argument_count, verb, kKeyBytes);
  WriteKey(header + verb_end, options, block_id);
  memcpy(header + verb_end + kKeyBytes, "\r\n", 2);
  return (size_t)verb_end + kKeyBytes + 2;
}

static void Put(BenchClient* client, const long* block_ids, int count) {
  const BenchOptions* options = client->options;
  const size_t block_bytes = (size_t)options->block_bytes;
  RedisScratch* scratch = client->scratch;
  for (int i = 0; i < count; ++i) {
    char* block = client->buffer + (size_t)i * block_bytes;
    StampBlock(block, block_bytes, block_ids[i]);
    size_t header_bytes = WriteHeader(scratch->headers[i], "SET", 3, options, block_ids[i]);
    memcpy(scratch->headers[i] + header_bytes, scratch->value_header, scratch->value_header_bytes);
    header_bytes += scratch->value_header_bytes;
    scratch->parts[3 * i] = (struct iovec){scratch->headers[i], header_bytes};
    scratch->parts[3 * i + 1] = (struct iovec){block, block_bytes};
    scratch->parts[3 * i + 2] = (struct iovec){"\r\n", 2};
  }
  if (!SendParts(client->fd, scratch->parts, 3 * count)) Die("send");
  for (int i = 0; i < count; ++i) scratch->parts[i] = (struct iovec){scratch->replies[i], 5};
  if (!ReceiveParts(client->fd, scratch->parts, count)) Die("receive");
  for (int i = 0; i < count; ++i) {
    if (memcmp(scratch->replies[i], "+OK\r\n", 5) != 0) DieBadReply("SET was refused");
  }
}

static void Get(BenchClient* client, const long* block_ids, int count) {
  const BenchOptions* options = client->options;
  const size_t block_bytes = (size_t)options->block_bytes;
  RedisScratch* scratch = client->scratch;
  for (int i = 0; i < count; ++i) {
    const size_t header_bytes = WriteHeader(scratch->headers[i], "GET", 2, options, block_ids[i]);
    scratch->parts[i] = (struct iovec){scratch->headers[i], header_bytes};
  }
  if (!SendParts(client->fd, scratch->parts, count)) Die("send");
  for (int i = 0; i < count; ++i) {
    char* reply = scratch->replies[i];
    scratch->parts[3 * i] = (struct iovec){reply, scratch->value_header_bytes};
    scratch->parts[3 * i + 1] =
        (struct iovec){client->buffer + (size_t)i * block_bytes, block_bytes};
    scratch->parts[3 * i + 2] = (struct iovec){reply + scratch->value_header_bytes, 2};
  }
  if (!ReceiveParts(client->fd, scratch->parts, 3 * count)) Die("receive");
  for (int i = 0; i < count; ++i) {
    if (memcmp(scratch->replies[i], scratch->value_header, scratch->value_header_bytes) != 0) {
      DieBadReply("GET missed");
    }
    CheckStamp(client->buffer + (size_t)i * block_bytes, block_bytes, block_ids[i]);
  }
}

static void Lookup(BenchClient* client, const long* block_ids, int count) {
  RedisScratch* scratch = client->scratch;
  char* end = scratch->command + sprintf(scratch->command, "*%d\r\n$6\r\nEXISTS\r\n", count + 1);
  for (int i = 0; i < count; ++i) {
    memcpy(end, "$32\r\n", 5);
    WriteKey(end + 5, client->options, block_ids[i]);
    memcpy(end + 5 + kKeyBytes, "\r\n", 2);
    end += 5 + kKeyBytes + 2;
  }
  if (!SendAll(client->fd, scratch->command, (size_t)(end - scratch->command))) Die("send");
  char reply[32] = "";
  char expected[32];
  const int expected_bytes = sprintf(expected, ":%d\r\n", count);
  if (!ReceiveAll(client->fd, reply, (size_t)expected_bytes)) Die("receive");
  if (memcmp(reply, expected, (size_t)expected_bytes) != 0) DieBadReply("EXISTS missed keys");
}

int main(int argc, char** argv) {
  const BenchOptions options = ParseOptions(argc, argv);
  BenchDriver driver = {.open = Open, .request = Get, .close = Close};
  if (strcmp(options.op, "put") == 0) driver.request = Put;
  if (strcmp(options.op, "lookup") == 0) driver.request = Lookup;
  return RunBench(&options, &driver);
}
