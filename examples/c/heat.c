/*
 * Heat in a plate whose rows are divided among the ranks: neighbours exchange the rows at their
 * border ("halos") in every step, and compute the inner rows meanwhile.
 *
 *   unisono launch -n 4 ./heat
 *
 * All ranks stop together, when nothing changes much any more. The result is compared with the same
 * computation on one rank, to the last bit.
 */
#include <math.h>
#include <string.h>

#include "example.h"

#define ROWS 240
#define COLUMNS 200
#define RATE 0.2
#define ENOUGH 0.02
#define MOST_STEPS 5000
/* Every LOOK_EVERY steps the ranks ask each other how much has changed. */
#define LOOK_EVERY 50

#define UP 1
#define DOWN 2

/* Row `row` of a plate or of a piece of one. */
static double* at(double* rows, size_t row) {
  return rows + row * COLUMNS;
}

/* The plate as it begins: cold, but for a hot spot. */
static double initial(size_t row, size_t column) {
  return row > ROWS / 4 && row < ROWS / 2 && column > 20 && column < 90 ? 100.0 : 0.0;
}

/* Computes rows `first` to `last` of `new` from `old`, and returns how much changed at most. */
static double step(double* old, double* new, size_t first, size_t last) {
  double most = 0.0;
  for (size_t row = first; row <= last; row++) {
    const double *above = at(old, row - 1), *here = at(old, row), *below = at(old, row + 1);
    double* out = at(new, row);
    for (size_t c = 1; c + 1 < COLUMNS; c++) {
      const double change =
          RATE * (above[c] + below[c] + here[c - 1] + here[c + 1] - 4.0 * here[c]);
      out[c] = here[c] + change;
      most = fmax(most, fabs(change));
    }
  }
  return most;
}

/* The whole plate on one rank, with a cold row above and below. Returns the number of steps. */
static int alone(double** plate) {
  double* old = allocate((ROWS + 2) * COLUMNS, sizeof *old);
  double* new = allocate((ROWS + 2) * COLUMNS, sizeof *new);
  for (size_t row = 0; row < ROWS; row++) {
    for (size_t c = 1; c + 1 < COLUMNS; c++) at(old, row + 1)[c] = initial(row, c);
  }
  int steps = 0;
  double most = ENOUGH;
  while (most >= ENOUGH && steps < MOST_STEPS) {
    const double change = step(old, new, 1, ROWS);
    double* swap = old;
    old = new;
    new = swap;
    if (++steps % LOOK_EVERY == 0) most = change;
  }
  free(new);
  *plate = old;
  return steps;
}

/* This rank's rows, 1 to `rows` of `old`, until they are done; `new` is as large. */
static int together(unisono_communicator* comm, int32_t rank, int32_t size, size_t rows,
                    double** old, double** new) {
  int steps = 0;
  double most = ENOUGH;
  while (most >= ENOUGH && steps < MOST_STEPS) {
    unisono_work* halos[4] = {NULL, NULL, NULL, NULL};
    double* now = *old;
    if (rank > 0) {
      CHECK(unisono_irecv(comm, at(now, 0), COLUMNS, UNISONO_FLOAT64, rank - 1, DOWN, NULL,
                          &halos[0]));
      CHECK(
          unisono_isend(comm, at(now, 1), COLUMNS, UNISONO_FLOAT64, rank - 1, UP, NULL, &halos[1]));
    }
    if (rank + 1 < size) {
      CHECK(unisono_irecv(comm, at(now, rows + 1), COLUMNS, UNISONO_FLOAT64, rank + 1, UP, NULL,
                          &halos[2]));
      CHECK(unisono_isend(comm, at(now, rows), COLUMNS, UNISONO_FLOAT64, rank + 1, DOWN, NULL,
                          &halos[3]));
    }
    double change = step(now, *new, 2, rows - 1);
    CHECK(unisono_work_wait_all(halos, 4, UNISONO_FOREVER));
    for (int i = 0; i < 4; i++) CHECK(unisono_work_destroy(halos[i]));
    change = fmax(change, step(now, *new, 1, 1));
    change = fmax(change, step(now, *new, rows, rows));
    *old = *new;
    *new = now;
    if (++steps % LOOK_EVERY == 0) {
      CHECK(unisono_all_reduce(comm, &change, &most, 1, UNISONO_FLOAT64, UNISONO_MAX, NULL, NULL));
    }
  }
  return steps;
}

int main(void) {
  int32_t rank, size;
  unisono_communicator* comm = join(&rank, &size);
  if (size > ROWS / 2) {
    fprintf(stderr, "a rank needs two rows, so there can be %d ranks at most\n", ROWS / 2);
    return 1;
  }

  /* Pieces may differ: the first ranks take one row more. */
  size_t* counts = allocate((size_t)size, sizeof *counts);
  size_t first = 0, rows = 0;
  for (int32_t r = 0; r < size; r++) {
    const size_t share = (size_t)(ROWS / size + (r < ROWS % size));
    counts[r] = share * COLUMNS;
    if (r < rank) first += share;
    if (r == rank) rows = share;
  }

  double* old = allocate((rows + 2) * COLUMNS, sizeof *old);
  double* new = allocate((rows + 2) * COLUMNS, sizeof *new);
  for (size_t row = 0; row < rows; row++) {
    for (size_t c = 1; c + 1 < COLUMNS; c++) at(old, row + 1)[c] = initial(first + row, c);
  }
  const int steps = together(comm, rank, size, rows, &old, &new);

  int wrong = 0;
  double* whole = rank == 0 ? allocate(ROWS * COLUMNS, sizeof *whole) : NULL;
  CHECK(unisono_gather_v(comm, at(old, 1), rows * COLUMNS, whole, counts, UNISONO_FLOAT64, 0, NULL,
                         NULL));
  if (rank == 0) {
    double* expected = NULL;
    wrong = alone(&expected) != steps ||
            memcmp(whole, at(expected, 1), ROWS * COLUMNS * sizeof *whole) != 0;
    printf("rank 0: after %d steps %d ranks have %s\n", steps, (int)size,
           wrong ? "something else than one would: WRONG" : "what one would, to the last bit");
    free(expected);
  }

  free(whole);
  free(old);
  free(new);
  free(counts);
  CHECK(unisono_communicator_destroy(comm));
  return wrong;
}
