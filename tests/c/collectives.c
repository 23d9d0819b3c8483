/*
 * Every collective with every type, and every operator with every type it has a meaning for:
 * against values that are computed here; blocking, with a handle, in a group, and in place.
 */
#include "check.h"
#include "element.h"

enum { COUNT = 13, MOST = 64 };

static unisono_communicator* comm;
static int rank, world;

/* How an operation is called. */
enum way { BLOCKING, WITH_WORK, GROUPED, WAYS };
static enum way way;

static unisono_work* pending;

static unisono_work** handle(void) {
  pending = NULL;
  if (way == GROUPED) OK(unisono_group_start());
  return way == WITH_WORK ? &pending : NULL;
}

static void finish(void) {
  if (way == WITH_WORK) {
    CHECK(pending);
    OK(unisono_work_wait(pending, 20));
    OK(unisono_work_destroy(pending));
  }
  if (way == GROUPED) OK(unisono_group_end(NULL));
}

/* Input and output, with a margin that must stay as it is. */
static unsigned char input[MOST * LARGEST_ELEMENT], output[MOST * LARGEST_ELEMENT];
static const unsigned char UNTOUCHED = 0xa5;

static void clear(void) {
  memset(input, UNTOUCHED, sizeof input);
  memset(output, UNTOUCHED, sizeof output);
}

/* Element `index` of what `of` gives in an operation that moves and does not reduce. */
static struct number given(unisono_dtype dtype, int of, size_t index) {
  if (TYPES[dtype].kind == 'b') return real_number((double)((of + index) % 2));
  struct number value = {(double)((3 * (size_t)of + index) % 8), 0};
  if (TYPES[dtype].kind == 'c') value.imaginary = value.real + 1;
  return value;
}

static void give(unisono_dtype dtype, void* to, int of, size_t first, size_t count) {
  for (size_t at = 0; at < count; at++)
    put_element(dtype, (char*)to + at * TYPES[dtype].size, given(dtype, of, first + at));
}

static void expect(unisono_dtype dtype, const char* what, const void* from, size_t at,
                   struct number must) {
  const struct number is = take_element(dtype, (const char*)from + at * TYPES[dtype].size);
  if (is.real != must.real || is.imaginary != must.imaginary)
    FAIL("%s of %s, way %d: element %zu is %g%+gi, not %g%+gi", what, TYPES[dtype].name, way, at,
         is.real, is.imaginary, must.real, must.imaginary);
}

static void expect_given(unisono_dtype dtype, const char* what, size_t place, int of, size_t first,
                         size_t count) {
  for (size_t at = 0; at < count; at++)
    expect(dtype, what, output, place + at, given(dtype, of, first + at));
}

static void expect_untouched(unisono_dtype dtype, const char* what, size_t from) {
  for (size_t at = from * TYPES[dtype].size; at < sizeof output; at++)
    if (output[at] != UNTOUCHED) FAIL("%s wrote beyond its output", what);
}

static void reductions(unisono_dtype dtype, unisono_op op) {
  const size_t size = TYPES[dtype].size;
  unisono_options options = UNISONO_OPTIONS_INIT;
  options.factor = factor_of(rank);
  const int root = world - 1;
  if (!has_meaning(op, dtype)) {
    clear();
    FAILS(unisono_all_reduce(comm, input, output, COUNT, dtype, op, &options, NULL),
          UNISONO_UNSUPPORTED, "no meaning");
    FAILS(unisono_reduce(comm, input, output, COUNT, dtype, op, root, &options, NULL),
          UNISONO_UNSUPPORTED, "no meaning");
    expect_untouched(dtype, "a refused call", 0);
    return;
  }
  for (int in_place = 0; in_place < 2; in_place++) {
    clear();
    void* from = in_place ? output : input;
    for (size_t at = 0; at < COUNT; at++)
      put_element(dtype, (char*)from + at * size, contribution(dtype, op, rank, world, at));
    OK(unisono_all_reduce(comm, from, output, COUNT, dtype, op, &options, handle()));
    finish();
    for (size_t at = 0; at < COUNT; at++)
      expect(dtype, OP_NAMES[op], output, at, reduced(dtype, op, world, at));
    expect_untouched(dtype, "all_reduce", COUNT);

    clear();
    from = in_place && rank == root ? output : input;
    for (size_t at = 0; at < COUNT; at++)
      put_element(dtype, (char*)from + at * size, contribution(dtype, op, rank, world, at));
    OK(unisono_reduce(comm, from, rank == root ? output : NULL, COUNT, dtype, op, root, &options,
                      handle()));
    finish();
    for (size_t at = 0; rank == root && at < COUNT; at++)
      expect(dtype, OP_NAMES[op], output, at, reduced(dtype, op, world, at));
    expect_untouched(dtype, "reduce", rank == root ? COUNT : 0);
  }
  const size_t shard = 5;
  clear();
  for (size_t at = 0; at < shard * (size_t)world; at++)
    put_element(dtype, (char*)input + at * size, contribution(dtype, op, rank, world, at));
  OK(unisono_reduce_scatter(comm, input, output, shard, dtype, op, &options, handle()));
  finish();
  for (size_t at = 0; at < shard; at++)
    expect(dtype, OP_NAMES[op], output, at, reduced(dtype, op, world, shard * (size_t)rank + at));
  expect_untouched(dtype, "reduce_scatter", shard);
}

/* The result of the first `of` ranks. An average may be no whole number, which not every type has.
 */
static void expect_prefix(unisono_dtype dtype, unisono_op op, const char* what, int of) {
  for (size_t at = 0; at < COUNT; at++) {
    const struct number must = reduced_of(dtype, op, of, world, at);
    if (must.real == floor(must.real)) expect(dtype, what, output, at, must);
  }
  expect_untouched(dtype, what, COUNT);
}

static void prefixes(unisono_dtype dtype, unisono_op op) {
  const size_t size = TYPES[dtype].size;
  unisono_options options = UNISONO_OPTIONS_INIT;
  options.factor = factor_of(rank);
  if (!has_meaning(op, dtype)) {
    clear();
    FAILS(unisono_scan(comm, input, output, COUNT, dtype, op, &options, NULL), UNISONO_UNSUPPORTED,
          "no meaning");
    FAILS(unisono_exscan(comm, input, output, COUNT, dtype, op, &options, NULL),
          UNISONO_UNSUPPORTED, "no meaning");
    expect_untouched(dtype, "a refused call", 0);
    return;
  }
  for (int in_place = 0; in_place < 2; in_place++) {
    void* from = in_place ? output : input;
    clear();
    for (size_t at = 0; at < COUNT; at++)
      put_element(dtype, (char*)from + at * size, contribution(dtype, op, rank, world, at));
    OK(unisono_scan(comm, from, output, COUNT, dtype, op, &options, handle()));
    finish();
    expect_prefix(dtype, op, "scan", rank + 1);

    clear();
    for (size_t at = 0; at < COUNT; at++)
      put_element(dtype, (char*)from + at * size, contribution(dtype, op, rank, world, at));
    OK(unisono_exscan(comm, from, rank == 0 && !in_place ? NULL : output, COUNT, dtype, op,
                      &options, handle()));
    finish();
    if (rank > 0) expect_prefix(dtype, op, "exscan", rank);
    for (size_t at = 0; rank == 0 && in_place && at < COUNT; at++)
      expect(dtype, "exscan", output, at, contribution(dtype, op, rank, world, at));
    if (rank == 0) expect_untouched(dtype, "exscan", in_place ? COUNT : 0);
  }
}

/* With a block of another length for every rank, and none for rank 1. */
static size_t uneven(int of) {
  return of == 1 ? 0 : 3 + (size_t)of;
}

static void uneven_counts(unisono_dtype dtype) {
  const size_t size = TYPES[dtype].size;
  size_t counts[4], whole = 0, before = 0;
  for (int of = 0; of < world; of++) {
    counts[of] = uneven(of);
    whole += counts[of];
    before += of < rank ? counts[of] : 0;
  }
  const size_t own = counts[rank];

  for (int in_place = 0; in_place < 2; in_place++) {
    clear();
    void* from = in_place ? (void*)(output + before * size) : input;
    give(dtype, from, rank, 0, own);
    OK(unisono_all_gather_v(comm, from, output, counts, dtype, NULL, handle()));
    finish();
    for (size_t place = 0, of = 0; of < (size_t)world; place += counts[of++])
      expect_given(dtype, "all_gather_v", place, (int)of, 0, counts[of]);
    expect_untouched(dtype, "all_gather_v", whole);
  }

  clear();
  for (size_t at = 0; at < whole; at++)
    put_element(dtype, (char*)input + at * size, contribution(dtype, UNISONO_SUM, rank, world, at));
  OK(unisono_reduce_scatter_v(comm, input, output, counts, dtype, UNISONO_SUM, NULL, handle()));
  finish();
  for (size_t at = 0; at < own; at++)
    expect(dtype, "reduce_scatter_v", output, at, reduced(dtype, UNISONO_SUM, world, before + at));
  expect_untouched(dtype, "reduce_scatter_v", own);

  const int root = 0;
  clear();
  give(dtype, input, rank, 0, own);
  OK(unisono_gather_v(comm, input, own, rank == root ? output : NULL, rank == root ? counts : NULL,
                      dtype, root, NULL, handle()));
  finish();
  for (size_t place = 0, of = 0; rank == root && of < (size_t)world; place += counts[of++])
    expect_given(dtype, "gather_v", place, (int)of, 0, counts[of]);
  expect_untouched(dtype, "gather_v", rank == root ? whole : 0);

  clear();
  if (rank == root) give(dtype, input, root, 0, whole);
  OK(unisono_scatter_v(comm, rank == root ? input : NULL, rank == root ? counts : NULL, output, own,
                       dtype, root, NULL, handle()));
  finish();
  expect_given(dtype, "scatter_v", 0, root, before, own);
  expect_untouched(dtype, "scatter_v", own);

  /* Rank a sends (a + 2 b) % 4 elements to rank b. */
  size_t send[4], receive[4], place = 0;
  clear();
  for (int to = 0; to < world; to++) {
    send[to] = (size_t)(rank + 2 * to) % 4;
    receive[to] = (size_t)(to + 2 * rank) % 4;
    give(dtype, input + place * size, rank, (size_t)to, send[to]);
    place += send[to];
  }
  OK(unisono_all_to_all_v(comm, input, send, output, receive, dtype, NULL, handle()));
  finish();
  place = 0;
  for (int from = 0; from < world; place += receive[from++])
    expect_given(dtype, "all_to_all_v", place, from, (size_t)rank, receive[from]);
  expect_untouched(dtype, "all_to_all_v", place);
}

static void movements(unisono_dtype dtype) {
  const size_t size = TYPES[dtype].size, shard = COUNT, n = (size_t)world;
  for (int root = 0; root < world; root++) {
    clear();
    if (rank == root) give(dtype, output, root, 0, COUNT);
    OK(unisono_broadcast(comm, output, COUNT, dtype, root, NULL, handle()));
    finish();
    expect_given(dtype, "broadcast", 0, root, 0, COUNT);
    expect_untouched(dtype, "broadcast", COUNT);

    clear();
    give(dtype, input, rank, 0, shard);
    OK(unisono_gather(comm, input, rank == root ? output : NULL, shard, dtype, root, NULL,
                      handle()));
    finish();
    for (int of = 0; rank == root && of < world; of++)
      expect_given(dtype, "gather", shard * (size_t)of, of, 0, shard);
    expect_untouched(dtype, "gather", rank == root ? n * shard : 0);

    clear();
    if (rank == root) give(dtype, input, root, 0, n * shard);
    OK(unisono_scatter(comm, rank == root ? input : NULL, output, shard, dtype, root, NULL,
                       handle()));
    finish();
    expect_given(dtype, "scatter", 0, root, shard * (size_t)rank, shard);
    expect_untouched(dtype, "scatter", shard);
  }
  for (int in_place = 0; in_place < 2; in_place++) {
    clear();
    void* from = in_place ? (void*)(output + shard * (size_t)rank * size) : input;
    give(dtype, from, rank, 0, shard);
    OK(unisono_all_gather(comm, from, output, shard, dtype, NULL, handle()));
    finish();
    for (int of = 0; of < world; of++)
      expect_given(dtype, "all_gather", shard * (size_t)of, of, 0, shard);
    expect_untouched(dtype, "all_gather", n * shard);
  }
  clear();
  give(dtype, input, rank, 0, n * shard);
  OK(unisono_all_to_all(comm, input, output, shard, dtype, NULL, handle()));
  finish();
  for (int of = 0; of < world; of++)
    expect_given(dtype, "all_to_all", shard * (size_t)of, of, shard * (size_t)rank, shard);
  expect_untouched(dtype, "all_to_all", n * shard);
}

/* Nothing at all, with NULL for buffers. */
static void empty(void) {
  const size_t none[4] = {0, 0, 0, 0};
  OK(unisono_all_reduce(comm, NULL, NULL, 0, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
  OK(unisono_scan(comm, NULL, NULL, 0, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
  OK(unisono_exscan(comm, NULL, NULL, 0, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
  OK(unisono_broadcast(comm, NULL, 0, UNISONO_FLOAT32, 0, NULL, NULL));
  OK(unisono_all_gather(comm, NULL, NULL, 0, UNISONO_FLOAT32, NULL, NULL));
  OK(unisono_all_gather_v(comm, NULL, NULL, none, UNISONO_FLOAT32, NULL, NULL));
  OK(unisono_reduce_scatter(comm, NULL, NULL, 0, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
  OK(unisono_all_to_all(comm, NULL, NULL, 0, UNISONO_FLOAT32, NULL, NULL));
  OK(unisono_all_to_all_v(comm, NULL, none, NULL, none, UNISONO_FLOAT32, NULL, NULL));
  OK(unisono_barrier(comm, NULL, NULL));
}

/* More than a ring holds, from the shared heap and back. */
static void large(void) {
  const size_t count = 1 << 20;
  float* data = NULL;
  OK(unisono_mem_alloc(count * sizeof *data, (void**)&data));
  CHECK((uintptr_t)data % 64 == 0);
  for (int round = 0; round < 2; round++) {
    for (size_t at = 0; at < count; at++) data[at] = (float)(rank + (int)(at % 5));
    OK(unisono_all_reduce(comm, data, data, count, UNISONO_FLOAT32, UNISONO_SUM, NULL, handle()));
    finish();
    for (size_t at = 0; at < count; at++)
      CHECK(data[at] == (float)(world * (world - 1) / 2 + world * (int)(at % 5)));
  }
  OK(unisono_mem_free(data));
}

int main(void) {
  check_rank = environment_number("RANK");
  OK(unisono_communicator_from_environment(NULL, &comm));
  OK(unisono_communicator_rank(comm, &rank));
  OK(unisono_communicator_world_size(comm, &world));
  CHECK(world <= 4);
  for (way = BLOCKING; way < WAYS; way++) {
    for (int dtype = 1; dtype <= DTYPES; dtype++) {
      in(TYPES[dtype].name);
      for (int op = 1; op <= OPS; op++) {
        reductions((unisono_dtype)dtype, (unisono_op)op);
        prefixes((unisono_dtype)dtype, (unisono_op)op);
      }
      movements((unisono_dtype)dtype);
      uneven_counts((unisono_dtype)dtype);
    }
    in("barrier, large");
    OK(unisono_barrier(comm, NULL, handle()));
    finish();
    large();
  }
  in("empty");
  empty();
  OK(unisono_communicator_destroy(comm));
  return 0;
}
