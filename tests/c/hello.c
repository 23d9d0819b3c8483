/* The ranks meet by a unique id, which goes through a file, and sum. Then by a URL. */
#include "check.h"

#include <unistd.h>

/* Passes the id from rank 0 to the others by a file in `folder`. */
static unisono_unique_id pass_id(const char* folder, int rank) {
  unisono_unique_id id;
  char path[4096], fresh[4200];
  snprintf(path, sizeof path, "%s/id", folder);
  snprintf(fresh, sizeof fresh, "%s.new", path);
  if (rank == 0) {
    OK(unisono_unique_id_create(NULL, &id));
    FILE* file = fopen(fresh, "wb");
    CHECK(file && fwrite(&id, sizeof id, 1, file) == 1 && fclose(file) == 0);
    CHECK(rename(fresh, path) == 0);
    return id;
  }
  FILE* file = NULL;
  while (!(file = fopen(path, "rb"))) usleep(1000);
  CHECK(fread(&id, sizeof id, 1, file) == 1);
  fclose(file);
  return id;
}

static void sum(unisono_communicator* comm, int rank, int world) {
  int32_t seen = -1;
  OK(unisono_communicator_rank(comm, &seen));
  CHECK(seen == rank);
  OK(unisono_communicator_world_size(comm, &seen));
  CHECK(seen == world);
  float data[1000];
  for (int round = 0; round < 10; round++) {
    for (int at = 0; at < 1000; at++) data[at] = (float)(rank + at);
    OK(unisono_all_reduce(comm, data, data, 1000, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
    for (int at = 0; at < 1000; at++)
      CHECK(data[at] == (float)(world * (world - 1) / 2 + world * at));
  }
}

int main(int count, char** arguments) {
  CHECK(count > 1);
  const int rank = check_rank = environment_number("RANK");
  const int world = environment_number("WORLD_SIZE");
  CHECK(unisono_version() == UNISONO_VERSION);
  CHECK(strstr(unisono_build_info(), "unisono"));
  CHECK(unisono_last_error_message()[0] == 0);

  unisono_communicator* comm = NULL;
  in("joining by a unique id");
  const unisono_unique_id id = pass_id(arguments[1], rank);
  OK(unisono_communicator_from_id(&id, rank, world, NULL, &comm));
  sum(comm, rank, world);
  OK(unisono_communicator_destroy(comm));

  in("joining by a file");
  char url[4096];
  snprintf(url, sizeof url, "file://%s/store", arguments[1]);
  OK(unisono_communicator_from_url(url, rank, world, NULL, &comm));
  sum(comm, rank, world);
  OK(unisono_communicator_destroy(comm));

  in("joining as the environment says");
  OK(unisono_communicator_from_environment(NULL, &comm));
  sum(comm, rank, world);
  /* Left open: closed at exit. */
  return 0;
}
