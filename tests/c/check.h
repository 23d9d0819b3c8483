/*
 * Shared by the C tests. A test program is one rank: its environment says which (RANK, WORLD_SIZE),
 * and the folder of a store in a file is its first argument. It prints the step it is in to
 * standard error, so that a test that hangs shows where, and ends with 1 at the first error.
 */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unisono.h>

static int check_rank = -1;

/* The program's rank and world, as the test's harness says. */
static inline int environment_number(const char* name) {
  const char* text = getenv(name);
  return text ? atoi(text) : -1;
}

/* Prints the step that the rank is in now. */
static inline void in(const char* what) {
  fprintf(stderr, "rank %d: %s\n", check_rank, what);
}

#define FAIL(...)                                                        \
  do {                                                                   \
    fprintf(stderr, "rank %d: %s:%d: ", check_rank, __FILE__, __LINE__); \
    fprintf(stderr, __VA_ARGS__);                                        \
    fprintf(stderr, "\n");                                               \
    exit(1);                                                             \
  } while (0)

#define CHECK(condition)                                \
  do {                                                  \
    if (!(condition)) FAIL("%s is not so", #condition); \
  } while (0)

/* The call succeeds. */
#define OK(call)                                                                             \
  do {                                                                                       \
    const unisono_status status_ = (call);                                                   \
    if (status_ != UNISONO_OK)                                                               \
      FAIL("%s: %s: %s", #call, unisono_status_name(status_), unisono_last_error_message()); \
  } while (0)

/* The call fails with this status, and the last error says so in a sentence that holds `words`. */
#define FAILS(call, expected, words)                                                   \
  do {                                                                                 \
    const unisono_status status_ = (call);                                             \
    if (status_ != (expected))                                                         \
      FAIL("%s: %s instead of %s: %s", #call, unisono_status_name(status_), #expected, \
           unisono_last_error_message());                                              \
    check_error(#call, status_, words);                                                \
  } while (0)

static inline void check_error(const char* call, unisono_status status, const char* words) {
  unisono_error error = UNISONO_ERROR_INIT;
  if (unisono_last_error(&error) != UNISONO_OK || error.status != status)
    FAIL("%s: the last error is %s", call, unisono_status_name(error.status));
  if (strcmp(error.message, unisono_last_error_message()) != 0 || strlen(error.message) < 10)
    FAIL("%s: no sentence: %s", call, error.message);
  if (!strstr(error.message, words))
    FAIL("%s: \"%s\" is not in \"%s\"", call, words, error.message);
}

#endif
