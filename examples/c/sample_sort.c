/*
 * Sorts numbers that are spread over the ranks. Each rank sorts its own; samples of all tell where
 * to divide, so that each rank gets one range of values from all ranks (all_to_all_v) and sorts it.
 *
 *   unisono launch -n 4 ./sample_sort 1000000
 *
 * Rank 0 compares the result with what qsort makes of all numbers.
 */
#include <string.h>

#include "example.h"

/* Numbers that look random, other ones on each rank. */
static void fill(uint64_t* numbers, size_t count, int32_t rank) {
  uint64_t state = 0x9E3779B97F4A7C15u * (uint64_t)(rank + 1);
  for (size_t i = 0; i < count; i++) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    /* Some occur often, as they do in life. */
    numbers[i] = state % 10 == 0 ? 42 : state;
  }
}

static int compare(const void* a, const void* b) {
  const uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
  return (x > y) - (x < y);
}

static void sort(uint64_t* numbers, size_t count) {
  qsort(numbers, count, sizeof *numbers, compare);
}

/* The values that divide the ranges of the ranks, `size - 1` of them, from samples of all ranks. */
static uint64_t* choose_splitters(unisono_communicator* comm, int32_t size, const uint64_t* sorted,
                                  size_t count) {
  const size_t each = 16;
  uint64_t* own = allocate(each, sizeof *own);
  uint64_t* all = allocate(each * (size_t)size, sizeof *all);
  for (size_t i = 0; i < each; i++) own[i] = count ? sorted[i * count / each] : 0;
  CHECK(unisono_all_gather(comm, own, all, each, UNISONO_UINT64, NULL, NULL));
  sort(all, each * (size_t)size);
  uint64_t* splitters = allocate((size_t)size, sizeof *splitters);
  for (size_t r = 1; r < (size_t)size; r++) splitters[r - 1] = all[r * each];
  free(own);
  free(all);
  return splitters;
}

/* How many of `sorted` each rank is to get: rank r what lies below splitter r. */
static void divide(const uint64_t* sorted, size_t count, const uint64_t* splitters, int32_t size,
                   uint64_t* parts) {
  size_t i = 0;
  for (int32_t r = 0; r < size; r++) {
    const size_t begin = i;
    while (i < count && (r == size - 1 || sorted[i] < splitters[r])) i++;
    parts[r] = i - begin;
  }
}

/* Whether `sorted`, of `total` numbers, is what qsort makes of the numbers of all ranks. */
static int is_right(const uint64_t* sorted, size_t total, const size_t* given, int32_t size) {
  uint64_t* expected = allocate(total, sizeof *expected);
  size_t filled = 0;
  for (int32_t r = 0; r < size; r++) {
    fill(expected + filled, given[r], r);
    filled += given[r];
  }
  sort(expected, total);
  const int right = filled == total && memcmp(sorted, expected, total * sizeof *sorted) == 0;
  free(expected);
  return right;
}

int main(int argc, char** argv) {
  int32_t rank, size;
  unisono_communicator* comm = join(&rank, &size);
  const size_t ranks = (size_t)size;
  const size_t base = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) : 200000;

  /* Each rank has another number of them. */
  const size_t count = base + 1000 * (size_t)rank;
  uint64_t* numbers = allocate(count, sizeof *numbers);
  fill(numbers, count, rank);
  sort(numbers, count);

  /* Who sends how many to whom: every rank tells every other one. */
  uint64_t* splitters = choose_splitters(comm, size, numbers, count);
  uint64_t* parts = allocate(2 * ranks, sizeof *parts);
  divide(numbers, count, splitters, size, parts);
  CHECK(unisono_all_to_all(comm, parts, parts + ranks, 1, UNISONO_UINT64, NULL, NULL));
  size_t* sent = allocate(ranks, sizeof *sent);
  size_t* received = allocate(ranks, sizeof *received);
  size_t mine = 0;
  for (size_t r = 0; r < ranks; r++) {
    sent[r] = (size_t)parts[r];
    received[r] = (size_t)parts[ranks + r];
    mine += received[r];
  }

  uint64_t* range = allocate(mine, sizeof *range);
  CHECK(unisono_all_to_all_v(comm, numbers, sent, range, received, UNISONO_UINT64, NULL, NULL));
  sort(range, mine);

  /* For the comparison all go to rank 0. */
  uint64_t sizes[2] = {count, mine};
  uint64_t* all_sizes = allocate(2 * ranks, sizeof *all_sizes);
  CHECK(unisono_all_gather(comm, sizes, all_sizes, 2, UNISONO_UINT64, NULL, NULL));
  size_t total = 0;
  for (size_t r = 0; r < ranks; r++) {
    sent[r] = (size_t)all_sizes[2 * r];
    received[r] = (size_t)all_sizes[2 * r + 1];
    total += received[r];
  }
  uint64_t* sorted = rank == 0 ? allocate(total, sizeof *sorted) : NULL;
  CHECK(unisono_gather_v(comm, range, mine, sorted, received, UNISONO_UINT64, 0, NULL, NULL));

  int wrong = 0;
  if (rank == 0) {
    wrong = !is_right(sorted, total, sent, size);
    printf("rank 0: %d ranks sorted %zu numbers %s\n", (int)size, total,
           wrong ? "otherwise than qsort: WRONG" : "as qsort does");
  }

  free(numbers);
  free(splitters);
  free(parts);
  free(sent);
  free(received);
  free(range);
  free(all_sizes);
  free(sorted);
  CHECK(unisono_communicator_destroy(comm));
  return wrong;
}
