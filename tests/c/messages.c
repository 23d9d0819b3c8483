/* Send and receive: tags, any source, both ways at once, groups; and waiting for handles. */
#include <time.h>

#include "check.h"

static unisono_communicator* comm;
static int rank, world, next, previous;

/* The next rank gets ours, the previous one's comes. */
static void ring(void) {
  int64_t mine = 100 + rank, theirs = -1;
  unisono_work* works[2] = {NULL, NULL};
  OK(unisono_irecv(comm, &theirs, 1, UNISONO_INT64, previous, 7, NULL, &works[0]));
  OK(unisono_isend(comm, &mine, 1, UNISONO_INT64, next, 7, NULL, &works[1]));
  OK(unisono_work_wait_all(works, 2, UNISONO_FOREVER));
  CHECK(theirs == 100 + previous);
  int32_t source = -1, done = 0;
  OK(unisono_work_source(works[0], &source));
  CHECK(source == previous);
  FAILS(unisono_work_source(works[1], &source), UNISONO_INVALID_ARGUMENT, "no message");
  CHECK(source == previous);
  OK(unisono_work_test(works[0], &done));
  CHECK(done == 1);
  for (int at = 0; at < 2; at++) OK(unisono_work_destroy(works[at]));
  FAILS(unisono_work_wait(works[0], 1), UNISONO_INVALID_ARGUMENT, "destroyed");
}

/* The same in one call, short and long, and what it refuses. */
static void exchanged(void) {
  enum { LARGE = 100000 };
  int64_t* buffer = malloc(2 * LARGE * sizeof(int64_t));
  CHECK(buffer);
  for (int count = 1; count <= LARGE; count += LARGE - 1) {
    int64_t *mine = buffer, *theirs = buffer + LARGE;
    for (int at = 0; at < count; at++) mine[at] = 100 * rank + at, theirs[at] = -1;
    int32_t source = -1;
    OK(unisono_sendrecv(comm, mine, (size_t)count, next, theirs, (size_t)count, previous,
                        UNISONO_INT64, 8, NULL, &source));
    CHECK(source == previous);
    for (int at = 0; at < count; at++) CHECK(theirs[at] == 100 * previous + at);
    OK(unisono_group_start());
    FAILS(
        unisono_sendrecv(comm, mine, 1, next, theirs, 1, previous, UNISONO_INT64, 8, NULL, &source),
        UNISONO_INVALID_ARGUMENT, "sendrecv: in a group");
    theirs[0] = -1;
    if (world > 1)
      OK(unisono_sendrecv(comm, mine, 1, next, theirs, 1, UNISONO_ANY_SOURCE, UNISONO_INT64, 8,
                          NULL, NULL));
    OK(unisono_group_end(NULL));
    if (world > 1) CHECK(theirs[0] == 100 * previous);
    FAILS(unisono_sendrecv(comm, mine, 1, world, theirs, 1, previous, UNISONO_INT64, 8, NULL, NULL),
          UNISONO_INVALID_ARGUMENT, "to");
  }
  free(buffer);
}

/* The same with calls that would block, in either order, and large enough to need the receiver. */
static void grouped(int with_work) {
  enum { LARGE = 300000 };
  float *mine = malloc(LARGE * sizeof(float)), *theirs = malloc(LARGE * sizeof(float));
  CHECK(mine && theirs);
  for (int at = 0; at < LARGE; at++) mine[at] = (float)(rank + at % 10);
  memset(theirs, 0, LARGE * sizeof(float));
  float sum = (float)rank;
  unisono_work* work = NULL;
  OK(unisono_group_start());
  if (world > 1) OK(unisono_send(comm, mine, LARGE, UNISONO_FLOAT32, next, 1, NULL));
  OK(unisono_group_start());
  OK(unisono_recv(comm, theirs, LARGE, UNISONO_FLOAT32, previous, 1, NULL, NULL));
  if (world == 1) OK(unisono_send(comm, mine, LARGE, UNISONO_FLOAT32, next, 1, NULL));
  FAILS(unisono_group_end(&work), UNISONO_INVALID_ARGUMENT, "outermost");
  CHECK(!work);
  OK(unisono_all_reduce(comm, &sum, &sum, 1, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
  /* Refused, and no part of the group. */
  int32_t source = -5;
  FAILS(unisono_recv(comm, theirs, 1, UNISONO_FLOAT32, previous, 2, NULL, &source),
        UNISONO_INVALID_ARGUMENT, "group");
  CHECK(source == -5);
  OK(unisono_group_end(with_work ? &work : NULL));
  if (with_work) {
    CHECK(work);
    OK(unisono_work_wait(work, 20));
    FAILS(unisono_work_source(work, &source), UNISONO_INVALID_ARGUMENT, "group");
    OK(unisono_work_destroy(work));
  }
  for (int at = 0; at < LARGE; at++) CHECK(theirs[at] == (float)(previous + at % 10));
  CHECK(sum == (float)(world * (world - 1) / 2));
  free(mine);
  free(theirs);
  FAILS(unisono_group_end(NULL), UNISONO_INVALID_ARGUMENT, "unisono_group_start");
  OK(unisono_group_start());
  OK(unisono_group_end(NULL));
}

/* Rank 0 receives from all others, in any order; two tags are kept apart. */
static void any_source(void) {
  if (rank != 0) {
    const int32_t early = rank, late = 1000 + rank;
    OK(unisono_send(comm, &late, 1, UNISONO_INT32, 0, 2, NULL));
    OK(unisono_send(comm, &early, 1, UNISONO_INT32, 0, 1, NULL));
    return;
  }
  int seen[2][16] = {{0}, {0}};
  for (int tag = 1; tag <= 2; tag++)
    for (int count = 1; count < world; count++) {
      int32_t got = -1, source = -1;
      OK(unisono_recv(comm, &got, 1, UNISONO_INT32, UNISONO_ANY_SOURCE, (uint64_t)tag, NULL,
                      &source));
      CHECK(source > 0 && source < world && got == (tag == 1 ? source : 1000 + source));
      CHECK(!seen[tag - 1][source]++);
    }
}

/* Messages shorter than their receives, of every size class, and a look at them before. */
static void shorter(void) {
  enum { ROOM = 500000 };
  static const size_t lengths[] = {0, 3, 5000, 400000, ROOM};
  if (world < 2) return;
  int32_t *mine = calloc(ROOM, sizeof(int32_t)), *theirs = malloc(ROOM * sizeof(int32_t));
  CHECK(mine && theirs);
  for (size_t way = 0; way < 3 * sizeof(lengths) / sizeof(*lengths); way++) {
    const size_t length = lengths[way / 3];
    size_t came = 77;
    int32_t source = -1;
    unisono_work *sent = NULL, *receive = NULL;
    unisono_options options = UNISONO_OPTIONS_INIT;
    options.received = &came;
    for (size_t at = 0; at < ROOM; at++) theirs[at] = -1;
    if (way % 3 == 0)
      OK(unisono_irecv(comm, theirs, ROOM, UNISONO_INT32, previous, 5, NULL, &receive));
    OK(unisono_isend(comm, mine, length, UNISONO_INT32, next, 5, NULL, &sent));
    if (way % 3 == 1) {
      unisono_dtype dtype = UNISONO_BOOL;
      OK(unisono_probe(comm, UNISONO_ANY_SOURCE, 5, 60, &source, &came, &dtype));
      CHECK(source == previous && came == length && dtype == UNISONO_INT32);
      came = 77;
    }
    if (receive) {
      OK(unisono_work_wait(receive, UNISONO_FOREVER));
      OK(unisono_work_received(receive, &came));
      OK(unisono_work_destroy(receive));
    } else {
      OK(unisono_recv(comm, theirs, ROOM, UNISONO_INT32, previous, 5, &options, &source));
      CHECK(source == previous);
    }
    CHECK(came == length);
    for (size_t at = 0; at < ROOM; at++) CHECK(theirs[at] == (at < length ? 0 : -1));
    OK(unisono_work_wait(sent, UNISONO_FOREVER));
    OK(unisono_work_destroy(sent));
  }
  FAILS(unisono_probe(comm, previous, 5, 0, NULL, NULL, NULL), UNISONO_TIMEOUT, "probe");
  OK(unisono_barrier(comm, NULL, NULL));
  free(mine);
  free(theirs);
}

/* The first of several to end, with holes in the list. */
static void whichever(void) {
  if (world < 2 || rank > 1) return;
  const int peer = 1 - rank;
  int8_t got[3] = {0, 0, 0}, token = 5;
  if (rank == 0) {
    /* In another order than they were asked for, each when it was asked. */
    for (int tag = 2; tag >= 0; tag--) {
      OK(unisono_recv(comm, &token, 1, UNISONO_INT8, peer, 99, NULL, NULL));
      OK(unisono_send(comm, &token, 1, UNISONO_INT8, peer, 10 + (uint64_t)tag, NULL));
    }
    return;
  }
  unisono_work* works[4] = {NULL, NULL, NULL, NULL};
  for (int tag = 0; tag < 3; tag++)
    OK(unisono_irecv(comm, &got[tag], 1, UNISONO_INT8, peer, 10 + (uint64_t)tag, NULL,
                     &works[tag + (tag > 0)]));
  size_t index = 77;
  FAILS(unisono_work_wait_any(works, 4, 0.01, &index), UNISONO_TIMEOUT, "before any");
  unisono_error error = UNISONO_ERROR_INIT;
  OK(unisono_last_error(&error));
  CHECK(!error.fatal && index == 77);
  FAILS(unisono_work_wait(works[0], 0.01), UNISONO_TIMEOUT, "before the operation");
  FAILS(unisono_work_wait(works[0], 0), UNISONO_TIMEOUT, "before the operation");
  FAILS(unisono_work_wait_all(works, 4, 0.01), UNISONO_TIMEOUT, "before the operation");
  OK(unisono_last_error(&error));
  CHECK(!error.fatal);
  int32_t done = 1;
  OK(unisono_work_test(works[0], &done));
  CHECK(done == 0);
  const size_t order[3] = {3, 2, 0};
  for (int turn = 0; turn < 3; turn++) {
    OK(unisono_send(comm, &token, 1, UNISONO_INT8, peer, 99, NULL));
    OK(unisono_work_wait_any(works, 4, 20, &index));
    CHECK(index == order[turn] && got[index - (index > 0)] == 5);
    OK(unisono_work_destroy(works[index]));
    works[index] = NULL;
  }
  FAILS(unisono_work_wait_any(works, 4, 1, &index), UNISONO_INVALID_ARGUMENT, "no work");
  OK(unisono_work_wait_all(works, 4, 1));
}

/* Of two communicators; the slower one's comes first in the list. */
static void across_communicators(void) {
  unisono_communicator* other = NULL;
  OK(unisono_communicator_split(comm, 0, 0, &other));
  float one = 1, two = 2;
  unisono_work* works[2] = {NULL, NULL};
  if (rank == 0) {
    OK(unisono_barrier(other, NULL, NULL));
    OK(unisono_all_reduce(comm, &one, &one, 1, UNISONO_FLOAT32, UNISONO_SUM, NULL, &works[0]));
    OK(unisono_work_wait(works[0], 20));
    OK(unisono_work_destroy(works[0]));
  } else {
    size_t index = 9;
    OK(unisono_all_reduce(comm, &one, &one, 1, UNISONO_FLOAT32, UNISONO_SUM, NULL, &works[0]));
    OK(unisono_barrier(other, NULL, &works[1]));
    OK(unisono_work_wait_any(works, 2, 20, &index));
    CHECK(index < 2);
    OK(unisono_work_wait_all(works, 2, 20));
    OK(unisono_work_destroy(works[0]));
    OK(unisono_work_destroy(works[1]));
  }
  CHECK(one == (float)world && two == 2);
  OK(unisono_communicator_destroy(other));
}

/* Parts by parity, the ranks in reverse; and rank 0 in none. */
static void parts(void) {
  unisono_communicator* part = NULL;
  int32_t number = -1, size = -1;
  OK(unisono_communicator_split(comm, rank % 2, -rank, &part));
  OK(unisono_communicator_rank(part, &number));
  OK(unisono_communicator_world_size(part, &size));
  CHECK(size == (world + (rank % 2 == 0)) / 2 && number == size - 1 - rank / 2);
  int32_t sum = rank, must = 0;
  for (int of = rank % 2; of < world; of += 2) must += of;
  OK(unisono_all_reduce(part, &sum, &sum, 1, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
  CHECK(sum == must);
  OK(unisono_communicator_destroy(part));
  part = comm;
  OK(unisono_communicator_split(comm, rank == 0 ? UNISONO_NO_COLOR : 3, 0, &part));
  CHECK((part == NULL) == (rank == 0));
  OK(unisono_communicator_destroy(part));
}

int main(void) {
  check_rank = environment_number("RANK");
  OK(unisono_communicator_from_environment(NULL, &comm));
  OK(unisono_communicator_rank(comm, &rank));
  OK(unisono_communicator_world_size(comm, &world));
  next = (rank + 1) % world;
  previous = (rank + world - 1) % world;
  in("ring");
  ring();
  exchanged();
  in("grouped");
  grouped(0);
  grouped(1);
  in("shorter");
  shorter();
  in("any source");
  any_source();
  in("whichever");
  whichever();
  in("across communicators");
  across_communicators();
  in("parts");
  parts();
  OK(unisono_barrier(comm, NULL, NULL));
  OK(unisono_communicator_destroy(comm));
  return 0;
}
