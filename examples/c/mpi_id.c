/*
 * A program that has MPI, or another way to pass a few bytes from rank 0 to the others, needs no
 * launcher that unisono knows: rank 0 makes a unique id, all ranks join with it.
 *
 *   mpirun -n 4 ./mpi_id
 *
 * The sum by unisono is compared with that of MPI.
 */
#include <mpi.h>

#include "example.h"

#define COUNT 100000

int main(int argc, char** argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);

  unisono_unique_id id;
  if (rank == 0) CHECK(unisono_unique_id_create(NULL, &id));
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  unisono_communicator* comm = NULL;
  CHECK(unisono_communicator_from_id(&id, rank, size, NULL, &comm));

  int32_t* numbers = allocate(COUNT, sizeof *numbers);
  int32_t* ours = allocate(COUNT, sizeof *ours);
  int32_t* theirs = allocate(COUNT, sizeof *theirs);
  for (int32_t i = 0; i < COUNT; i++) numbers[i] = (rank + 1) * (i % 1009);
  CHECK(unisono_all_reduce(comm, numbers, ours, COUNT, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
  MPI_Allreduce(numbers, theirs, COUNT, MPI_INT32_T, MPI_SUM, MPI_COMM_WORLD);

  int wrong = 0;
  for (int32_t i = 0; i < COUNT; i++) wrong += ours[i] != theirs[i];
  if (wrong) {
    fprintf(stderr, "rank %d: %d of %d sums differ from MPI's\n", rank, wrong, COUNT);
  } else if (rank == 0) {
    printf("rank 0: %d ranks met by a unique id, and have the sums that MPI has\n", size);
  }

  free(numbers);
  free(ours);
  free(theirs);
  CHECK(unisono_communicator_destroy(comm));
  MPI_Finalize();
  return wrong ? 1 : 0;
}
