/*
 * The smallest program that does something: every rank has numbers, and gets the sums.
 *
 *   unisono launch -n 4 ./hello
 */
#include "example.h"

#define COUNT 4

int main(void) {
  int32_t rank, size;
  unisono_communicator* comm = join(&rank, &size);

  float numbers[COUNT];
  for (int i = 0; i < COUNT; i++) numbers[i] = (float)(rank + i);
  /* In place: output == input. */
  CHECK(
      unisono_all_reduce(comm, numbers, numbers, COUNT, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));

  int wrong = 0;
  for (int i = 0; i < COUNT; i++) {
    wrong += numbers[i] != (float)(size * (size - 1) / 2 + size * i);
  }
  printf("rank %d of %d: the sums are %g %g %g %g%s\n", (int)rank, (int)size, numbers[0],
         numbers[1], numbers[2], numbers[3], wrong ? ", which is wrong" : "");

  CHECK(unisono_communicator_destroy(comm));
  return wrong ? 1 : 0;
}
