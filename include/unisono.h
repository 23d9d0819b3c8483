/*
 * unisono: collective communication between processes, for programs in C and whatever can call C.
 *
 *   unisono_communicator *comm;
 *   if (unisono_communicator_from_environment(NULL, &comm) != UNISONO_OK)
 *     return fprintf(stderr, "%s\n", unisono_last_error_message()), 1;
 *   unisono_all_reduce(comm, x, x, 1024, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL);
 *   unisono_communicator_destroy(comm);
 *
 * Link with `-lunisono`; `pkg-config --cflags --libs unisono` says how. Start the ranks with
 * `unisono launch -n 4 ./program`, torchrun, mpirun or srun.
 *
 * STATUS. Every function that can fail returns a unisono_status. Outputs come last and are written
 * only on success, except where a function says otherwise. What went wrong is given in words by
 * unisono_last_error_message, for the last call that failed on the same thread. A wrong argument is
 * refused before anything is sent, and the communicator lives on; any other failure of an operation
 * ends its communicator on all ranks: from then on each call on it fails with the first cause.
 *
 * ORDER. The ranks of a communicator call its collectives in the same order with matching
 * arguments; a difference is found and fails on both sides. Sends and receives are matched by rank
 * and tag, apart from the collectives. Communicators are independent of each other.
 *
 * THREADS. Every function may be called on any thread at any time, also on one communicator by
 * several threads at once, as long as its collectives begin in the same order on every rank. The
 * last error and an open unisono_group_start belong to the thread. Not in a signal handler.
 *
 * OWNERSHIP. A handle (communicator, work, config) is made by the library, passed by address, never
 * looked into, and given back by its destroy function, which takes NULL, too. A handle that was
 * given back is recognised and refused. Strings that the library returns are its own; they live for
 * ever, unless the function says for how long. The library copies strings and arrays it is given
 * before it returns; of buffers it keeps the address until the operation has ended.
 *
 * BUFFERS. Contiguous memory of `count` elements, aligned to its element. While an operation is
 * under way, do not write to its buffers, nor read those it writes. Input and output do not
 * overlap, except that output == input means "in place" where the function allows it. A buffer of
 * no elements may be NULL. Any memory will do; from unisono_mem_alloc it is read by the other
 * processes of the host where it lies, which is fastest.
 *
 * BLOCKING. With `work` NULL an operation has ended when the call returns. Else the call starts it
 * and returns a handle to wait on; the operation goes on by itself, also if no thread waits.
 *
 * STREAMS. Buffers may be memory of a CUDA device, if the options name a stream of that device, as
 * the last argument of NCCL's calls does. The operation then comes after what is in the stream, and
 * what is put there later comes after it. The call does not wait: it returns when the operation is
 * in the stream, also with `work` NULL, and the buffers are in use until the stream has got past
 * it, which is when a `work` has ended. What goes wrong later is reported by the work, by
 * unisono_communicator_status, and by the next call; the stream goes on then, and what is in the
 * outputs is not specified. In a collective either all ranks give memory of a device, each of its
 * own, or none does. Operations of one communicator in several streams keep their order. A stream
 * may be under capture for a CUDA graph, where all ranks are on one host and their devices can
 * share memory: give NULL for `work`, and launch the graphs on all ranks equally often.
 *
 * PROCESSES. A child made by fork() of a process that has had communicators can use none, neither
 * its parent's nor new ones: the calls fail with UNISONO_ABORTED. Memory of unisono_mem_alloc they
 * share. At exit() what is left open is closed in good order.
 *
 * STRUCTS that may grow begin with their size: fill them by their _INIT macro, and a program that
 * was compiled for an older version goes on to work with a newer library. Numbers of enumerations
 * are never reused.
 */
#ifndef UNISONO_H
#define UNISONO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version ---- */

#define UNISONO_VERSION_MAJOR 0
#define UNISONO_VERSION_MINOR 1
#define UNISONO_VERSION_PATCH 0
/* As a number that can be compared: 1.2.3 is 10203. */
#define UNISONO_VERSION \
  (UNISONO_VERSION_MAJOR * 10000 + UNISONO_VERSION_MINOR * 100 + UNISONO_VERSION_PATCH)

/* The version of the library that is loaded, as UNISONO_VERSION is that of this header. */
int32_t unisono_version(void);

/* The version and how it was built, in one line: "unisono 0.1.0, x86_64-linux, release, ...". */
const char* unisono_build_info(void);

/* ---- Errors ---- */

typedef enum unisono_status {
  UNISONO_OK = 0,
  UNISONO_INVALID_ARGUMENT = 1, /* an argument is wrong; nothing was sent */
  UNISONO_UNSUPPORTED = 2,      /* it has no meaning or no implementation; nothing was sent */
  UNISONO_TIMEOUT = 3,          /* something did not happen within its time */
  UNISONO_PEER_LOST = 4,        /* another rank ended, left, or cannot be reached */
  UNISONO_MISMATCH = 5,         /* two ranks called different things */
  UNISONO_ABORTED = 6,          /* the communicator was aborted, closed meanwhile, or a parent's */
  UNISONO_SYSTEM = 7,           /* the operating system or the network refused something */
  UNISONO_UNTRUSTED = 8,        /* a process that is no member of the job tried to take part */
  UNISONO_INTERNAL = 9          /* a defect in unisono; please report it */
} unisono_status;

/* What went wrong. */
typedef struct unisono_error {
  size_t size;           /* sizeof(unisono_error) */
  unisono_status status; /* UNISONO_OK: no call has failed on this thread yet */
  int32_t fatal;         /* 1: the communicator of the call is dead; 0: it lives */
  int32_t peer;          /* the rank that caused it, if another one did, else -1 */
  int32_t reserved;      /* 0 */
  const char* message;   /* a sentence; "" if there was no error */
  const char* operation; /* the operation that failed, such as "all_reduce #17", or NULL */
} unisono_error;

#define UNISONO_ERROR_INIT {sizeof(unisono_error), UNISONO_OK, 0, -1, 0, "", NULL}

/* The last failure on this thread, in `error`, whose size says how much of it there is. Its strings
 * live until the next failure on this thread. A call that succeeds leaves it as it is. */
unisono_status unisono_last_error(unisono_error* error);

/* The message alone; "" if no call has failed on this thread. Lives as unisono_last_error's. */
const char* unisono_last_error_message(void);

/* "UNISONO_PEER_LOST" for UNISONO_PEER_LOST; "unknown status" for what is none. */
const char* unisono_status_name(unisono_status status);

/* ---- Settings ---- */

/* The settings a communicator is made with. docs/settings.md lists them; so does the table below.
 */
typedef struct unisono_config unisono_config;

/* The settings of the environment (UNISONO_TIMEOUT and so on), else the defaults. Fails with
 * UNISONO_INVALID_ARGUMENT for a variable UNISONO_* that is no setting or has a wrong value. */
unisono_status unisono_config_create(unisono_config** config);

/* Sets one by its name, such as ("timeout", "30") or ("transport", "tcp"). Fails for a name that is
 * no setting, with the nearest one that is, and for a value that it does not take. */
unisono_status unisono_config_set(unisono_config* config, const char* name, const char* value);

/* The value of the setting `name` as text, which lives until the next call on this config. */
unisono_status unisono_config_value(unisono_config* config, const char* name, const char** value);

unisono_status unisono_config_destroy(unisono_config* config);

/* One row of the table of settings. */
typedef struct unisono_setting {
  size_t size;             /* sizeof(unisono_setting) */
  const char* name;        /* "timeout" */
  const char* variable;    /* "UNISONO_TIMEOUT" */
  const char* accepts;     /* what values it takes, in words */
  const char* initial;     /* the default, as it would be written */
  const char* consequence; /* what follows from it, in a sentence */
  int32_t must_agree;      /* 1: must be the same on every rank */
  int32_t reserved;        /* 0 */
} unisono_setting;

#define UNISONO_SETTING_INIT {sizeof(unisono_setting), NULL, NULL, NULL, NULL, NULL, 0, 0}

size_t unisono_setting_count(void);

/* Row `index` of the table, in `setting`, whose size says how much of it there is. */
unisono_status unisono_setting_at(size_t index, unisono_setting* setting);

/* ---- Log ---- */

typedef enum unisono_log_level {
  UNISONO_LOG_OFF = 0,
  UNISONO_LOG_ERROR = 1, /* a service of this process that can no longer do its part */
  UNISONO_LOG_WARN = 2,  /* and what a user would want to know: no shared memory, a stranger */
  UNISONO_LOG_INFO = 3,  /* and choices: the interface, the store */
  UNISONO_LOG_DEBUG = 4  /* and every link */
} unisono_log_level;

/* Called with one line, without an end of line. On any thread, perhaps on several at once, and
 * perhaps while the library holds locks: it must not call the library, nor throw. */
typedef void (*unisono_log_function)(void* context, unisono_log_level level, const char* message);

/* Has `function` told what unisono chose and met with, up to `level`, from now on and for the whole
 * process. NULL: standard error, which is what happens without this call, at the level that the
 * setting "log" says. When it returns the function it replaced is not called any more. */
unisono_status unisono_log_set(unisono_log_function function, void* context,
                               unisono_log_level level);

/* ---- Communicators ---- */

/* A group of ranks, numbered from 0, that communicate. */
typedef struct unisono_communicator unisono_communicator;

/* An operation under way. */
typedef struct unisono_work unisono_work;

/* No limit, where a time in seconds is asked for. */
#define UNISONO_FOREVER (-1.0)

/* The functions that make a communicator block until all its ranks have come, or for as long as the
 * setting "join_timeout" says, and then name those that did not. `config` may be NULL for the
 * settings of the environment; it is copied. Every rank needs the same value of the settings that
 * must agree. They fail with UNISONO_INVALID_ARGUMENT, UNISONO_TIMEOUT, UNISONO_MISMATCH (two ranks
 * with one number, another world size, other settings), UNISONO_UNTRUSTED or UNISONO_SYSTEM. */

/* From what the launcher left in the environment: unisono launch and torchrun (RANK, WORLD_SIZE,
 * MASTER_ADDR, MASTER_PORT), Open MPI, MPICH, Slurm, Kubernetes. */
unisono_status unisono_communicator_from_environment(const unisono_config* config,
                                                     unisono_communicator** comm);

/* From a URL that is the same on all ranks: tcp://host:port, an address of rank 0, which serves
 * there; or file:///path, a file that all ranks can reach and that is new for every job. */
unisono_status unisono_communicator_from_url(const char* url, int32_t rank, int32_t world_size,
                                             const unisono_config* config,
                                             unisono_communicator** comm);

/* Where and as whose members the ranks of one communicator meet. A value: copy it as bytes. */
typedef struct unisono_unique_id {
  uint8_t bytes[128];
} unisono_unique_id;

/* Makes an id in one process, normally that of rank 0, which passes it to the others by whatever
 * means there are (MPI_Bcast, a socket, a file). The others meet at this process, so it must live
 * until all have joined. An id serves for one communicator; it holds a secret, so who sees it can
 * join. `config` may be NULL; its setting "interface" says by which address others reach us. */
unisono_status unisono_unique_id_create(const unisono_config* config, unisono_unique_id* id);

unisono_status unisono_communicator_from_id(const unisono_unique_id* id, int32_t rank,
                                            int32_t world_size, const unisono_config* config,
                                            unisono_communicator** comm);

/* Said by `get` of a store in `length`: the key is not set. */
#define UNISONO_NOT_SET SIZE_MAX

/* A key-value store that all ranks reach, given by three functions. Keys are text of at most 4 KiB,
 * set once and never deleted, values bytes of at most 1 MiB. The functions are called by the thread
 * that joins, while it joins, and get `context`. They return UNISONO_OK or why they failed. They
 * must not throw, and must not call the library. A job that uses one store several times puts a
 * prefix of its own before the keys of each. */
typedef struct unisono_store {
  size_t size;   /* sizeof(unisono_store) */
  void* context; /* whatever the functions need */
  /* Sets `key` to `length` bytes. */
  unisono_status (*set)(void* context, const char* key, const void* value, size_t length);
  /* Writes the value of `key`, if it is set now, to `value`, and its length to `length`; with more
   * than `capacity` bytes the length alone, and is called again with more room. If it is not set,
   * writes UNISONO_NOT_SET to `length` and returns UNISONO_OK. */
  unisono_status (*get)(void* context, const char* key, void* value, size_t capacity,
                        size_t* length);
  /* As get, but waits until the key is set; UNISONO_TIMEOUT if it is not after `seconds`. */
  unisono_status (*wait)(void* context, const char* key, double seconds, void* value,
                         size_t capacity, size_t* length);
} unisono_store;

#define UNISONO_STORE_INIT {sizeof(unisono_store), NULL, NULL, NULL, NULL}

unisono_status unisono_communicator_from_store(const unisono_store* store, int32_t rank,
                                               int32_t world_size, const unisono_config* config,
                                               unisono_communicator** comm);

/* The color of a rank that is to be in no part. */
#define UNISONO_NO_COLOR INT64_MIN

/* Divides the group: ranks that give the same `color` form a new one, numbered by `key` and then by
 * rank. A collective: every rank calls it. `part` becomes NULL for UNISONO_NO_COLOR. `comm` lives
 * on beside its parts, which have its settings. */
unisono_status unisono_communicator_split(unisono_communicator* comm, int64_t color, int64_t key,
                                          unisono_communicator** part);

unisono_status unisono_communicator_rank(const unisono_communicator* comm, int32_t* rank);
unisono_status unisono_communicator_world_size(const unisono_communicator* comm,
                                               int32_t* world_size);

/* How many seconds an operation may take from now on, unless its options say otherwise: after that
 * it fails and names the rank it waited for. More than 0, or UNISONO_FOREVER. */
unisono_status unisono_communicator_set_timeout(unisono_communicator* comm, double seconds);

/* UNISONO_OK while the communicator lives, else the first cause of its end. Does not block. */
unisono_status unisono_communicator_status(const unisono_communicator* comm);

/* Ends every operation on every rank with UNISONO_ABORTED and `reason`, which may be NULL. */
unisono_status unisono_communicator_abort(unisono_communicator* comm, const char* reason);

/* What this rank was last in, a line for each operation, oldest first, for reports: at most
 * `capacity` bytes with the terminating 0 into `text`; `length` becomes what it needs, without. */
unisono_status unisono_communicator_report(const unisono_communicator* comm, char* text,
                                           size_t capacity, size_t* length);

/* Leaves the group in good order and gives the handle back. Waits for operations in streams; what
 * else is under way here fails with UNISONO_ABORTED, also in other threads. What has been sent
 * stays readable for the others. Ranks need not wait for each other first. */
unisono_status unisono_communicator_destroy(unisono_communicator* comm);

/* ---- Operations ---- */

typedef enum unisono_dtype {
  UNISONO_FLOAT16 = 1,       /* IEEE 754 binary16 */
  UNISONO_BFLOAT16 = 2,      /* the upper half of a binary32 */
  UNISONO_FLOAT32 = 3,       /* float */
  UNISONO_FLOAT64 = 4,       /* double */
  UNISONO_FLOAT8_E4M3FN = 5, /* OCP 8-bit, 4 bits of exponent, no infinities */
  UNISONO_FLOAT8_E5M2 = 6,   /* OCP 8-bit, 5 bits of exponent */
  UNISONO_INT8 = 7,
  UNISONO_INT16 = 8,
  UNISONO_INT32 = 9,
  UNISONO_INT64 = 10,
  UNISONO_UINT8 = 11,
  UNISONO_UINT16 = 12,
  UNISONO_UINT32 = 13,
  UNISONO_UINT64 = 14,
  UNISONO_BOOL = 15,      /* one byte, 0 or 1 */
  UNISONO_COMPLEX64 = 16, /* two floats: real, imaginary */
  UNISONO_COMPLEX128 = 17 /* two doubles */
} unisono_dtype;

/* How contributions are combined, element by element, with the same bits on every rank. The 16 and
 * 8 bit floats are accumulated in float32 and rounded once. What has no meaning for a type (order
 * of complex numbers, bits of floats) is UNISONO_UNSUPPORTED. */
typedef enum unisono_op {
  UNISONO_SUM = 1,
  UNISONO_AVG = 2, /* the sum divided by the number of ranks; integers round toward zero */
  UNISONO_PROD = 3,
  UNISONO_MIN = 4, /* NaN wins */
  UNISONO_MAX = 5, /* NaN wins */
  UNISONO_BAND = 6,
  UNISONO_BOR = 7,
  UNISONO_BXOR = 8,
  UNISONO_LAND = 9, /* 1 where every contribution is not zero, else 0 */
  UNISONO_LOR = 10,
  UNISONO_LXOR = 11,
  UNISONO_PREMUL_SUM = 12 /* the sum of each contribution times `factor` of its rank's options */
} unisono_op;

/* CUDA's legacy default stream, as cudaStreamLegacy; its cudaStreamPerThread serves as well. */
#define UNISONO_DEFAULT_STREAM ((void*)1)

/* What an operation takes besides; NULL for none of it. The same struct may serve many calls. */
typedef struct unisono_options {
  size_t size; /* sizeof(unisono_options) */
  /* NULL: all buffers are memory of the host. Else they are memory of a CUDA device, and this is
   * the stream (cudaStream_t, CUstream) in whose order the operation happens; see STREAMS above.
   * The default stream, which CUDA also writes as NULL, must be named: UNISONO_DEFAULT_STREAM.
   * Fails with UNISONO_INVALID_ARGUMENT if a buffer lies elsewhere than the options say, as far as
   * that can be told, and with UNISONO_UNSUPPORTED without CUDA's driver, which is looked for when
   * first needed. */
  void* stream;
  double timeout; /* seconds it may take; 0: the communicator's; or UNISONO_FOREVER */
  double factor;  /* of UNISONO_PREMUL_SUM, and only there */
} unisono_options;

#define UNISONO_OPTIONS_INIT {sizeof(unisono_options), NULL, 0.0, 1.0}

/* Of all operations: `count` and `counts` are elements of `dtype`, not bytes. `counts` are one
 * number for each rank. They fail with UNISONO_INVALID_ARGUMENT and UNISONO_UNSUPPORTED before
 * anything is sent; else with what ended the operation, after which what is in an output is not
 * specified. With a `work` an operation's failure is returned by the wait for it. */

/* Every rank's `output` becomes the reduction of all inputs. In place: output == input. */
unisono_status unisono_all_reduce(unisono_communicator* comm, const void* input, void* output,
                                  size_t count, unisono_dtype dtype, unisono_op op,
                                  const unisono_options* options, unisono_work** work);

/* The root's `output` becomes the reduction of all inputs. On the root in place: output == input.
 * The others' `output` is ignored and may be NULL. */
unisono_status unisono_reduce(unisono_communicator* comm, const void* input, void* output,
                              size_t count, unisono_dtype dtype, unisono_op op, int32_t root,
                              const unisono_options* options, unisono_work** work);

/* Every rank's `buffer` becomes the root's. */
unisono_status unisono_broadcast(unisono_communicator* comm, void* buffer, size_t count,
                                 unisono_dtype dtype, int32_t root, const unisono_options* options,
                                 unisono_work** work);

/* Every rank's `output`, of world_size * count elements, becomes the inputs, of `count`, by rank.
 * In place: `input` is this rank's block of `output`. */
unisono_status unisono_all_gather(unisono_communicator* comm, const void* input, void* output,
                                  size_t count, unisono_dtype dtype, const unisono_options* options,
                                  unisono_work** work);

/* As unisono_all_gather, with counts[r] elements from rank r; the same `counts` on every rank. */
unisono_status unisono_all_gather_v(unisono_communicator* comm, const void* input, void* output,
                                    const size_t* counts, unisono_dtype dtype,
                                    const unisono_options* options, unisono_work** work);

/* This rank's `output`, of `count` elements, becomes its block of the reduction of the inputs, of
 * world_size * count. */
unisono_status unisono_reduce_scatter(unisono_communicator* comm, const void* input, void* output,
                                      size_t count, unisono_dtype dtype, unisono_op op,
                                      const unisono_options* options, unisono_work** work);

/* As unisono_reduce_scatter, with counts[r] elements for rank r; the same on every rank. */
unisono_status unisono_reduce_scatter_v(unisono_communicator* comm, const void* input, void* output,
                                        const size_t* counts, unisono_dtype dtype, unisono_op op,
                                        const unisono_options* options, unisono_work** work);

/* The root's `output`, of world_size * count elements, becomes the inputs, of `count`, by rank. The
 * others' `output` is ignored and may be NULL. */
unisono_status unisono_gather(unisono_communicator* comm, const void* input, void* output,
                              size_t count, unisono_dtype dtype, int32_t root,
                              const unisono_options* options, unisono_work** work);

/* As unisono_gather, with `count` elements from this rank and, on the root, counts[r] from rank r.
 * The others' `counts` are ignored and may be NULL. */
unisono_status unisono_gather_v(unisono_communicator* comm, const void* input, size_t count,
                                void* output, const size_t* counts, unisono_dtype dtype,
                                int32_t root, const unisono_options* options, unisono_work** work);

/* This rank's `output`, of `count` elements, becomes its block of the root's `input`, of world_size
 * * count. The others' `input` is ignored and may be NULL. */
unisono_status unisono_scatter(unisono_communicator* comm, const void* input, void* output,
                               size_t count, unisono_dtype dtype, int32_t root,
                               const unisono_options* options, unisono_work** work);

/* As unisono_scatter, with counts[r] elements on the root for rank r, and `count` here. The others'
 * `counts` are ignored and may be NULL. */
unisono_status unisono_scatter_v(unisono_communicator* comm, const void* input,
                                 const size_t* counts, void* output, size_t count,
                                 unisono_dtype dtype, int32_t root, const unisono_options* options,
                                 unisono_work** work);

/* Block r of `input` goes to rank r, block r of `output` comes from rank r; `count` elements are
 * one block, and both buffers have world_size * count. */
unisono_status unisono_all_to_all(unisono_communicator* comm, const void* input, void* output,
                                  size_t count, unisono_dtype dtype, const unisono_options* options,
                                  unisono_work** work);

/* As unisono_all_to_all, with send_counts[r] elements to rank r and receive_counts[r] from it, one
 * after the other by rank. */
unisono_status unisono_all_to_all_v(unisono_communicator* comm, const void* input,
                                    const size_t* send_counts, void* output,
                                    const size_t* receive_counts, unisono_dtype dtype,
                                    const unisono_options* options, unisono_work** work);

/* It returns when all ranks have called it. With a stream: what is put into it later happens after
 * every rank's stream has come here. */
unisono_status unisono_barrier(unisono_communicator* comm, const unisono_options* options,
                               unisono_work** work);

/* ---- Send and receive ---- */

/* As `from`: a message of any rank. */
#define UNISONO_ANY_SOURCE (-1)

/* A message meets the first receive on rank `to` that asks for its sender, or for any, and its tag;
 * two messages of one sender and tag arrive in order. A receive takes exactly the type and count
 * that was sent; anything else is UNISONO_MISMATCH, and fatal. A tag is any number below
 * UINT64_MAX. */

/* Sends to rank `to`. Returns when `buffer` may be used again, not when it was received. To itself
 * a rank sends after it has started to receive. */
unisono_status unisono_send(unisono_communicator* comm, const void* buffer, size_t count,
                            unisono_dtype dtype, int32_t to, uint64_t tag,
                            const unisono_options* options);

/* Receives from rank `from`, or UNISONO_ANY_SOURCE. `source` becomes the rank it came from; it may
 * be NULL, and between unisono_group_start and unisono_group_end must be. On a stream the call
 * waits for the message only if it is to say from which of all ranks. */
unisono_status unisono_recv(unisono_communicator* comm, void* buffer, size_t count,
                            unisono_dtype dtype, int32_t from, uint64_t tag,
                            const unisono_options* options, int32_t* source);

/* Sends to rank `to` and receives from rank `from`, or UNISONO_ANY_SOURCE, at the same time, with
 * one type and tag: as a send and a receive in a group. The buffers must not overlap. */
unisono_status unisono_sendrecv(unisono_communicator* comm, const void* send_buffer,
                                size_t send_count, int32_t to, void* receive_buffer,
                                size_t receive_count, int32_t from, unisono_dtype dtype,
                                uint64_t tag, const unisono_options* options, int32_t* source);

/* Starts to send. */
unisono_status unisono_isend(unisono_communicator* comm, const void* buffer, size_t count,
                             unisono_dtype dtype, int32_t to, uint64_t tag,
                             const unisono_options* options, unisono_work** work);

/* Starts to receive; unisono_work_source tells from whom. */
unisono_status unisono_irecv(unisono_communicator* comm, void* buffer, size_t count,
                             unisono_dtype dtype, int32_t from, uint64_t tag,
                             const unisono_options* options, unisono_work** work);

/* From here to unisono_group_end, operations of this thread that would block are started instead,
 * so that they can be written in any order: a send and a receive that every rank does at once, or
 * many small ones. Operations with a `work` are not part of it. Groups may be nested; the outermost
 * counts. Operations with a stream are put into it, receives at the end, which does not wait. */
unisono_status unisono_group_start(void);

/* Ends it: waits for all operations started since, or, with `work`, returns one handle for all.
 * Fails with the first failure of one of them, after the end of all. A call inside that was refused
 * is not part of the group. */
unisono_status unisono_group_end(unisono_work** work);

/* ---- Work ---- */

/* The functions below return the operation's failure, if it failed. The handle is still to be
 * destroyed then. */

/* `done` becomes 1 if the operation has ended, well or not, else 0; also when this fails. */
unisono_status unisono_work_test(unisono_work* work, int32_t* done);

/* Waits for the end, at most `seconds` or UNISONO_FOREVER: then UNISONO_TIMEOUT, and the operation
 * goes on; the error is not fatal, unlike the timeout of the operation itself. */
unisono_status unisono_work_wait(unisono_work* work, double seconds);

/* Waits until one of `count` has ended; NULLs among them are skipped, but one must be there.
 * `index` becomes which, also when that one has failed. One that ended before is found again: put
 * NULL in its place. */
unisono_status unisono_work_wait_any(unisono_work* const* works, size_t count, double seconds,
                                     size_t* index);

/* Waits until all of `count` have ended; NULLs are skipped. Fails with the first that failed. */
unisono_status unisono_work_wait_all(unisono_work* const* works, size_t count, double seconds);

/* The rank that a received message came from. Fails with UNISONO_INVALID_ARGUMENT before the end of
 * the operation and for everything but unisono_irecv. */
unisono_status unisono_work_source(const unisono_work* work, int32_t* source);

/* Gives the handle back. The operation, if it has not ended, goes on and uses its buffers. */
unisono_status unisono_work_destroy(unisono_work* work);

/* ---- Memory ---- */

/* `bytes` of memory at a multiple of 64, of a page from 64 KiB on, in the heap that other processes
 * of the host read in place; its content is not specified. Where there is no more room in that heap
 * (setting "heap_bytes"), it is ordinary memory, which serves as well, but is copied. */
unisono_status unisono_mem_alloc(size_t bytes, void** memory);

/* Frees what unisono_mem_alloc made; NULL is ignored, another address UNISONO_INVALID_ARGUMENT. No
 * operation may be under way on it. */
unisono_status unisono_mem_free(void* memory);

#ifdef __cplusplus
}
#endif

#endif
