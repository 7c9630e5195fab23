// Whole reads and writes on loopback TCP sockets.
#pragma once

#include <arpa/inet.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "bench.h"

static inline int ConnectLoopback(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof(address)) != 0) Die("connect");
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

// Moves all of `parts`, which it uses up; false when the peer closed the connection.
static inline int MoveAll(int fd, struct iovec* parts, int part_count,
                          ssize_t (*move)(int, const struct iovec*, int)) {
  while (part_count > 0) {
    const ssize_t moved = move(fd, parts, part_count < IOV_MAX ? part_count : IOV_MAX);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return 0;
    size_t left = (size_t)moved;
    while (part_count > 0 && left >= parts->iov_len) {
      left -= parts->iov_len;
      ++parts;
      --part_count;
    }
    if (part_count > 0) {
      parts->iov_base = (char*)parts->iov_base + left;
      parts->iov_len -= left;
    }
  }
  return 1;
}

static inline int SendParts(int fd, struct iovec* parts, int part_count) {
  return MoveAll(fd, parts, part_count, writev);
}

static inline int ReceiveParts(int fd, struct iovec* parts, int part_count) {
  return MoveAll(fd, parts, part_count, readv);
}

static inline int SendAll(int fd, const void* bytes, size_t byte_count) {
  struct iovec part = {(void*)bytes, byte_count};
  return SendParts(fd, &part, 1);
}

static inline int ReceiveAll(int fd, void* bytes, size_t byte_count) {
  struct iovec part = {bytes, byte_count};
  return ReceiveParts(fd, &part, 1);
}
