/*
 * An invalid call gets a status and a sentence; nothing is written, nothing is sent, and the
 * communicator lives. After abort it does not, and says why.
 */
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define BAD UNISONO_INVALID_ARGUMENT

static unisono_communicator* comm;
static int rank, world;
static float x[64], y[64];
static const unisono_dtype F32 = UNISONO_FLOAT32;

static void outputs_are_untouched(void) {
  for (int at = 0; at < 64; at++) CHECK(y[at] == 42);
}

static void handles(void) {
  unisono_communicator* const none = NULL;
  unisono_communicator* const wild = (unisono_communicator*)x;
  unisono_work* work = (unisono_work*)y;
  int32_t number = 7;
  FAILS(unisono_all_reduce(none, x, y, 4, F32, UNISONO_SUM, NULL, NULL), BAD, "NULL");
  FAILS(unisono_all_reduce(wild, x, y, 4, F32, UNISONO_SUM, NULL, NULL), BAD, "never made");
  FAILS(unisono_communicator_rank(none, &number), BAD, "NULL");
  FAILS(unisono_communicator_rank(comm, NULL), BAD, "NULL");
  FAILS(unisono_communicator_world_size((unisono_communicator*)-1, &number), BAD, "never made");
  FAILS(unisono_communicator_status(none), BAD, "NULL");
  FAILS(unisono_communicator_abort(none, "no"), BAD, "NULL");
  FAILS(unisono_communicator_destroy(wild), BAD, "never made");
  FAILS(unisono_communicator_split(comm, 0, 0, NULL), BAD, "NULL");
  FAILS(unisono_work_wait(NULL, 1), BAD, "NULL");
  FAILS(unisono_work_wait((unisono_work*)comm, 1), BAD, "not the handle of a work");
  FAILS(unisono_barrier((unisono_communicator*)work, NULL, NULL), BAD, "a communicator");
  FAILS(unisono_isend(comm, x, 1, F32, 0, 0, NULL, NULL), BAD, "NULL");
  FAILS(unisono_work_wait_all(NULL, 2, 1), BAD, "NULL");
  OK(unisono_work_wait_all(NULL, 0, 1));
  OK(unisono_communicator_destroy(NULL));
  OK(unisono_work_destroy(NULL));
  OK(unisono_config_destroy(NULL));
  OK(unisono_mem_free(NULL));
  CHECK(number == 7);

  /* Given back: the same handle, also when its place serves again. */
  unisono_config *config = NULL, *next = NULL;
  OK(unisono_config_create(&config));
  OK(unisono_config_destroy(config));
  FAILS(unisono_config_destroy(config), BAD, "destroyed");
  OK(unisono_config_create(&next));
  CHECK(next != config);
  FAILS(unisono_config_set(config, "timeout", "3"), BAD, "destroyed");
  OK(unisono_config_destroy(next));
}

static void arguments(void) {
  unisono_work* work = NULL;
  size_t counts[4] = {1, 1, 1, 1}, huge[4] = {SIZE_MAX, SIZE_MAX, 2, 2};
  FAILS(unisono_all_reduce(comm, x, y, 4, (unisono_dtype)0, UNISONO_SUM, NULL, NULL), BAD, "dtype");
  FAILS(unisono_all_reduce(comm, x, y, 4, (unisono_dtype)18, UNISONO_SUM, NULL, NULL), BAD, "18");
  FAILS(unisono_all_reduce(comm, x, y, 4, (unisono_dtype)259, UNISONO_SUM, NULL, NULL), BAD, "259");
  FAILS(unisono_all_reduce(comm, x, y, 4, F32, (unisono_op)0, NULL, NULL), BAD, "unisono_op");
  FAILS(unisono_all_reduce(comm, x, y, 4, F32, (unisono_op)13, NULL, NULL), BAD, "13");
  FAILS(unisono_all_reduce(comm, NULL, y, 4, F32, UNISONO_SUM, NULL, NULL), BAD, "input is NULL");
  FAILS(unisono_all_reduce(comm, x, NULL, 4, F32, UNISONO_SUM, NULL, NULL), BAD, "output is NULL");
  FAILS(unisono_all_reduce(comm, NULL, NULL, 4, F32, UNISONO_SUM, NULL, NULL), BAD, "NULL");
  FAILS(unisono_all_reduce(comm, y + 1, y, 4, F32, UNISONO_SUM, NULL, &work), BAD, "overlap");
  FAILS(unisono_all_reduce(comm, x, y, SIZE_MAX / 2, F32, UNISONO_SUM, NULL, NULL), BAD, "memory");
  FAILS(unisono_all_gather(comm, x, y, SIZE_MAX, F32, NULL, NULL), BAD,
        world > 1 ? "many" : "more");
  FAILS(unisono_all_gather(comm, y + 1, y, 2, F32, NULL, NULL), BAD, "overlap");
  FAILS(unisono_all_gather_v(comm, x, y, NULL, F32, NULL, NULL), BAD, "counts");
  FAILS(unisono_all_gather_v(comm, x, y, huge, F32, NULL, NULL), BAD,
        world > 1 ? "add up" : "more than");
  FAILS(unisono_scan(comm, x, NULL, 4, F32, UNISONO_SUM, NULL, NULL), BAD, "scan: output is NULL");
  FAILS(unisono_exscan(comm, NULL, y, 4, F32, UNISONO_SUM, NULL, NULL), BAD,
        "exscan: input is NULL");
  FAILS(unisono_reduce_scatter(comm, y, y, 2, F32, UNISONO_SUM, NULL, NULL), BAD, "overlap");
  FAILS(unisono_reduce_scatter_v(comm, x, y, NULL, F32, UNISONO_SUM, NULL, NULL), BAD, "counts");
  FAILS(unisono_reduce(comm, x, y, 4, F32, UNISONO_SUM, -1, NULL, NULL), BAD, "out of range");
  FAILS(unisono_reduce(comm, x, y, 4, F32, UNISONO_SUM, world, NULL, NULL), BAD, "out of range");
  FAILS(unisono_broadcast(comm, NULL, 4, F32, 0, NULL, NULL), BAD, "NULL");
  FAILS(unisono_broadcast(comm, y, 4, F32, 99, NULL, &work), BAD, "99");
  FAILS(unisono_gather(comm, NULL, y, 4, F32, 0, NULL, NULL), BAD, "NULL");
  FAILS(unisono_gather_v(comm, x, 3, y, counts, F32, rank, NULL, NULL), BAD, "this rank's");
  FAILS(unisono_gather_v(comm, x, 3, y, NULL, F32, rank, NULL, NULL), BAD, "counts");
  FAILS(unisono_scatter(comm, NULL, y, 4, F32, rank, NULL, NULL), BAD, "NULL");
  FAILS(unisono_scatter_v(comm, x, counts, y, 2, F32, rank, NULL, NULL), BAD, "this rank's");
  FAILS(unisono_all_to_all(comm, y, y, 2, F32, NULL, NULL), BAD, "overlap");
  FAILS(unisono_all_to_all_v(comm, x, counts, y, NULL, F32, NULL, NULL), BAD, "receive_counts");
  FAILS(unisono_all_to_all_v(comm, x, NULL, y, counts, F32, NULL, NULL), BAD, "send_counts");
  FAILS(unisono_send(comm, x, 1, F32, world, 0, NULL), BAD, "out of range");
  FAILS(unisono_send(comm, x, 1, F32, -1, 0, NULL), BAD, "out of range");
  FAILS(unisono_send(comm, x, 1, F32, 0, UINT64_MAX, NULL), BAD, "tag");
  FAILS(unisono_recv(comm, y, 1, F32, -2, 0, NULL, NULL), BAD, "out of range");
  FAILS(unisono_recv(comm, NULL, 1, F32, 0, 0, NULL, NULL), BAD, "NULL");
  CHECK(work == NULL);
}

static void options(void) {
  unisono_options options = UNISONO_OPTIONS_INIT;
  struct {
    unisono_options known;
    uint64_t unknown;
  } newer = {UNISONO_OPTIONS_INIT, 0};
  const double wrong[3] = {-2, NAN, -INFINITY};
  for (int at = 0; at < 3; at++) {
    options.timeout = wrong[at];
    FAILS(unisono_barrier(comm, &options, NULL), BAD, "timeout");
    FAILS(unisono_communicator_set_timeout(comm, wrong[at]), BAD, "timeout");
  }
  FAILS(unisono_communicator_set_timeout(comm, 0), BAD, "timeout");
  OK(unisono_communicator_set_timeout(comm, UNISONO_FOREVER));
  OK(unisono_communicator_set_timeout(comm, 20));
  options.timeout = UNISONO_FOREVER;
  OK(unisono_barrier(comm, &options, NULL));
  options.size = 0;
  FAILS(unisono_barrier(comm, &options, NULL), BAD, "_INIT");
  options.size = SIZE_MAX;
  FAILS(unisono_barrier(comm, &options, NULL), BAD, "_INIT");
  /* From a program that was compiled for a newer version. */
  newer.known.size = sizeof newer;
  OK(unisono_barrier(comm, &newer.known, NULL));
  newer.unknown = 1;
  FAILS(unisono_barrier(comm, &newer.known, NULL), UNISONO_UNSUPPORTED, "newer");
}

static void making(void) {
  unisono_communicator* made = (unisono_communicator*)y;
  unisono_unique_id id;
  memset(&id, 0, sizeof id);
  unisono_store store = UNISONO_STORE_INIT;
  FAILS(unisono_communicator_from_id(NULL, 0, 1, NULL, &made), BAD, "id");
  FAILS(unisono_communicator_from_id(&id, 0, 1, NULL, &made), BAD, "no unique id");
  FAILS(unisono_communicator_from_id(&id, 0, 1, NULL, NULL), BAD, "comm");
  FAILS(unisono_communicator_from_url(NULL, 0, 1, NULL, &made), BAD, "url");
  FAILS(unisono_communicator_from_url("http://a", 0, 1, NULL, &made), BAD, "tcp://");
  FAILS(unisono_communicator_from_url("file:///tmp/x", 2, 2, NULL, &made), BAD, "out of range");
  FAILS(unisono_communicator_from_url("file:///tmp/x", -1, 2, NULL, &made), BAD, "out of range");
  FAILS(unisono_communicator_from_url("file:///tmp/x", 0, 0, NULL, &made), BAD, "out of range");
  FAILS(unisono_communicator_from_url("file:///tmp/\xff", 0, 1, NULL, &made), BAD, "UTF-8");
  FAILS(unisono_communicator_from_store(NULL, 0, 1, NULL, &made), BAD, "store");
  FAILS(unisono_communicator_from_store(&store, 0, 1, NULL, &made), BAD, "lacks");
  FAILS(unisono_communicator_from_environment((unisono_config*)x, &made), BAD, "config");
  FAILS(unisono_unique_id_create(NULL, NULL), BAD, "id");
  CHECK(made == (unisono_communicator*)y);
}

/* A child has its parent's handles but none of its connections. */
static void forked(void) {
#ifdef __SANITIZE_ADDRESS__
  return; /* another thread may hold a lock of its allocator at the fork, and the child then waits
             for it */
#endif
  fflush(NULL);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    float z = 1;
    int32_t number = -1;
    FAILS(unisono_all_reduce(comm, &z, &z, 1, F32, UNISONO_SUM, NULL, NULL), UNISONO_ABORTED,
          "forked");
    FAILS(unisono_barrier(comm, NULL, NULL), UNISONO_ABORTED, "forked");
    FAILS(unisono_communicator_status(comm), UNISONO_ABORTED, "forked");
    FAILS(unisono_communicator_abort(comm, "no"), UNISONO_ABORTED, "forked");
    OK(unisono_communicator_rank(comm, &number));
    CHECK(number == rank && z == 1);
    OK(unisono_communicator_destroy(comm));
    /* It may make one of its own. */
    unisono_unique_id id;
    unisono_communicator* own = NULL;
    OK(unisono_unique_id_create(NULL, &id));
    OK(unisono_communicator_from_id(&id, 0, 1, NULL, &own));
    OK(unisono_all_reduce(own, &z, &z, 1, F32, UNISONO_SUM, NULL, NULL));
    CHECK(z == 1);
    exit(0); /* with the handlers of exit */
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void aborted(void) {
  unisono_communicator* part = NULL;
  unisono_work* work = NULL;
  unisono_error error = UNISONO_ERROR_INIT;
  OK(unisono_communicator_split(comm, 0, 0, &part));
  OK(unisono_communicator_status(part));
  OK(unisono_barrier(part, NULL, NULL));
  /* In the operation of all ranks, one gives up. */
  float z = 1, token = 1;
  int32_t done = 0;
  if (rank == 0 && world > 1) {
    OK(unisono_recv(part, &token, 1, F32, 1, 0, NULL, NULL));
    OK(unisono_communicator_abort(part, "enough of it"));
  } else if (world > 1) {
    OK(unisono_all_reduce(part, &z, &z, 1, F32, UNISONO_SUM, NULL, &work));
    if (rank == 1) OK(unisono_send(part, &token, 1, F32, 0, 0, NULL));
    FAILS(unisono_work_wait(work, 20), UNISONO_ABORTED, "enough of it");
    OK(unisono_last_error(&error));
    CHECK(error.fatal && error.operation && strstr(error.operation, "all_reduce"));
    FAILS(unisono_work_test(work, &done), UNISONO_ABORTED, "enough of it");
    CHECK(done == 1);
    OK(unisono_work_destroy(work));
  } else {
    OK(unisono_communicator_abort(part, NULL));
  }
  FAILS(unisono_barrier(part, NULL, NULL), UNISONO_ABORTED, "abort");
  OK(unisono_last_error(&error));
  CHECK(error.fatal == 1);
  FAILS(unisono_communicator_status(part), UNISONO_ABORTED, "abort");
  char report[4096] = "";
  size_t length = 0;
  OK(unisono_communicator_report(part, report, sizeof report, &length));
  CHECK(length == strlen(report) && (world == 1 || strstr(report, "barrier")));
  OK(unisono_communicator_report(part, NULL, 0, &length));
  char short_one[5] = "zzzz";
  OK(unisono_communicator_report(part, short_one, sizeof short_one, &length));
  CHECK(strlen(short_one) == (length < 4 ? length : 4));
  FAILS(unisono_communicator_report(part, NULL, 5, &length), BAD, "text");
  OK(unisono_communicator_stats(part, report, sizeof report, &length));
  CHECK(length == strlen(report) && strstr(report, "\"waited\":{\"by_operation\""));
  FAILS(unisono_communicator_stats(part, NULL, 5, &length), BAD, "text");
  OK(unisono_communicator_destroy(part));
  FAILS(unisono_barrier(part, NULL, NULL), BAD, "destroyed");
  FAILS(unisono_communicator_destroy(part), BAD, "destroyed");
}

static void memory(void) {
  void* block = NULL;
  FAILS(unisono_mem_alloc(8, NULL), BAD, "memory");
  FAILS(unisono_mem_alloc(SIZE_MAX, &block), UNISONO_SYSTEM, "bytes");
  CHECK(block == NULL);
  FAILS(unisono_mem_free(x), BAD, "not made");
  OK(unisono_mem_alloc(0, &block));
  CHECK(block != NULL);
  OK(unisono_mem_free(block));
  OK(unisono_mem_alloc(100000, &block));
  memset(block, 1, 100000);
  FAILS(unisono_mem_free((char*)block + 64), BAD, "not made");
  OK(unisono_mem_free(block));
  FAILS(unisono_mem_free(block), BAD, "freed before");
}

int main(void) {
  check_rank = environment_number("RANK");
  OK(unisono_communicator_from_environment(NULL, &comm));
  OK(unisono_communicator_rank(comm, &rank));
  OK(unisono_communicator_world_size(comm, &world));
  for (int at = 0; at < 64; at++) x[at] = 1, y[at] = 42;
  in("handles");
  handles();
  in("arguments");
  arguments();
  in("options");
  options();
  in("making");
  making();
  in("memory");
  memory();
  outputs_are_untouched();
  in("forked");
  forked();
  OK(unisono_barrier(comm, NULL, NULL));
  in("aborted");
  aborted();
  /* After all that it still works. */
  OK(unisono_communicator_status(comm));
  OK(unisono_all_reduce(comm, x, y, 64, F32, UNISONO_SUM, NULL, NULL));
  for (int at = 0; at < 64; at++) CHECK(y[at] == (float)world);
  OK(unisono_communicator_destroy(comm));
  return 0;
}
