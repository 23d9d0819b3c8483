/*
 * One rank of Open MPI (or any MPI) under the driver's commands: mpirun ... openmpi FOLDER [out]
 *
 * BYTES is the size of the whole: what all_reduce and broadcast are given, what all_gather returns,
 * what reduce_scatter takes in. The root moves on by one rank at every call. `out` as second
 * argument: all_reduce out of place. The Rust program in rust/core/benches/collectives and
 * unisono.c do the same on unisono.
 */
#include <mpi.h>

#include "cell.h"

static void* take(size_t bytes) {
  void* memory = NULL;
  if (posix_memalign(&memory, 64, bytes)) {
    fprintf(stderr, "%zu bytes of memory cannot be had\n", bytes);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return memory;
}

static void give(void* memory) {
  free(memory);
}

static void meet(void) {
  MPI_Barrier(MPI_COMM_WORLD);
}

static void whisper(int to, char* byte) {
  MPI_Send(byte, 1, MPI_BYTE, to, 1, MPI_COMM_WORLD);
}

static void hear(int from, char* byte) {
  MPI_Recv(byte, 1, MPI_BYTE, from, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void ping_pong(MPI_Datatype type) {
  const int peer = rank ^ 1, count = (int)cell.count;
  if (peer >= world) {
    return;
  }
  if (rank % 2 == 0) {
    MPI_Send(cell.input, count, type, peer, 0, MPI_COMM_WORLD);
  }
  MPI_Recv(cell.output, count, type, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  if (rank % 2 == 1) {
    MPI_Send(cell.input, count, type, peer, 0, MPI_COMM_WORLD);
  }
}

static void call(void) {
  const MPI_Comm comm = MPI_COMM_WORLD;
  const int shard = (int)cell.shard, count = (int)cell.count, root = cell.root,
            is_root = rank == cell.root;
  const MPI_Datatype type = cell.element == 4 ? MPI_FLOAT : MPI_UINT8_T;
  char *const input = cell.input, *const output = cell.output;
  switch (cell.kind) {
    case ALL_REDUCE:
      MPI_Allreduce(out_of_place ? (void*)input : MPI_IN_PLACE, output, count, type, MPI_SUM, comm);
      break;
    case REDUCE:
      MPI_Reduce(is_root ? MPI_IN_PLACE : (void*)output, output, count, type, MPI_SUM, root, comm);
      break;
    case BROADCAST:
      MPI_Bcast(output, count, type, root, comm);
      break;
    case ALL_GATHER:
      MPI_Allgather(input, shard, type, output, shard, type, comm);
      break;
    case REDUCE_SCATTER:
      MPI_Reduce_scatter_block(input, output, shard, type, MPI_SUM, comm);
      break;
    case GATHER:
      MPI_Gather(input, shard, type, output, shard, type, root, comm);
      break;
    case SCATTER:
      MPI_Scatter(input, shard, type, output, shard, type, root, comm);
      break;
    case ALL_TO_ALL:
      MPI_Alltoall(input, shard, type, output, shard, type, comm);
      break;
    case BARRIER:
      MPI_Barrier(comm);
      break;
    case PING_PONG:
      ping_pong(type);
      break;
    case SEND_RECV:
      MPI_Sendrecv(input, count, type, (rank + 1) % world, 0, output, count, type,
                   (rank + world - 1) % world, 0, comm, MPI_STATUS_IGNORE);
      break;
    case KINDS:
      break;
  }
  cell.root = (root + 1) % world;
}

int main(int count, char** arguments) {
  MPI_Init(&count, &arguments);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (count < 2) {
    fprintf(stderr, "usage: openmpi FOLDER [out]\n");
    return 2;
  }
  out_of_place = count > 2 && strcmp(arguments[2], "out") == 0;
  serve(arguments[1]);
  MPI_Finalize();
  return 0;
}
