// The floor of any store behind TCP: blocks moved over loopback from memory to memory, with no
// parsing, no index and no allocation. Server and clients are threads of this process.
#include "socket_io.h"

static char* stored_blocks;
static int listen_port;

typedef struct {
  const BenchOptions* options;
  int fd;
} Connection;

// A request is one block id; with put the block follows, and 8 bytes acknowledge it.
static void* Serve(void* argument) {
  Connection* connection = argument;
  const size_t block_bytes = (size_t)connection->options->block_bytes;
  const int is_put = strcmp(connection->options->op, "put") == 0;
  long block_id;
  while (ReceiveAll(connection->fd, &block_id, sizeof(block_id))) {
    char* block = stored_blocks + (size_t)block_id * block_bytes;
    const int served = is_put ? ReceiveAll(connection->fd, block, block_bytes) &&
                                    SendAll(connection->fd, &block_id, sizeof(block_id))
                              : SendAll(connection->fd, block, block_bytes);
    if (!served) break;
  }
  close(connection->fd);
  free(connection);
  return NULL;
}

typedef struct {
  const BenchOptions* options;
  int listen_fd;
} Listener;

static void* AcceptClients(void* argument) {
  const Listener* listener = argument;
  for (int i = 0; i < listener->options->clients; ++i) {
    Connection* connection = malloc(sizeof(Connection));
    if (connection == NULL) Die("malloc");
    connection->options = listener->options;
    connection->fd = accept(listener->listen_fd, NULL, NULL);
    if (connection->fd < 0) Die("accept");
    const int on = 1;
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    pthread_t thread;
    if (pthread_create(&thread, NULL, Serve, connection) != 0) Die("pthread_create");
    pthread_detach(thread);
  }
  return NULL;
}

static void Open(BenchClient* client) { client->fd = ConnectLoopback(listen_port); }

static void Close(BenchClient* client) { close(client->fd); }

static void Put(BenchClient* client, const long* block_ids, int count) {
  const size_t block_bytes = (size_t)client->options->block_bytes;
  for (int i = 0; i < count; ++i) {
    struct iovec parts[] = {{(void*)&block_ids[i], sizeof(long)},
                            {client->buffer + (size_t)i * block_bytes, block_bytes}};
    if (!SendParts(client->fd, parts, 2)) Die("send");
  }
  for (int i = 0; i < count; ++i) {
    long acknowledged;
    if (!ReceiveAll(client->fd, &acknowledged, sizeof(acknowledged))) Die("receive");
  }
}

static void Get(BenchClient* client, const long* block_ids, int count) {
  const size_t block_bytes = (size_t)client->options->block_bytes;
  if (!SendAll(client->fd, block_ids, (size_t)count * sizeof(long))) Die("send");
  if (!ReceiveAll(client->fd, client->buffer, (size_t)count * block_bytes)) Die("receive");
  for (int i = 0; i < count; ++i) {
    CheckStamp(client->buffer + (size_t)i * block_bytes, block_bytes, block_ids[i]);
  }
}

int main(int argc, char** argv) {
  const BenchOptions options = ParseOptions(argc, argv);
  const size_t block_bytes = (size_t)options.block_bytes;
  stored_blocks = AllocatePages((size_t)options.blocks * block_bytes);
  FillRandom(stored_blocks, (size_t)options.blocks * block_bytes, 7);
  for (long i = 0; i < options.blocks; ++i) {
    StampBlock(stored_blocks + (size_t)i * block_bytes, block_bytes, i);
  }
  const int listen_fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t address_bytes = sizeof(address);
  if (bind(listen_fd, (struct sockaddr*)&address, address_bytes) != 0 ||
      listen(listen_fd, options.clients) != 0 ||
      getsockname(listen_fd, (struct sockaddr*)&address, &address_bytes) != 0) {
    Die("listen");
  }
  listen_port = ntohs(address.sin_port);
  Listener listener = {&options, listen_fd};
  pthread_t acceptor;
  if (pthread_create(&acceptor, NULL, AcceptClients, &listener) != 0) Die("pthread_create");
  const BenchDriver driver = {
      .open = Open, .request = strcmp(options.op, "put") == 0 ? Put : Get, .close = Close};
  return RunBench(&options, &driver);
}
