/*
 * A key-value store of your own, by which the ranks meet: here, a folder that all of them see, in
 * which every key is a file. etcd, Redis or what your framework has are adapted in the same way.
 *
 *   unisono launch -n 4 ./store $(mktemp -d)
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "example.h"

#define LONGEST_PATH 4096

/* The file of `key`, which may hold any character; hexadecimal suits every file system. */
static int path_of(const char* folder, const char* key, char* path, size_t room) {
  int length = snprintf(path, room, "%s/", folder);
  for (; length >= 0 && *key != 0 && (size_t)length + 3 < room; key++) {
    length += snprintf(path + length, room - (size_t)length, "%02x", (unsigned)(unsigned char)*key);
  }
  return *key == 0;
}

/* Others see the value whole or not at all: it gets its name when it has been written. */
static unisono_status set(void* folder, const char* key, const void* value, size_t length) {
  char path[LONGEST_PATH], fresh[LONGEST_PATH + 32];
  if (!path_of(folder, key, path, sizeof path)) return UNISONO_SYSTEM;
  snprintf(fresh, sizeof fresh, "%s.%ld", path, (long)getpid());
  FILE* file = fopen(fresh, "wb");
  if (file == NULL) return UNISONO_SYSTEM;
  const int written = fwrite(value, 1, length, file) == length;
  if (fclose(file) != 0 || !written || rename(fresh, path) != 0) return UNISONO_SYSTEM;
  return UNISONO_OK;
}

static unisono_status get(void* folder, const char* key, void* value, size_t capacity,
                          size_t* length) {
  char path[LONGEST_PATH];
  if (!path_of(folder, key, path, sizeof path)) return UNISONO_SYSTEM;
  FILE* file = fopen(path, "rb");
  if (file == NULL) {
    *length = UNISONO_NOT_SET;
    return errno == ENOENT ? UNISONO_OK : UNISONO_SYSTEM;
  }
  unisono_status status = UNISONO_SYSTEM;
  long size = -1;
  if (fseek(file, 0, SEEK_END) == 0 && (size = ftell(file)) >= 0 && fseek(file, 0, SEEK_SET) == 0) {
    *length = (size_t)size;
    /* With too little room the length alone is wanted. */
    if (*length > capacity || fread(value, 1, *length, file) == *length) status = UNISONO_OK;
  }
  fclose(file);
  return status;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* A store that can notify would not have to look again and again. */
static unisono_status wait_for(void* folder, const char* key, double seconds, void* value,
                               size_t capacity, size_t* length) {
  const struct timespec pause = {0, 2000000};
  const double deadline = now() + seconds;
  for (;;) {
    const unisono_status status = get(folder, key, value, capacity, length);
    if (status != UNISONO_OK || *length != UNISONO_NOT_SET) return status;
    if (now() >= deadline) return UNISONO_TIMEOUT;
    nanosleep(&pause, NULL);
  }
}

/* A number that the launcher left: `unisono launch` and torchrun by the first name, Open MPI by the
 * second. */
static int32_t number(const char* name, const char* of_open_mpi) {
  const char* text = getenv(name);
  if (text == NULL) text = getenv(of_open_mpi);
  return text ? (int32_t)atoi(text) : -1;
}

int main(int argc, char** argv) {
  const int32_t rank = number("RANK", "OMPI_COMM_WORLD_RANK");
  const int32_t size = number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE");
  if (argc != 2 || rank < 0) {
    fprintf(stderr, "usage: unisono launch -n 4 %s FOLDER (a new one for every job)\n", argv[0]);
    return 2;
  }

  unisono_store store = UNISONO_STORE_INIT;
  store.context = argv[1];
  store.set = set;
  store.get = get;
  store.wait = wait_for;
  unisono_communicator* comm = NULL;
  CHECK(unisono_communicator_from_store(&store, rank, size, NULL, &comm));

  /* The store has served; from here on the ranks talk to each other directly. */
  int64_t sum = rank + 1;
  CHECK(unisono_all_reduce(comm, &sum, &sum, 1, UNISONO_INT64, UNISONO_SUM, NULL, NULL));
  const int wrong = sum != (int64_t)size * (size + 1) / 2;
  if (wrong) {
    fprintf(stderr, "rank %d: the sum is %lld, which is wrong\n", (int)rank, (long long)sum);
  } else if (rank == 0) {
    printf("rank 0: %d ranks met in %s\n", (int)size, argv[1]);
  }
  CHECK(unisono_communicator_destroy(comm));
  return wrong;
}
