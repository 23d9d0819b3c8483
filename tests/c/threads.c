/*
 * Threads: several on one communicator, which send and receive at once while one of them calls
 * collectives; two communicators in two threads; and handles that are destroyed while they are
 * used.
 */
#include <pthread.h>
#include <stdint.h>
#include <time.h>

#include "check.h"

enum { THREADS = 4, ROUNDS = 200 };

static unisono_communicator* comm;
static int rank, world, next, previous;

static void* exchange(void* argument) {
  const uint64_t tag = (uint64_t)(uintptr_t)argument;
  for (int round = 0; round < ROUNDS; round++) {
    const int64_t mine = 1000000 * (int64_t)tag + 1000 * rank + round;
    int64_t theirs = -1;
    unisono_work* work = NULL;
    OK(unisono_irecv(comm, &theirs, 1, UNISONO_INT64, previous, tag, NULL, &work));
    OK(unisono_send(comm, &mine, 1, UNISONO_INT64, next, tag, NULL));
    OK(unisono_work_wait(work, 20));
    OK(unisono_work_destroy(work));
    CHECK(theirs == 1000000 * (int64_t)tag + 1000 * previous + round);
    /* Each thread has a last error of its own. */
    if (round % 50 == 0) {
      FAILS(unisono_send(comm, NULL, 1, UNISONO_INT64, next, tag, NULL), UNISONO_INVALID_ARGUMENT,
            "NULL");
    }
  }
  return NULL;
}

static void* reduce(void* argument) {
  unisono_communicator* const one = argument;
  for (int round = 0; round < ROUNDS; round++) {
    float data[33];
    for (int at = 0; at < 33; at++) data[at] = (float)(rank + round + at);
    OK(unisono_all_reduce(one, data, data, 33, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
    for (int at = 0; at < 33; at++)
      CHECK(data[at] == (float)(world * (world - 1) / 2 + world * (round + at)));
  }
  return NULL;
}

static void all_at_once(void) {
  pthread_t threads[THREADS];
  for (int at = 0; at < THREADS; at++)
    CHECK(!pthread_create(&threads[at], NULL, exchange, (void*)(uintptr_t)(at + 1)));
  reduce(comm);
  for (int at = 0; at < THREADS; at++) CHECK(!pthread_join(threads[at], NULL));
}

static void two_communicators(void) {
  unisono_communicator* other = NULL;
  pthread_t thread;
  OK(unisono_communicator_split(comm, 0, 0, &other));
  CHECK(!pthread_create(&thread, NULL, reduce, other));
  reduce(comm);
  CHECK(!pthread_join(thread, NULL));
  OK(unisono_communicator_destroy(other));
}

static void* wait_in_vain(void* argument) {
  float token = 0;
  const unisono_status status =
      unisono_recv(argument, &token, 1, UNISONO_FLOAT32, next, 5, NULL, NULL);
  /* It was in it when the communicator went, or came too late. */
  CHECK(status == UNISONO_ABORTED || status == UNISONO_INVALID_ARGUMENT);
  CHECK(token == 0);
  return NULL;
}

/* Destroyed in one thread while others wait in it: they fail, and nothing is used after its end. */
static void destroyed_meanwhile(void) {
  for (int round = 0; round < 5; round++) {
    unisono_communicator* part = NULL;
    pthread_t threads[2];
    OK(unisono_communicator_split(comm, rank, 0, &part));
    next = 0;
    for (int at = 0; at < 2; at++) CHECK(!pthread_create(&threads[at], NULL, wait_in_vain, part));
    if (round % 2) {
      struct timespec pause = {0, 20000000};
      nanosleep(&pause, NULL);
    }
    OK(unisono_communicator_destroy(part));
    for (int at = 0; at < 2; at++) CHECK(!pthread_join(threads[at], NULL));
  }
}

int main(void) {
  check_rank = environment_number("RANK");
  OK(unisono_communicator_from_environment(NULL, &comm));
  OK(unisono_communicator_rank(comm, &rank));
  OK(unisono_communicator_world_size(comm, &world));
  next = (rank + 1) % world;
  previous = (rank + world - 1) % world;
  in("threads on one communicator");
  all_at_once();
  in("two communicators in two threads");
  two_communicators();
  in("destroyed meanwhile");
  destroyed_meanwhile();
  OK(unisono_barrier(comm, NULL, NULL));
  OK(unisono_communicator_destroy(comm));
  return 0;
}
