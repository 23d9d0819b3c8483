/*
 * A communicator from three callbacks: here over files in a folder, one for each key. And what
 * comes of callbacks that fail.
 */
#include <errno.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

struct folder {
  const char* path;
  int calls;
  int fail; /* every call, with UNISONO_SYSTEM */
};

static void path_of(const struct folder* folder, const char* key, char* path, size_t size) {
  int at = snprintf(path, size, "%s/key-", folder->path);
  for (; *key && at + 4 < (int)size; key++)
    at += snprintf(path + at, size - (size_t)at, "%02x", *key);
}

static unisono_status set(void* context, const char* key, const void* value, size_t length) {
  struct folder* folder = context;
  char path[4096], fresh[4200];
  folder->calls++;
  if (folder->fail) return UNISONO_SYSTEM;
  path_of(folder, key, path, sizeof path);
  snprintf(fresh, sizeof fresh, "%s.%d", path, (int)getpid());
  FILE* file = fopen(fresh, "wb");
  if (!file) return UNISONO_SYSTEM;
  const int written = fwrite(value, 1, length, file) == length;
  return fclose(file) == 0 && written && rename(fresh, path) == 0 ? UNISONO_OK : UNISONO_SYSTEM;
}

static unisono_status get(void* context, const char* key, void* value, size_t capacity,
                          size_t* length) {
  struct folder* folder = context;
  char path[4096];
  folder->calls++;
  if (folder->fail) return UNISONO_SYSTEM;
  path_of(folder, key, path, sizeof path);
  FILE* file = fopen(path, "rb");
  if (!file) {
    *length = UNISONO_NOT_SET;
    return errno == ENOENT ? UNISONO_OK : UNISONO_SYSTEM;
  }
  fseek(file, 0, SEEK_END);
  *length = (size_t)ftell(file);
  rewind(file);
  const int complete = *length > capacity || fread(value, 1, *length, file) == *length;
  fclose(file);
  return complete ? UNISONO_OK : UNISONO_SYSTEM;
}

static unisono_status wait(void* context, const char* key, double seconds, void* value,
                           size_t capacity, size_t* length) {
  const struct timespec pause = {0, 2000000};
  for (double waited = 0; waited <= seconds; waited += 0.002) {
    const unisono_status status = get(context, key, value, capacity, length);
    if (status != UNISONO_OK || *length != UNISONO_NOT_SET) return status;
    nanosleep(&pause, NULL);
  }
  return UNISONO_TIMEOUT;
}

static unisono_status lie(void* context, const char* key, double seconds, void* value,
                          size_t capacity, size_t* length) {
  (void)context, (void)key, (void)seconds, (void)value, (void)capacity;
  *length = SIZE_MAX / 2;
  return UNISONO_OK;
}

int main(int count, char** arguments) {
  CHECK(count > 1);
  const int rank = check_rank = environment_number("RANK");
  const int world = environment_number("WORLD_SIZE");
  struct folder folder = {arguments[1], 0, 0};
  unisono_store store = UNISONO_STORE_INIT;
  store.context = &folder;
  store.set = set;
  store.get = get;
  store.wait = wait;
  unisono_communicator* comm = NULL;

  in("joining through callbacks");
  OK(unisono_communicator_from_store(&store, rank, world, NULL, &comm));
  const int calls = folder.calls;
  CHECK(world == 1 || calls > 1);
  int32_t sum = rank + 1;
  OK(unisono_all_reduce(comm, &sum, &sum, 1, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
  CHECK(sum == world * (world + 1) / 2);
  OK(unisono_communicator_destroy(comm));
  CHECK(folder.calls == calls);
  if (world == 1) return 0;

  in("callbacks that fail");
  comm = NULL;
  folder.fail = 1;
  FAILS(unisono_communicator_from_store(&store, rank, world, NULL, &comm), UNISONO_SYSTEM, "store");
  folder.fail = 0;
  store.wait = lie;
  char other[4096];
  snprintf(other, sizeof other, "%s/empty", arguments[1]);
  folder.path = other; /* which is not there */
  FAILS(unisono_communicator_from_store(&store, rank, world, NULL, &comm), UNISONO_SYSTEM, "store");
  CHECK(comm == NULL);
  return 0;
}
