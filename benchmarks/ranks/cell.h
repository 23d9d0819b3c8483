/*
 * Shared by the measuring programs in C: one collective at one size with its buffers, its expected
 * result, and the driver's commands. The program says how its runtime carries it out:
 *
 *   call          the collective in `cell`, once
 *   meet          a barrier
 *   whisper, hear send a byte to a rank, and receive one from it
 *   take, give    memory for a buffer, aligned to 64 bytes, and back
 */
#ifndef CELL_H
#define CELL_H

#include <stdint.h>
#include <unistd.h>

#include "channel.h"

enum kind {
  ALL_REDUCE,
  REDUCE,
  BROADCAST,
  ALL_GATHER,
  REDUCE_SCATTER,
  GATHER,
  SCATTER,
  ALL_TO_ALL,
  BARRIER,
  PING_PONG,
  SEND_RECV,
  KINDS
};

static const char* const NAMES[KINDS] = {"all_reduce",     "reduce",    "broadcast", "all_gather",
                                         "reduce_scatter", "gather",    "scatter",   "all_to_all",
                                         "barrier",        "ping_pong", "send_recv"};

/* One collective at one size, with its buffers. */
static struct {
  enum kind kind;
  size_t bytes;
  size_t element; /* bytes of one: 4 is a float, 1 a uint8 */
  size_t shard;   /* elements of one rank's block */
  size_t count;   /* elements of the whole */
  int root;
  char *input, *output;
} cell = {.kind = KINDS};

static int rank, world, out_of_place;

static void call(void);
static void meet(void);
static void whisper(int to, char* byte);
static void hear(int from, char* byte);
static void* take(size_t bytes);
static void give(void* memory);

static void* buffer(size_t bytes) {
  void* memory = take(bytes ? bytes : 64);
  memset(memory, 0, bytes); /* so that every page is there */
  return memory;
}

static void free_cell(void) {
  if (cell.kind != KINDS) {
    give(cell.input);
    give(cell.output);
  }
  cell.input = cell.output = NULL;
  cell.kind = KINDS;
}

static int in_blocks(enum kind kind) {
  return kind == ALL_GATHER || kind == REDUCE_SCATTER || kind == GATHER || kind == SCATTER ||
         kind == ALL_TO_ALL;
}

/* Makes the buffers, unless they are there. */
static void prepare(enum kind kind, size_t bytes) {
  if (cell.kind == kind && cell.bytes == bytes) {
    return;
  }
  free_cell();
  cell.kind = kind;
  cell.bytes = bytes;
  cell.element = bytes % 4 ? 1 : 4;
  size_t elements = bytes / cell.element;
  cell.shard = elements / world ? elements / world : 1;
  cell.count = in_blocks(kind) ? cell.shard * world : elements;
  cell.root = 0;
  size_t whole = cell.count * cell.element, block = cell.shard * cell.element;
  cell.input = buffer(kind == ALL_GATHER || kind == GATHER ? block : whole);
  cell.output = buffer(kind == REDUCE_SCATTER || kind == SCATTER ? block : whole);
}

enum { PERIOD = 7, ALL_ROOTS_UP_TO = 1 << 20 };

/* Element `index` of rank `of`'s contribution in a check: small, so that sums are exact. */
static int value(int of, size_t index) {
  return (int)((3 * (size_t)of + index) % PERIOD) + 1;
}

/* The sums of all contributions, which repeat. */
static int sums[PERIOD];

static int sum(size_t index) {
  return sums[index % PERIOD];
}

static void put(char* to, size_t index, int number) {
  if (cell.element == 4) {
    ((float*)to)[index] = (float)number;
  } else {
    ((uint8_t*)to)[index] = (uint8_t)number;
  }
}

static int get(const char* from, size_t index) {
  return cell.element == 4 ? (int)((const float*)from)[index] : ((const uint8_t*)from)[index];
}

/* The expected element `index` of this rank's output; -1 where the call leaves nothing. */
static int expected(size_t index, int root) {
  const size_t shard = cell.shard, own = shard * rank;
  switch (cell.kind) {
    case ALL_REDUCE:
      return sum(index);
    case REDUCE:
      return rank == root ? sum(index) : -1;
    case BROADCAST:
      return value(root, index);
    case ALL_GATHER:
      return value((int)(index / shard), index % shard);
    case REDUCE_SCATTER:
      return sum(own + index);
    case GATHER:
      return rank == root ? value((int)(index / shard), index % shard) : -1;
    case SCATTER:
      return value(root, own + index);
    case ALL_TO_ALL:
      return value((int)(index / shard), own + index % shard);
    case PING_PONG:
      return (rank ^ 1) < world ? value(rank ^ 1, index) : -1;
    case SEND_RECV:
      return value((rank + world - 1) % world, index);
    default:
      return -1;
  }
}

/*
 * Runs the collective on known data, once for each root unless it is large. Returns how many
 * elements are wrong.
 */
static long check(void) {
  for (int index = 0; index < PERIOD; index++) {
    sums[index] = 0;
    for (int of = 0; of < world; of++) {
      sums[index] += value(of, index);
    }
  }
  const size_t inputs = cell.kind == ALL_GATHER || cell.kind == GATHER ? cell.shard : cell.count;
  const size_t outputs =
      cell.kind == REDUCE_SCATTER || cell.kind == SCATTER ? cell.shard : cell.count;
  const int in_place =
      cell.kind == BROADCAST || cell.kind == REDUCE || (cell.kind == ALL_REDUCE && !out_of_place);
  long wrong = 0;
  const int rounds = cell.bytes <= ALL_ROOTS_UP_TO ? world : 1;
  for (int round = 0; round < rounds; round++) {
    for (size_t index = 0; index < inputs; index++) {
      put(cell.input, index, value(rank, index));
    }
    for (size_t index = 0; index < outputs; index++) {
      put(cell.output, index, in_place ? value(rank, index) : 0);
    }
    const int root = cell.root;
    call();
    for (size_t index = 0; index < outputs; index++) {
      const int must = expected(index, root);
      wrong += must >= 0 && get(cell.output, index) != must;
    }
  }
  /* Sums in place would grow without end. */
  memset(cell.input, 0, inputs * cell.element);
  memset(cell.output, 0, outputs * cell.element);
  return wrong;
}

static double time_calls(long iterations) {
  meet();
  const double start = now();
  for (long done = 0; done < iterations; done++) {
    call();
  }
  const double seconds = now() - start;
  return cell.kind == PING_PONG ? seconds / 2 : seconds;
}

/* All ranks wait for a message from the last one, which sends it `seconds` later. */
static double idle(double seconds) {
  char byte = 0;
  meet();
  const double before = cpu_seconds();
  if (rank == world - 1) {
    struct timespec time = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    nanosleep(&time, NULL);
    for (int to = 0; to < rank; to++) {
      whisper(to, &byte);
    }
  } else {
    hear(world - 1, &byte);
  }
  return cpu_seconds() - before;
}

static enum kind kind_of(const char* name) {
  int kind = 0;
  while (kind < KINDS && strcmp(name, NAMES[kind]) != 0) {
    kind++;
  }
  return (enum kind)kind;
}

/* Answers the driver's commands until there are no more. */
static void serve(const char* folder) {
  struct channel channel = channel_open(folder, rank);
  channel_reply(&channel, "ok");
  struct command command;
  while (channel_next(&channel, &command)) {
    const enum kind kind = kind_of(command.name);
    if (strcmp(command.verb, "idle") == 0) {
      channel_reply(&channel, "ok %.9f", idle(command.number));
    } else if (strcmp(command.verb, "free") == 0) {
      free_cell();
      channel_reply(&channel, "ok");
    } else if (kind == KINDS) {
      channel_reply(&channel, "no there is no %s here", command.name);
    } else if (strcmp(command.verb, "check") == 0) {
      prepare(kind, (size_t)command.number);
      const long wrong = check();
      channel_reply(&channel, wrong ? "wrong %ld elements" : "ok", wrong);
    } else {
      prepare(kind, (size_t)command.number);
      channel_reply(&channel, "ok %.9f", time_calls(command.iterations));
    }
  }
  free_cell();
}

#endif
