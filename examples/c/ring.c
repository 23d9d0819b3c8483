/*
 * Blocks of numbers go around a ring until every rank has seen every block: in each round a rank
 * sends to its right what came from its left in the round before.
 *
 *   unisono launch -n 4 ./ring
 *
 * While the next block travels, the rank adds up the one it has.
 */
#include "example.h"

#define COUNT 100000

/* The element of rank `owner` at place `i`. */
static int64_t element(int32_t owner, size_t i) {
  return (int64_t)(owner + 1) * (int64_t)(i % 1000);
}

int main(void) {
  int32_t rank, size;
  unisono_communicator* comm = join(&rank, &size);
  const int32_t right = (rank + 1) % size, left = (rank + size - 1) % size;

  int64_t* here = allocate(COUNT, sizeof *here);
  int64_t* next = allocate(COUNT, sizeof *next);
  int64_t* sum = allocate(COUNT, sizeof *sum);
  for (size_t i = 0; i < COUNT; i++) here[i] = element(rank, i);

  for (int32_t round = 0; round < size; round++) {
    unisono_work* moving[2] = {NULL, NULL};
    const int last = round == size - 1;
    if (!last) {
      const uint64_t tag = (uint64_t)round;
      CHECK(unisono_irecv(comm, next, COUNT, UNISONO_INT64, left, tag, NULL, &moving[0]));
      CHECK(unisono_isend(comm, here, COUNT, UNISONO_INT64, right, tag, NULL, &moving[1]));
    }
    /* Reading what is being sent is allowed; writing it is not. */
    for (size_t i = 0; i < COUNT; i++) sum[i] += here[i];
    /* NULLs are skipped, so the last round waits for nothing. */
    CHECK(unisono_work_wait_all(moving, 2, UNISONO_FOREVER));
    CHECK(unisono_work_destroy(moving[0]));
    CHECK(unisono_work_destroy(moving[1]));
    int64_t* swap = here;
    here = next;
    next = swap;
  }

  size_t wrong = 0;
  for (size_t i = 0; i < COUNT; i++) {
    wrong += sum[i] != (int64_t)size * (size + 1) / 2 * (int64_t)(i % 1000);
  }
  if (wrong) {
    fprintf(stderr, "rank %d: %zu of %d sums are wrong\n", (int)rank, wrong, COUNT);
  } else if (rank == 0) {
    printf("rank 0: %d blocks went around %d ranks, and all sums are right\n", (int)size,
           (int)size);
  }

  free(here);
  free(next);
  free(sum);
  CHECK(unisono_communicator_destroy(comm));
  return wrong ? 1 : 0;
}
