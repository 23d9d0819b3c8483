/*
 * One rank of unisono, through the C header, under the driver's commands:
 * unisono FOLDER RANK WORLD private|heap [out]
 *
 * The same as the Rust program in rust/core/benches/collectives: what it adds to that is what the
 * C ABI costs. BYTES and the rest are as in openmpi.c.
 */
#include <unisono.h>

#include "cell.h"

static unisono_communicator* comm;
static int on_heap;

static void must(unisono_status status) {
  if (status != UNISONO_OK) {
    fprintf(stderr, "rank %d: %s\n", rank, unisono_last_error_message());
    exit(1);
  }
}

static void* take(size_t bytes) {
  void* memory = NULL;
  if (on_heap) {
    must(unisono_mem_alloc(bytes, &memory));
  } else if (posix_memalign(&memory, 64, bytes)) {
    fprintf(stderr, "%zu bytes of memory cannot be had\n", bytes);
    exit(1);
  }
  return memory;
}

static void give(void* memory) {
  if (on_heap) {
    must(unisono_mem_free(memory));
  } else {
    free(memory);
  }
}

static void meet(void) {
  must(unisono_barrier(comm, NULL, NULL));
}

static void whisper(int to, char* byte) {
  must(unisono_send(comm, byte, 1, UNISONO_UINT8, to, 1, NULL));
}

static void hear(int from, char* byte) {
  must(unisono_recv(comm, byte, 1, UNISONO_UINT8, from, 1, NULL, NULL));
}

static unisono_dtype type(void) {
  return cell.element == 4 ? UNISONO_FLOAT32 : UNISONO_UINT8;
}

static void ping_pong(void) {
  const int peer = rank ^ 1;
  if (peer >= world) {
    return;
  }
  if (rank % 2 == 0) {
    must(unisono_send(comm, cell.input, cell.count, type(), peer, 0, NULL));
  }
  must(unisono_recv(comm, cell.output, cell.count, type(), peer, 0, NULL, NULL));
  if (rank % 2 == 1) {
    must(unisono_send(comm, cell.input, cell.count, type(), peer, 0, NULL));
  }
}

static void send_recv(void) {
  const int next = (rank + 1) % world, previous = (rank + world - 1) % world;
  must(unisono_sendrecv(comm, cell.input, cell.count, next, cell.output, cell.count, previous,
                        type(), 0, NULL, NULL));
}

static void call(void) {
  const size_t shard = cell.shard, count = cell.count;
  const int root = cell.root;
  char *const input = cell.input, *const output = cell.output;
  switch (cell.kind) {
    case ALL_REDUCE:
      must(unisono_all_reduce(comm, out_of_place ? input : output, output, count, type(),
                              UNISONO_SUM, NULL, NULL));
      break;
    case REDUCE:
      must(unisono_reduce(comm, output, output, count, type(), UNISONO_SUM, root, NULL, NULL));
      break;
    case BROADCAST:
      must(unisono_broadcast(comm, output, count, type(), root, NULL, NULL));
      break;
    case ALL_GATHER:
      must(unisono_all_gather(comm, input, output, shard, type(), NULL, NULL));
      break;
    case REDUCE_SCATTER:
      must(unisono_reduce_scatter(comm, input, output, shard, type(), UNISONO_SUM, NULL, NULL));
      break;
    case GATHER:
      must(unisono_gather(comm, input, output, shard, type(), root, NULL, NULL));
      break;
    case SCATTER:
      must(unisono_scatter(comm, input, output, shard, type(), root, NULL, NULL));
      break;
    case ALL_TO_ALL:
      must(unisono_all_to_all(comm, input, output, shard, type(), NULL, NULL));
      break;
    case BARRIER:
      meet();
      break;
    case PING_PONG:
      ping_pong();
      break;
    case SEND_RECV:
      send_recv();
      break;
    case KINDS:
      break;
  }
  cell.root = (root + 1) % world;
}

int main(int count, char** arguments) {
  if (count < 5) {
    fprintf(stderr, "usage: unisono FOLDER RANK WORLD private|heap [out]\n");
    return 2;
  }
  const char* folder = arguments[1];
  rank = atoi(arguments[2]);
  world = atoi(arguments[3]);
  on_heap = strcmp(arguments[4], "heap") == 0;
  out_of_place = count > 5 && strcmp(arguments[5], "out") == 0;
  char url[4096];
  snprintf(url, sizeof url, "file://%s/store", folder);
  must(unisono_communicator_from_url(url, rank, world, NULL, &comm));
  serve(folder);
  must(unisono_communicator_destroy(comm));
  return 0;
}
