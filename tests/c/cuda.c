/*
 * Buffers on a CUDA device: an operation happens in the order of its stream, and the call returns
 * before. An invalid call is refused before anything is sent.
 */
#include "driver.h"

enum { COUNT = 1000 };
#define BAD UNISONO_INVALID_ARGUMENT

static unisono_communicator* comm;
static int rank, world, next, previous;
static const unisono_dtype F32 = UNISONO_FLOAT32;
/* On the device, and pinned. */
static float *x, *y, *host, *result;
static size_t bytes = COUNT * sizeof(float);

static void fill(float value, void* stream) {
  for (int at = 0; at < COUNT; at++) host[at] = value;
  to_device(x, host, bytes, stream);
}

static void expect(const float* memory, float value, int count, void* stream) {
  to_host(result, memory, (size_t)count * sizeof(float), stream);
  synchronize(stream);
  for (int at = 0; at < count; at++)
    if (result[at] != value) FAIL("element %d is %g instead of %g", at, result[at], value);
}

static float sum_of_ranks(void) {
  return (float)(world * (world - 1) / 2);
}

/* Before the library knows of CUDA, and of memory that looks as if it were the host's. */
static void mistakes(void* stream) {
  float here[4] = {1, 2, 3, 4};
  unisono_options options = UNISONO_OPTIONS_INIT;
  unisono_work* work = NULL;
  FAILS(unisono_all_reduce(comm, x, y, COUNT, F32, UNISONO_SUM, NULL, NULL), BAD, "no stream");
  FAILS(unisono_all_reduce(comm, here, y, 4, F32, UNISONO_SUM, NULL, &work), BAD,
        "output is memory of CUDA device 0");
  FAILS(unisono_broadcast(comm, x, COUNT, F32, 0, &options, NULL), BAD, "UNISONO_DEFAULT_STREAM");
  FAILS(unisono_send(comm, x, COUNT, F32, next, 0, NULL), BAD, "no stream");
  options.stream = stream;
  FAILS(unisono_all_reduce(comm, here, here, 4, F32, UNISONO_SUM, &options, NULL), BAD,
        "memory of the host");
  FAILS(unisono_all_reduce(comm, x, here, 4, F32, UNISONO_SUM, &options, &work), BAD, "output");
  FAILS(unisono_recv(comm, here, 4, F32, next, 0, &options, NULL), BAD, "memory of the host");
  FAILS(unisono_all_reduce(comm, x + 1, x, 4, F32, UNISONO_SUM, &options, NULL), BAD, "overlap");
  CHECK(work == NULL);
  OK(unisono_all_reduce(comm, here, here, 4, F32, UNISONO_MAX, NULL, NULL));
  CHECK(here[3] == 4);
}

static void collectives(void* named, void* stream) {
  unisono_options options = UNISONO_OPTIONS_INIT;
  options.stream = named;
  fill((float)rank, stream);
  OK(unisono_all_reduce(comm, x, y, COUNT, F32, UNISONO_SUM, &options, NULL));
  OK(unisono_all_reduce(comm, x, x, COUNT, F32, UNISONO_MAX, &options, NULL));
  expect(y, sum_of_ranks(), COUNT, stream);
  expect(x, (float)(world - 1), COUNT, stream);
  fill((float)rank, stream);
  OK(unisono_broadcast(comm, x, COUNT, F32, world - 1, &options, NULL));
  expect(x, (float)(world - 1), COUNT, stream);
  fill((float)rank, stream);
  const int each = COUNT / 4;
  OK(unisono_all_gather(comm, x, y, (size_t)each, F32, &options, NULL));
  for (int from = 0; from < world; from++) expect(y + from * each, (float)from, each, stream);
  OK(unisono_all_to_all(comm, x, y, (size_t)each, F32, &options, NULL));
  for (int from = 0; from < world; from++) expect(y + from * each, (float)from, each, stream);
  OK(unisono_reduce_scatter(comm, x, y, (size_t)each, F32, UNISONO_SUM, &options, NULL));
  expect(y, sum_of_ranks(), each, stream);
  OK(unisono_reduce(comm, x, y, COUNT, F32, UNISONO_SUM, 0, &options, NULL));
  if (rank == 0) expect(y, sum_of_ranks(), COUNT, stream);
  OK(unisono_barrier(comm, &options, NULL));
  options.factor = 2;
  OK(unisono_all_reduce(comm, x, y, COUNT, F32, UNISONO_PREMUL_SUM, &options, NULL));
  expect(y, 2 * sum_of_ranks(), COUNT, stream);
  OK(unisono_all_reduce(comm, NULL, NULL, 0, F32, UNISONO_SUM, &options, NULL));
  synchronize(stream);
}

/* Later work of the stream sees the result; the call returns before its input is there. */
static void order(void* stream) {
  unisono_options options = UNISONO_OPTIONS_INIT;
  options.stream = stream;
  volatile uint32_t* word = gate(stream);
  unisono_work* work = NULL;
  int32_t done = -1;
  fill((float)rank + 1, stream);
  OK(unisono_all_reduce(comm, x, y, COUNT, F32, UNISONO_SUM, &options, NULL));
  OK(unisono_all_reduce(comm, y, y, COUNT, F32, UNISONO_SUM, &options, &work));
  to_host(result, y, bytes, stream);
  OK(unisono_work_test(work, &done));
  CHECK(done == 0);
  FAILS(unisono_work_wait(work, 0.01), UNISONO_TIMEOUT, "");
  *word = 1;
  OK(unisono_work_wait(work, 30));
  OK(unisono_work_test(work, &done));
  CHECK(done == 1);
  OK(unisono_work_destroy(work));
  synchronize(stream);
  const float expected = (float)world * (sum_of_ranks() + (float)world);
  for (int at = 0; at < COUNT; at++) CHECK(result[at] == expected);
}

static void messages(void* stream) {
  /* To itself a rank sends after it has started to receive, which takes two streams. */
  if (world == 1) return;
  unisono_options options = UNISONO_OPTIONS_INIT;
  options.stream = stream;
  unisono_work* works[2] = {NULL, NULL};
  int32_t source = -1;
  fill((float)rank, stream);
  /* In this order: the stream waits for what is received. */
  OK(unisono_isend(comm, x, COUNT, F32, next, 1, &options, &works[1]));
  OK(unisono_irecv(comm, y, COUNT, F32, UNISONO_ANY_SOURCE, 1, &options, &works[0]));
  OK(unisono_work_wait_all(works, 2, 30));
  OK(unisono_work_source(works[0], &source));
  CHECK(source == previous);
  for (int at = 0; at < 2; at++) OK(unisono_work_destroy(works[at]));
  expect(y, (float)previous, COUNT, stream);
  /* In whatever order, in a group. */
  OK(unisono_group_start());
  OK(unisono_recv(comm, y, COUNT, F32, previous, 2, &options, NULL));
  OK(unisono_send(comm, x, COUNT, F32, next, 2, &options));
  OK(unisono_group_end(NULL));
  expect(y, (float)previous, COUNT, stream);
  /* The call waits for the message if it is to say whose it is. */
  if (rank == 0) OK(unisono_send(comm, x, COUNT, F32, next, 3, &options));
  source = -1;
  OK(unisono_recv(comm, y, COUNT, F32, rank % 2 ? UNISONO_ANY_SOURCE : previous, 3, &options,
                  &source));
  CHECK(source == previous);
  if (rank != 0) OK(unisono_send(comm, y, COUNT, F32, next, 3, &options));
  expect(y, 0, COUNT, stream);
}

/* Put from the host into half of the next rank's memory, and from the device into the other half.
 */
static void windows(void* stream) {
  unisono_window* window = NULL;
  void* theirs = NULL;
  const size_t half = bytes / 2;
  float here[COUNT / 2];
  for (int at = 0; at < COUNT / 2; at++) here[at] = 100 + (float)rank;
  fill((float)rank, stream);
  synchronize(stream);
  OK(unisono_window_create(comm, y, bytes, &window));
  OK(unisono_window_put(window, here, half, next, 0));
  OK(unisono_window_put(window, x, half, next, half));
  OK(unisono_window_signal(window, next));
  OK(unisono_window_wait_signal(window, previous, 30));
  expect(y, 100 + (float)previous, COUNT / 2, stream);
  expect(y + COUNT / 2, (float)previous, COUNT / 2, stream);
  OK(unisono_window_fence(window));
  OK(unisono_window_get(window, x, half, previous, half));
  expect(x, (float)((previous + world - 1) % world), COUNT / 2, stream);
  OK(unisono_window_get(window, here, half, previous, 0));
  CHECK(here[0] == 100 + (float)((previous + world - 1) % world));
  if (world > 1) {
    OK(unisono_window_map(window, previous, &theirs));
    expect(theirs, here[0], COUNT / 2, stream);
  }
  OK(unisono_window_fence(window));
  OK(unisono_window_destroy(window));
  OK(unisono_barrier(comm, NULL, NULL));
}

/* Without buffers the stream says which device it is. */
static void devices(void* stream) {
  int count = 0;
  DRIVER("cuDeviceGetCount", (int*), &count);
  if (count < 2) return;
  use_device(1);
  unisono_options options = UNISONO_OPTIONS_INIT;
  options.stream = new_stream();
  FAILS(unisono_all_reduce(comm, x, y, COUNT, F32, UNISONO_SUM, &options, NULL), BAD, "device 1");
  options.stream = stream;
  float* there = device_memory(bytes);
  FAILS(unisono_all_reduce(comm, x, there, COUNT, F32, UNISONO_SUM, &options, NULL), BAD,
        "device 1");
  use_device(0);
}

int main(void) {
  check_rank = rank = environment_number("RANK");
  OK(unisono_communicator_from_environment(NULL, &comm));
  OK(unisono_communicator_world_size(comm, &world));
  OK(unisono_communicator_set_timeout(comm, 60));
  next = (rank + 1) % world, previous = (rank + world - 1) % world;
  open_driver();
  use_device(0);
  x = device_memory(bytes), y = device_memory(bytes);
  host = pinned_memory(bytes), result = pinned_memory(bytes);
  void* stream = new_stream();
  in("mistakes");
  mistakes(stream);
  in("collectives");
  collectives(stream, stream);
  in("collectives on the default stream");
  collectives(UNISONO_DEFAULT_STREAM, NULL);
  in("order");
  order(stream);
  in("messages");
  messages(stream);
  in("windows");
  windows(stream);
  in("devices");
  devices(stream);
  OK(unisono_communicator_status(comm));
  OK(unisono_communicator_destroy(comm));
  in("the end");
  wait_for_the_last();
  return 0;
}
