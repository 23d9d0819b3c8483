/* Windows: puts, gets, signals, mapped memory; what is refused; the end of a peer. */
#include <signal.h>
#include <unistd.h>

#include "check.h"

enum { LENGTH = 1000 };

static unisono_communicator* comm;
static int32_t rank, world, next, previous;

static void exchange(int32_t* memory, int is_shared) {
  for (int at = 0; at < LENGTH; at++) memory[at] = rank;
  unisono_window* window = NULL;
  OK(unisono_window_create(comm, memory, LENGTH * sizeof(int32_t), &window));
  size_t bytes = 0;
  OK(unisono_window_bytes(window, next, &bytes));
  CHECK(bytes == LENGTH * sizeof(int32_t));
  for (int round = 0; round < 20; round++) {
    int32_t sent[2] = {100 * round + rank, 7}, got = -1;
    OK(unisono_window_put(window, sent, sizeof(sent), next, 10 * sizeof(int32_t)));
    OK(unisono_window_signal(window, next));
    OK(unisono_window_wait_signal(window, previous, UNISONO_FOREVER));
    CHECK(memory[9] == rank && memory[10] == 100 * round + previous && memory[11] == 7);
    OK(unisono_window_get(window, &got, sizeof(got), previous, 20 * sizeof(int32_t)));
    CHECK(got == previous);
    OK(unisono_window_signal(window, previous));
    OK(unisono_window_wait_signal(window, next, 20));
  }
  void* theirs = NULL;
  if (is_shared && world > 1) {
    OK(unisono_window_map(window, next, &theirs));
    ((int32_t*)theirs)[30] = 30 + rank;
    OK(unisono_window_fence(window));
    CHECK(memory[30] == 30 + previous);
  } else {
    FAILS(unisono_window_map(window, next, &theirs), UNISONO_UNSUPPORTED, "cannot be mapped");
    CHECK(!theirs);
  }
  OK(unisono_window_fence(window));
  OK(unisono_window_destroy(window));
  FAILS(unisono_window_signal(window, next), UNISONO_INVALID_ARGUMENT, "destroyed");
}

static void refusals(void) {
  char memory[8] = {0};
  unisono_window* window = NULL;
  FAILS(unisono_window_create(comm, NULL, 8, &window), UNISONO_INVALID_ARGUMENT, "memory");
  FAILS(unisono_window_create(comm, memory, 8, NULL), UNISONO_INVALID_ARGUMENT, "window");
  OK(unisono_window_create(comm, memory, sizeof(memory), &window));
  FAILS(unisono_window_put(window, memory, 9, next, 0), UNISONO_INVALID_ARGUMENT, "9 bytes");
  FAILS(unisono_window_put(window, memory, 1, next, 8), UNISONO_INVALID_ARGUMENT, "offset 8");
  FAILS(unisono_window_put(window, NULL, 1, next, 0), UNISONO_INVALID_ARGUMENT, "source");
  FAILS(unisono_window_get(window, memory, 1, world, 0), UNISONO_INVALID_ARGUMENT, "from");
  FAILS(unisono_window_signal(window, -1), UNISONO_INVALID_ARGUMENT, "to");
  FAILS(unisono_window_wait_signal(window, next, 0), UNISONO_TIMEOUT, "no signal");
  unisono_error error = UNISONO_ERROR_INIT;
  OK(unisono_last_error(&error));
  CHECK(!error.fatal && error.peer == next);
  OK(unisono_window_fence(window));
  OK(unisono_window_destroy(window));
  OK(unisono_window_destroy(NULL));
}

/* The last rank is killed while the others wait for its signal. */
static void death(void) {
  char memory[8] = {0};
  unisono_window* window = NULL;
  OK(unisono_window_create(comm, memory, sizeof(memory), &window));
  OK(unisono_window_fence(window));
  if (rank == world - 1) {
    usleep(200000);
    kill(getpid(), SIGKILL);
  }
  FAILS(unisono_window_wait_signal(window, world - 1, UNISONO_FOREVER), UNISONO_PEER_LOST, "gone");
  unisono_error error = UNISONO_ERROR_INIT;
  OK(unisono_last_error(&error));
  CHECK(error.fatal && error.peer == world - 1);
  FAILS(unisono_window_signal(window, rank), UNISONO_PEER_LOST, "new window");
  OK(unisono_window_destroy(window));
}

int main(int count, char** arguments) {
  check_rank = environment_number("RANK");
  OK(unisono_communicator_from_environment(NULL, &comm));
  OK(unisono_communicator_rank(comm, &rank));
  OK(unisono_communicator_world_size(comm, &world));
  next = (rank + 1) % world;
  previous = (rank + world - 1) % world;
  static int32_t own[LENGTH];
  void* shared = NULL;
  OK(unisono_mem_alloc(sizeof(own), &shared));
  in("shared");
  exchange(shared, 1);
  in("private");
  exchange(own, 0);
  in("refusals");
  refusals();
  in("death");
  if (count > 2 && strcmp(arguments[2], "death") == 0) death();
  OK(unisono_mem_free(shared));
  OK(unisono_communicator_destroy(comm));
  return 0;
}
