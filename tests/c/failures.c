/*
 * The events that end a communicator, and the error that every rank gets: `failures mismatch`,
 * `failures dies`, `failures late`, `failures absent`. The last rank is the one that fails. Where
 * it dies, `failures comes` takes its place.
 */
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static int rank, world;

static void dead(unisono_communicator* comm, unisono_status cause) {
  unisono_error error = UNISONO_ERROR_INIT;
  OK(unisono_last_error(&error));
  CHECK(error.fatal == 1 && error.status == cause);
  float x = 1;
  CHECK(unisono_all_reduce(comm, &x, &x, 1, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL) == cause);
  CHECK(x == 1 && unisono_communicator_status(comm) == cause);
}

/* All ranks. The last has come later. */
static void whole(unisono_communicator* comm) {
  int32_t ranks[8] = {-1};
  size_t count = 0;
  float sum = 1;
  OK(unisono_communicator_newcomers(comm, ranks, &count));
  CHECK(count == 1 && ranks[0] == world - 1);
  OK(unisono_all_reduce(comm, &sum, &sum, 1, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
  CHECK(sum == (float)world);
  OK(unisono_communicator_destroy(comm));
}

/* The ranks that are left take in a process, which rank 0 starts. */
static void take_in(unisono_communicator* left, char** arguments) {
  unisono_communicator* grown = NULL;
  int32_t ranks[8];
  size_t count = 1;
  OK(unisono_communicator_newcomers(left, ranks, &count));
  CHECK(count == 0);
  FAILS(unisono_communicator_grow(left, NULL, -1, 20, &grown), UNISONO_INVALID_ARGUMENT, "-1");
  FAILS(unisono_communicator_grow(left, NULL, world - 1, 20, &grown), UNISONO_INVALID_ARGUMENT,
        "already");
  char number[16];
  snprintf(number, sizeof number, "%d", world - 1);
  FAILS(unisono_communicator_grow(left, NULL, 0, 0.3, &grown), UNISONO_TIMEOUT,
        rank == 0 ? number : "");
  const pid_t child = rank == 0 ? fork() : 1;
  if (child == 0) {
    setenv("RANK", number, 1);
    setenv("LOCAL_RANK", number, 1);
    execl(arguments[0], arguments[0], arguments[1], "comes", (char*)NULL);
    _exit(127);
  }
  OK(unisono_communicator_grow(left, NULL, 0, 20, &grown));
  whole(grown);
  int status = 0;
  if (rank == 0) CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* The ranks but the last keep their numbers. Their group is shrunk then. */
static void keep_numbers(unisono_communicator* comm, unisono_communicator** left) {
  unisono_communicator* masked = NULL;
  int32_t size = 0, number = -1, living[8], blocks[8];
  size_t count = 0;
  FAILS(unisono_communicator_mask(comm, NULL, 1, 20, &masked), UNISONO_INVALID_ARGUMENT, "NULL");
  OK(unisono_communicator_mask(comm, NULL, 0, 20, &masked));
  OK(unisono_communicator_world_size(masked, &size));
  OK(unisono_communicator_rank(masked, &number));
  CHECK(size == world && number == rank);
  OK(unisono_communicator_living(masked, living, &count));
  CHECK(count == (size_t)world - 1);
  for (int at = 0; at < world; ++at) blocks[at] = -1;
  OK(unisono_all_gather(masked, &rank, blocks, 1, UNISONO_INT32, NULL, NULL));
  for (int at = 0; at < world; ++at) CHECK(blocks[at] == (at < world - 1 ? at : -1));
  FAILS(unisono_broadcast(masked, blocks, 1, UNISONO_INT32, world - 1, NULL, NULL),
        UNISONO_INVALID_ARGUMENT, "gone");
  OK(unisono_communicator_shrink(masked, NULL, 0, 20, left));
  OK(unisono_communicator_destroy(masked));
}

/* The ranks but the last go on. */
static void go_on(unisono_communicator* comm, char** arguments) {
  unisono_communicator* left = NULL;
  int32_t former[8] = {-1}, size = 0, other = world;
  uint64_t ended = 0, before = 0;
  FAILS(unisono_communicator_shrink(comm, &other, 1, 20, &left), UNISONO_INVALID_ARGUMENT, "rank");
  FAILS(unisono_communicator_shrink(comm, NULL, 1, 20, &left), UNISONO_INVALID_ARGUMENT, "NULL");
  FAILS(unisono_communicator_former(comm, former, &before), UNISONO_INVALID_ARGUMENT, "shrink");
  keep_numbers(comm, &left);
  OK(unisono_communicator_world_size(left, &size));
  CHECK(size == world - 1);
  OK(unisono_communicator_former(left, former, &before));
  for (int at = 0; at < size; ++at) CHECK(former[at] == at);
  OK(unisono_communicator_ended(comm, &ended));
  CHECK(ended == 1 && before <= 1);
  float sum = 1;
  OK(unisono_all_reduce(left, &sum, &sum, 1, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
  CHECK(sum == (float)size);
  take_in(left, arguments);
  OK(unisono_communicator_destroy(left));
}

int main(int count, char** arguments) {
  CHECK(count > 2);
  const char* what = arguments[2];
  rank = check_rank = environment_number("RANK");
  world = environment_number("WORLD_SIZE");
  const int last = world - 1;
  unisono_communicator* comm = NULL;
  unisono_config* config = NULL;
  unisono_error error = UNISONO_ERROR_INIT;
  in(what);
  OK(unisono_config_create(&config));
  if (strcmp(what, "absent") == 0) {
    OK(unisono_config_set(config, "join_timeout", "3"));
    if (rank == last) return 0;
    char name[32];
    snprintf(name, sizeof name, "%d", last);
    FAILS(unisono_communicator_from_environment(config, &comm), UNISONO_TIMEOUT, name);
    CHECK(comm == NULL);
    return 0;
  }
  OK(unisono_communicator_from_environment(config, &comm));
  OK(unisono_config_destroy(config));
  if (strcmp(what, "comes") == 0) {
    whole(comm);
    return 0;
  }
  float x[100] = {1};
  OK(unisono_all_reduce(comm, x, x, 100, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));

  if (strcmp(what, "mismatch") == 0) {
    const size_t length = rank == last ? 50 : 100;
    const unisono_status status =
        unisono_all_reduce(comm, x, x, length, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL);
    CHECK(status == UNISONO_MISMATCH);
    OK(unisono_last_error(&error));
    CHECK(strstr(error.message, "50") && strstr(error.message, "100"));
    CHECK(strstr(error.operation, "all_reduce #2"));
    dead(comm, UNISONO_MISMATCH);
    OK(unisono_communicator_destroy(comm));
  } else if (strcmp(what, "dies") == 0) {
    if (rank == last) {
      kill(getpid(), SIGKILL);
    }
    FAILS(unisono_all_reduce(comm, x, x, 100, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL),
          UNISONO_PEER_LOST, "rank");
    OK(unisono_last_error(&error));
    CHECK(error.peer == last);
    dead(comm, UNISONO_PEER_LOST);
    go_on(comm, arguments);
    OK(unisono_communicator_destroy(comm));
  } else if (strcmp(what, "late") == 0) {
    unisono_options options = UNISONO_OPTIONS_INIT;
    options.timeout = 1;
    if (rank == last) {
      /* While it looks for a message, it hears of the others. */
      for (int i = 0; i < 600 && unisono_communicator_status(comm) == UNISONO_OK; i++) {
        unisono_probe(comm, UNISONO_ANY_SOURCE, 1, 0.1, NULL, NULL, NULL);
      }
      CHECK(unisono_barrier(comm, &options, NULL) == UNISONO_TIMEOUT);
    } else {
      FAILS(unisono_barrier(comm, &options, NULL), UNISONO_TIMEOUT, "rank");
      OK(unisono_last_error(&error));
      CHECK(error.peer == last);
    }
    dead(comm, UNISONO_TIMEOUT);
    OK(unisono_communicator_destroy(comm));
  } else {
    FAIL("there is no %s", what);
  }
  return 0;
}
