/*
 * The bound of an all_reduce, on shared buffers and on private ones: bound FOLDER WORLD
 *
 * WORLD processes share WORLD buffers of BYTES. Each does what its rank of an all_reduce in place
 * cannot avoid, and nothing else: no rank waits for another. A reduction must read every rank's
 * buffer, and every rank's buffer must be written, so each process reads and writes BYTES in all;
 * two orders of doing that are measured, each with ordinary and with streaming stores, and the
 * bound is the fastest:
 *
 * two_pass: sum the own slice of all buffers into the own buffer, then copy the other slices from
 * their owners.
 *
 * one_pass: sum the own slice of all buffers and store the sum to every buffer.
 *
 * Private buffers can be written by their own process alone, which must get what the others have
 * and they what it has made of that. Two orders, the bound is the faster:
 *
 * window: chunk by chunk, copy the buffer to shared memory, sum the own slice of what all have
 * there, and copy the slices that the others have summed up back.
 *
 * pull: read the own slice of the others' buffers with process_vm_readv, block by block, sum it up,
 * and read the other slices from their owners in the same way.
 *
 * From call to call the processes take turns at the ranks' parts, so that one that has a core for
 * itself for a while goes over all the memory, as a real all_reduce does between two visits to the
 * same place.
 *
 * `add` and `copy` are the loops alone on private memory, BYTES long: a[i] += b[i], and memcpy.
 * The commands are those of channel.h, without `check` and `idle`. Built for the machine it runs on
 * (-march=native).
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "channel.h"

enum {
  MOST_RANKS = 64,
  BLOCK = 256,       /* floats summed at once, which stay in the first cache */
  CHUNK = 16 << 10,  /* floats that go through windows at once, which stay in the second one */
  PULLED = 16 << 10, /* floats that are read from another process at once */
};

static int rank, world;

/* The state that all processes see. The buffers' memory is mapped before the fork. */
static struct shared {
  volatile int arrived;
  volatile int turn;
  double met; /* when the last one came */
  pid_t pids[MOST_RANKS];
}* shared;
static float* pool;
static size_t pool_bytes;
static float* windows; /* of every rank: a chunk of contributions, and one of results */

/* Lies at the same address in all processes, and belongs to this one alone. */
static float* private_buffer;
static size_t private_bytes;

static float* buffer_of(int owner, size_t bytes) {
  return pool + owner * ((bytes + 4095) / 4096 * 1024);
}

/*
 * Before a measurement: returns when all have come, with the time of that, from which all clocks
 * run. Otherwise a process that gets a core late would not count that it was late, since no other
 * process waits for it in what is measured.
 */
static double meet(void) {
  const int turn = shared->turn;
  if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == world) {
    shared->arrived = 0;
    shared->met = now();
    __atomic_store_n(&shared->turn, turn + 1, __ATOMIC_RELEASE);
  }
  while (__atomic_load_n(&shared->turn, __ATOMIC_ACQUIRE) == turn) {
    usleep(0);
  }
  return shared->met;
}

/* Stores `count` floats that lie in the cache; streaming: past the caches. */
static void store(float* to, const float* from, size_t count, int streaming) {
#if defined(__AVX__)
  if (streaming && (uintptr_t)to % 32 == 0) {
    size_t index = 0;
    for (; index + 8 <= count; index += 8) {
      _mm256_stream_ps(to + index, _mm256_loadu_ps(from + index));
    }
    to += index, from += index, count -= index;
  }
#else
  (void)streaming;
#endif
  memcpy(to, from, count * sizeof(float));
}

/* sum = the same block of all buffers, in rank order. */
static void sum_block(float* restrict sum, float* const* buffers, size_t first, size_t count) {
  memcpy(sum, buffers[0] + first, count * sizeof(float));
  int other = 1;
  for (; other + 2 < world; other += 3) {
    const float *a = buffers[other] + first, *b = buffers[other + 1] + first,
                *c = buffers[other + 2] + first;
    for (size_t index = 0; index < count; index++) {
      sum[index] = sum[index] + a[index] + b[index] + c[index];
    }
  }
  for (; other < world; other++) {
    const float* a = buffers[other] + first;
    for (size_t index = 0; index < count; index++) {
      sum[index] += a[index];
    }
  }
}

/* The part of rank `me`. */
static void all_reduce(size_t bytes, int me, int one_pass, int streaming) {
  float* buffers[MOST_RANKS];
  for (int owner = 0; owner < world; owner++) {
    buffers[owner] = buffer_of(owner, bytes);
  }
  const size_t count = bytes / sizeof(float), slice = (count / world + 15) / 16 * 16;
  const size_t first = slice * me < count ? slice * me : count;
  const size_t last = first + slice < count && me + 1 < world ? first + slice : count;
  float sum[BLOCK] __attribute__((aligned(64)));
  for (size_t at = first; at < last; at += BLOCK) {
    const size_t length = last - at < BLOCK ? last - at : BLOCK;
    sum_block(sum, buffers, at, length);
    for (int owner = 0; owner < world; owner++) {
      if (one_pass || owner == me) {
        store(buffers[owner] + at, sum, length, streaming);
      }
    }
  }
  for (int step = 1; !one_pass && step < world; step++) {
    const int owner = (me + step) % world;
    const size_t from = slice * owner < count ? slice * owner : count;
    const size_t to = from + slice < count && owner + 1 < world ? from + slice : count;
    if (streaming) {
      store(buffers[me] + from, buffers[owner] + from, to - from, 1);
    } else {
      memcpy(buffers[me] + from, buffers[owner] + from, (to - from) * sizeof(float));
    }
  }
}

/* The slice of `rank` of `count` floats. */
static void slice_of(int of, size_t count, size_t* first, size_t* last) {
  const size_t slice = (count / world + 15) / 16 * 16;
  *first = slice * of < count ? slice * of : count;
  *last = *first + slice < count && of + 1 < world ? *first + slice : count;
}

static void copy_floats(float* to, const float* from, size_t count) {
  memcpy(to, from, count * sizeof(float));
}

/* One chunk of `count` floats of the private buffer, from `own` on. */
static void through_windows(float* own, size_t count) {
  float* sources[MOST_RANKS];
  for (int owner = 0; owner < world; owner++) {
    sources[owner] = owner == rank ? own : windows + (size_t)owner * 2 * CHUNK;
  }
  float *put = windows + (size_t)rank * 2 * CHUNK, *results = put + CHUNK;
  size_t first, last;
  slice_of(rank, count, &first, &last);
  copy_floats(put, own, first);
  copy_floats(put + last, own + last, count - last);
  float sum[BLOCK] __attribute__((aligned(64)));
  for (size_t at = first; at < last; at += BLOCK) {
    const size_t length = last - at < BLOCK ? last - at : BLOCK;
    sum_block(sum, sources, at, length);
    copy_floats(results + at, sum, length);
    copy_floats(own + at, sum, length);
  }
  for (int step = 1; step < world; step++) {
    const int owner = (rank + step) % world;
    slice_of(owner, count, &first, &last);
    copy_floats(own + first, windows + (size_t)owner * 2 * CHUNK + CHUNK + first, last - first);
  }
}

/* Reads from the private buffer of another process. 0 where the system forbids it. */
static int pull(float* to, int owner, size_t at, size_t count) {
  struct iovec here = {to, count * sizeof(float)};
  struct iovec there = {private_buffer + at, count * sizeof(float)};
  return process_vm_readv(shared->pids[owner], &here, 1, &there, 1, 0) == (ssize_t)here.iov_len;
}

static int by_pulling(size_t count) {
  static float* pulled;
  if (!pulled && posix_memalign((void**)&pulled, 4096, sizeof(float) * PULLED * world)) {
    return 0;
  }
  size_t first, last;
  slice_of(rank, count, &first, &last);
  for (size_t at = first; at < last; at += PULLED) {
    const size_t length = last - at < PULLED ? last - at : PULLED;
    float* sources[MOST_RANKS];
    for (int owner = 0; owner < world; owner++) {
      sources[owner] = owner == rank ? private_buffer + at : pulled + (size_t)owner * PULLED;
      if (owner != rank && !pull(sources[owner], owner, at, length)) {
        return 0;
      }
    }
    float sum[BLOCK] __attribute__((aligned(64)));
    for (size_t in = 0; in < length; in += BLOCK) {
      const size_t some = length - in < BLOCK ? length - in : BLOCK;
      sum_block(sum, sources, in, some);
      copy_floats(private_buffer + at + in, sum, some);
    }
  }
  for (int step = 1; step < world; step++) {
    const int owner = (rank + step) % world;
    slice_of(owner, count, &first, &last);
    for (size_t at = first; at < last; at += PULLED) {
      const size_t length = last - at < PULLED ? last - at : PULLED;
      if (!pull(private_buffer + at, owner, at, length)) {
        return 0;
      }
    }
  }
  return 1;
}

/* On private buffers. */
static int all_reduce_apart(const char* name, size_t bytes) {
  const size_t count = bytes / sizeof(float);
  if (bytes > private_bytes) {
    return 0;
  }
  if (strcmp(name, "pull") == 0) {
    return by_pulling(count);
  }
  for (size_t at = 0; at < count; at += CHUNK) {
    through_windows(private_buffer + at, count - at < CHUNK ? count - at : CHUNK);
  }
  return 1;
}

static void add(float* restrict to, const float* restrict from, size_t bytes) {
  for (size_t index = 0; index < bytes / sizeof(float); index++) {
    to[index] += from[index];
  }
}

/* Private memory for `add` and `copy`: two buffers of `bytes`. */
static float* private_memory(size_t bytes) {
  static float* memory;
  static size_t size;
  if (size < 2 * bytes) {
    free(memory);
    size = 2 * bytes;
    if (posix_memalign((void**)&memory, 4096, size)) {
      perror("memory for the loops");
      exit(1);
    }
    memset(memory, 0, size);
  }
  return memory;
}

static int run(const char* name, size_t bytes, long turn) {
  const int streaming = strstr(name, "_streaming") != NULL;
  if (strncmp(name, "two_pass", 8) == 0 || strncmp(name, "one_pass", 8) == 0) {
    if (buffer_of(world, bytes) > pool + pool_bytes / sizeof(float)) {
      return 0;
    }
    all_reduce(bytes, (int)((rank + turn) % world), name[0] == 'o', streaming);
    return 1;
  }
  if (strcmp(name, "window") == 0 || strcmp(name, "pull") == 0) {
    return all_reduce_apart(name, bytes);
  }
  float* memory = private_memory(bytes);
  if (strcmp(name, "add") == 0) {
    add(memory, memory + bytes / sizeof(float), bytes);
  } else if (strcmp(name, "copy") == 0) {
    memcpy(memory, memory + bytes / sizeof(float), bytes);
  } else {
    return 0;
  }
  __asm__ volatile("" ::: "memory");
  return 1;
}

static void serve(const char* folder) {
  struct channel channel = channel_open(folder, rank);
  shared->pids[rank] = getpid();
  memset(private_buffer, 0, private_bytes);
  meet();
  channel_reply(&channel, "ok");
  struct command command;
  while (channel_next(&channel, &command)) {
    const size_t bytes = (size_t)command.number;
    if (strcmp(command.verb, "free") == 0 || strcmp(command.verb, "check") == 0) {
      channel_reply(&channel, "ok");
      continue;
    }
    if (!run(command.name, bytes, 0)) { /* once to warm up, and to see whether it can be done */
      channel_reply(&channel, "no %s of %zu bytes", command.name, bytes);
      continue;
    }
    const double start = meet();
    for (long done = 0; done < command.iterations; done++) {
      run(command.name, bytes, done);
    }
    channel_reply(&channel, "ok %.9f", now() - start);
  }
}

int main(int count, char** arguments) {
  world = count == 3 || count == 4 ? atoi(arguments[2]) : 0;
  if (world < 1 || world >= MOST_RANKS) {
    fprintf(stderr, "usage: bound FOLDER WORLD [BYTES]\n");
    return 2;
  }
  const size_t most = count == 4 ? (size_t)atoll(arguments[3]) : (size_t)64 << 20;
  pool_bytes = (size_t)world * ((most + 4095) / 4096 * 4096);
  const int mode = MAP_SHARED | MAP_ANONYMOUS;
  shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, mode, -1, 0);
  pool = mmap(NULL, pool_bytes, PROT_READ | PROT_WRITE, mode, -1, 0);
  const size_t windows_bytes = sizeof(float) * 2 * CHUNK * world;
  windows = mmap(NULL, windows_bytes, PROT_READ | PROT_WRITE, mode, -1, 0);
  private_bytes = (most + 4095) / 4096 * 4096;
  private_buffer =
      mmap(NULL, private_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED || pool == MAP_FAILED || windows == MAP_FAILED ||
      private_buffer == MAP_FAILED) {
    perror("shared memory");
    return 1;
  }
  madvise(pool, pool_bytes, MADV_HUGEPAGE);
  memset(pool, 0, pool_bytes);
  memset(windows, 0, windows_bytes);
  for (rank = 0; rank < world; rank++) {
    if (fork() == 0) {
      serve(arguments[1]);
      return 0;
    }
  }
  int failed = 0, status;
  while (wait(&status) > 0) {
    failed |= status != 0;
  }
  return failed;
}
