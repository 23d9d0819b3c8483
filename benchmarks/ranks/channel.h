/*
 * How a measuring program hears from the driver: one pair of FIFOs for each rank, so that a rank
 * without a command sleeps in read() and leaves its core to the peer that is being measured.
 *
 * check COLLECTIVE BYTES: "ok", or "wrong REASON", or "no REASON" where there is no such
 * collective.
 *
 * time COLLECTIVE BYTES ITERATIONS: "ok SECONDS", on this rank, for all iterations after a barrier.
 *
 * idle SECONDS: "ok CPU_SECONDS", spent in waiting for a last rank that is late by SECONDS.
 *
 * free: "ok", and the buffers are gone. At the end of file the program ends.
 */
#ifndef CHANNEL_H
#define CHANNEL_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

struct channel {
  FILE* commands;
  FILE* replies;
};

struct command {
  char verb[16];
  char name[32];
  double number;
  long iterations;
};

static inline struct channel channel_open(const char* folder, int rank) {
  struct channel channel;
  char path[4096];
  snprintf(path, sizeof path, "%s/replies-%d", folder, rank);
  channel.replies = fopen(path, "w");
  snprintf(path, sizeof path, "%s/commands-%d", folder, rank);
  channel.commands = fopen(path, "r");
  if (!channel.replies || !channel.commands) {
    perror(path);
    exit(1);
  }
  return channel;
}

/* Answers one command with one line. */
static inline void channel_reply(struct channel* channel, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(channel->replies, format, arguments);
  va_end(arguments);
  fputc('\n', channel->replies);
  fflush(channel->replies);
}

/* Reads the next command; 0 at the end. `number` is BYTES or SECONDS. */
static inline int channel_next(struct channel* channel, struct command* command) {
  char line[256];
  if (!fgets(line, sizeof line, channel->commands)) {
    return 0;
  }
  memset(command, 0, sizeof *command);
  if (strncmp(line, "idle", 4) == 0) {
    return sscanf(line, "%15s %lf", command->verb, &command->number) == 2;
  }
  return sscanf(line, "%15s %31s %lf %ld", command->verb, command->name, &command->number,
                &command->iterations) >= 1;
}

static inline double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static inline double cpu_seconds(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

#endif
