// The floor of any store on disk: blocks at fixed places of one preallocated file, O_DIRECT.
// put writes in order and ends with one fdatasync; get_disk reads in random order.
#include <fcntl.h>
#include <unistd.h>

#include "bench.h"

static int file_fd = -1;

static void Open(BenchClient* client) { (void)client; }

static void Close(BenchClient* client) { (void)client; }

static void Put(BenchClient* client, const long* block_ids, int count) {
  const size_t block_bytes = (size_t)client->options->block_bytes;
  for (int i = 0; i < count; ++i) {
    StampBlock(client->buffer, block_bytes, block_ids[i]);
    if (pwrite(file_fd, client->buffer, block_bytes, block_ids[i] * (off_t)block_bytes) !=
        (ssize_t)block_bytes) {
      Die("pwrite");
    }
  }
}

static void Get(BenchClient* client, const long* block_ids, int count) {
  const size_t block_bytes = (size_t)client->options->block_bytes;
  for (int i = 0; i < count; ++i) {
    if (pread(file_fd, client->buffer, block_bytes, block_ids[i] * (off_t)block_bytes) !=
        (ssize_t)block_bytes) {
      Die("pread");
    }
    CheckStamp(client->buffer, block_bytes, block_ids[i]);
  }
}

static void Flush(const BenchOptions* options) {
  (void)options;
  if (fdatasync(file_fd) != 0) Die("fdatasync");
}

int main(int argc, char** argv) {
  const BenchOptions options = ParseOptions(argc, argv);
  const int is_put = strcmp(options.op, "put") == 0;
  file_fd = open(options.path, (is_put ? O_RDWR | O_CREAT : O_RDONLY) | O_DIRECT, 0600);
  if (file_fd < 0) Die(options.path);
  if (is_put) {
    errno = posix_fallocate(file_fd, 0, options.blocks * (off_t)options.block_bytes);
    if (errno != 0) Die("posix_fallocate");
  }
  const BenchDriver driver = {.open = Open,
                              .request = is_put ? Put : Get,
                              .close = Close,
                              .finish = is_put ? Flush : NULL,
                              .shuffled = !is_put};
  return RunBench(&options, &driver);
}
