/* Shared by the examples: every call is checked, and a failure ends the rank with its reason. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <stdio.h>
#include <stdlib.h>
#include <unisono.h>

/* Ends this rank unless `status` is success. The others end too: they lose it. */
static inline void check(unisono_status status, const char* call) {
  if (status == UNISONO_OK) return;
  fprintf(stderr, "%s: %s: %s\n", call, unisono_status_name(status), unisono_last_error_message());
  exit(1);
}

#define CHECK(call) check((call), #call)

/* The group of all ranks, as the launcher left it in the environment; its rank and size. */
static inline unisono_communicator* join(int32_t* rank, int32_t* size) {
  unisono_communicator* comm = NULL;
  CHECK(unisono_communicator_from_environment(NULL, &comm));
  CHECK(unisono_communicator_rank(comm, rank));
  CHECK(unisono_communicator_world_size(comm, size));
  return comm;
}

/* Memory for `count` elements of `bytes` each, all zero. */
static inline void* allocate(size_t count, size_t bytes) {
  void* memory = calloc(count > 0 ? count : 1, bytes);
  if (memory == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

#endif
