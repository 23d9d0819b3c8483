/**
 * \file
 * unisono: collective communication between processes, for programs in C and whatever can call C.
 *
 * \code{.c}
 *   unisono_communicator *comm;
 *   if (unisono_communicator_from_environment(NULL, &comm) != UNISONO_OK)
 *     return fprintf(stderr, "%s\n", unisono_last_error_message()), 1;
 *   unisono_all_reduce(comm, x, x, 1024, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL);
 *   unisono_communicator_destroy(comm);
 * \endcode
 *
 * Link with `-lunisono`; `pkg-config --cflags --libs unisono` says how. Start the ranks with
 * `unisono launch -n 4 ./program`, torchrun, mpirun or srun.
 *
 * \section status Status
 * Every function that can fail returns a #unisono_status. Outputs come last and are written only on
 * success, except where a function says otherwise. unisono_last_error_message() says in words why
 * the last call that failed on the same thread did. The library refuses a wrong argument before it
 * sends anything, and the communicator lives on. Any other failure of an operation ends its
 * communicator on all ranks: from then on each call on it fails with the first cause.
 *
 * \section order Order
 * The ranks of a communicator call its collectives in the same order with matching arguments. The
 * library finds a difference, and the call fails on both sides. It matches sends and receives by
 * rank and tag, apart from the collectives. Communicators are independent of each other.
 *
 * \section threads Threads
 * Every function may be called on any thread at any time, also on one communicator by several
 * threads at once, as long as its collectives begin in the same order on every rank. The last error
 * and an open unisono_group_start() belong to the thread. No function may be called in a signal
 * handler.
 *
 * \section ownership Ownership
 * The library makes every handle (communicator, work, config). A program passes it by address,
 * never looks into it, and gives it back by its destroy function, which takes NULL, too. The
 * library recognises and refuses a handle that was given back. It owns the strings that it returns;
 * they live for ever, unless the function says for how long. It copies strings and arrays that it
 * is given before it returns; of a buffer it keeps the address until the operation has ended.
 *
 * \section buffers Buffers
 * A buffer is contiguous memory of `count` elements, aligned to its element. While an operation is
 * under way, do not write to its buffers, nor read those it writes. Input and output do not
 * overlap, except that output == input means "in place" where the function allows it. A buffer of
 * no elements may be NULL. Any memory will do. Memory of unisono_mem_alloc() is fastest: the other
 * processes of the host read it in place.
 *
 * \section blocking Blocking
 * With `work` NULL an operation has ended when the call returns. Otherwise the call starts it and
 * returns a handle to wait on; the operation goes on by itself, also if no thread waits.
 *
 * \section streams Streams
 * Buffers may be memory of a CUDA device, if the options name a stream of that device, as the last
 * argument of NCCL's calls does. The operation then happens after the work that is already in the
 * stream and before the work that is put there later. The call returns as soon as the operation is
 * in the stream, also with `work` NULL. The operation, and its `work`, ends when the stream has got
 * past it; until then its buffers are in use. A failure that comes after the call is reported by
 * the work, by unisono_communicator_status(), and by the next call; the stream goes on then, and
 * the content of the outputs is not specified. In a collective either all ranks give memory of a
 * device, each of its own, or none does. Operations of one communicator in several streams keep
 * their order. A stream may be under capture for a CUDA graph, where all ranks are on one host and
 * their devices can share memory: give NULL for `work`, and launch the graphs on all ranks equally
 * often.
 *
 * \section processes Processes
 * A child made by fork() can make communicators of its own; calls with its parent's fail with
 * #UNISONO_ABORTED. Of the memory of unisono_mem_alloc() it has a copy of its own, in which what it
 * has not written itself shows what the parent writes there later: to keep a state, copy it first.
 * At exit() the library closes in good order what is open.
 *
 * \section structs Structs
 * Structs that may grow begin with their size: fill them by their `_INIT` macro, and a program that
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

/**
 * \defgroup version Version
 * \{
 */

#define UNISONO_VERSION_MAJOR 0 /**< 0 of 0.1.2 */
#define UNISONO_VERSION_MINOR 1 /**< 1 of 0.1.2 */
#define UNISONO_VERSION_PATCH 0 /**< 2 of 0.1.2 */
/** The version of this header as a number that can be compared: 1.2.3 is 10203. */
#define UNISONO_VERSION \
  (UNISONO_VERSION_MAJOR * 10000 + UNISONO_VERSION_MINOR * 100 + UNISONO_VERSION_PATCH)

/** \return the version of the library that is loaded, in the form of #UNISONO_VERSION */
int32_t unisono_version(void);

/** \return the version and how it was built: "unisono 0.1.0, x86_64-linux, release, ..." */
const char* unisono_build_info(void);

/** \} */
/**
 * \defgroup errors Errors
 * \{
 */

/** How a call ended. */
typedef enum unisono_status {
  UNISONO_OK = 0,               /**< it succeeded */
  UNISONO_INVALID_ARGUMENT = 1, /**< an argument is wrong; nothing was sent */
  UNISONO_UNSUPPORTED = 2,      /**< it has no meaning or no implementation; nothing was sent */
  UNISONO_TIMEOUT = 3,          /**< something did not happen within its time */
  UNISONO_PEER_LOST = 4,        /**< another rank ended, left, or cannot be reached */
  UNISONO_MISMATCH = 5,         /**< two ranks called different things */
  UNISONO_ABORTED = 6,   /**< the communicator was aborted or closed, or is a parent process's */
  UNISONO_SYSTEM = 7,    /**< the operating system or the network refused something */
  UNISONO_UNTRUSTED = 8, /**< a connection or the store brought what no member would send */
  UNISONO_INTERNAL = 9   /**< a defect in unisono; please report it */
} unisono_status;

/** A failure. */
typedef struct unisono_error {
  size_t size;           /**< sizeof(unisono_error) */
  unisono_status status; /**< #UNISONO_OK: no call has failed on this thread yet */
  int32_t fatal;         /**< 1: the communicator of the call is dead; 0: it lives */
  int32_t peer;          /**< the rank that caused it, if another one did, else -1 */
  int32_t reserved;      /**< 0 */
  const char* message;   /**< a sentence; "" if there was no error */
  const char* operation; /**< the operation that failed, such as "all_reduce #17", or NULL */
} unisono_error;

/** The initial value of a #unisono_error. */
#define UNISONO_ERROR_INIT {sizeof(unisono_error), UNISONO_OK, 0, -1, 0, "", NULL}

/**
 * Tells the last failure on this thread. A call that succeeds leaves it as it is.
 *
 * \param[in,out] error  as large as its `size` says; its strings live until the next failure on
 *                       this thread
 */
unisono_status unisono_last_error(unisono_error* error);

/** \return the message of unisono_last_error() alone, which lives as long; "" for no failure */
const char* unisono_last_error_message(void);

/**
 * Names a status.
 *
 * \param status  a number, perhaps one that is no status
 * \return "UNISONO_PEER_LOST" for #UNISONO_PEER_LOST; "unknown status" for what is none
 */
const char* unisono_status_name(unisono_status status);

/** \} */
/**
 * \defgroup settings Settings
 * \{
 */

/** The settings a communicator is made with. docs/settings.md lists them, and so does
 * unisono_setting_at(). */
typedef struct unisono_config unisono_config;

/**
 * Makes the settings of the environment (UNISONO_TIMEOUT and so on), else the defaults.
 *
 * \param[out] config  give it back by unisono_config_destroy()
 * \return #UNISONO_INVALID_ARGUMENT if a variable UNISONO_* is no setting or has a wrong value
 */
unisono_status unisono_config_create(unisono_config** config);

/**
 * Sets one setting by its name, such as ("timeout", "30") or ("transport", "tcp").
 *
 * \param config  the settings to change
 * \param name    the name of a setting
 * \param value   its new value
 * \return #UNISONO_INVALID_ARGUMENT for a name that is no setting, with the nearest one in the
 *         message, and for a value that the setting does not take
 */
unisono_status unisono_config_set(unisono_config* config, const char* name, const char* value);

/**
 * Tells the value of one setting.
 *
 * \param config      the settings
 * \param name        the name of a setting
 * \param[out] value  its value as text, which lives until the next call on this config
 */
unisono_status unisono_config_value(unisono_config* config, const char* name, const char** value);

/**
 * Gives the handle back.
 *
 * \param config  the settings, or NULL
 */
unisono_status unisono_config_destroy(unisono_config* config);

/** One row of the table of settings. */
typedef struct unisono_setting {
  size_t size;             /**< sizeof(unisono_setting) */
  const char* name;        /**< "timeout" */
  const char* variable;    /**< "UNISONO_TIMEOUT" */
  const char* accepts;     /**< what values it takes, in words */
  const char* initial;     /**< the default, as it would be written */
  const char* consequence; /**< what follows from it, in a sentence */
  int32_t must_agree;      /**< 1: must be the same on every rank */
  int32_t reserved;        /**< 0 */
} unisono_setting;

/** The initial value of a #unisono_setting. */
#define UNISONO_SETTING_INIT {sizeof(unisono_setting), NULL, NULL, NULL, NULL, NULL, 0, 0}

/** \return how many rows the table of settings has */
size_t unisono_setting_count(void);

/**
 * Tells one row of the table of settings.
 *
 * \param index            the number of the row, from 0
 * \param[in,out] setting  as large as its `size` says
 */
unisono_status unisono_setting_at(size_t index, unisono_setting* setting);

/** \} */
/**
 * \defgroup log Log
 * \{
 */

/** How much is logged: each level has what the ones before it have. */
typedef enum unisono_log_level {
  UNISONO_LOG_OFF = 0,   /**< nothing */
  UNISONO_LOG_ERROR = 1, /**< a service of this process that can no longer do its part */
  UNISONO_LOG_WARN = 2,  /**< and what a user would want to know: no shared memory, a stranger */
  UNISONO_LOG_INFO = 3,  /**< and choices: the interface, the store */
  UNISONO_LOG_DEBUG = 4  /**< and every link */
} unisono_log_level;

/**
 * Gets one line of the log. The library calls it on any thread, perhaps on several at once, and
 * perhaps while it holds locks: it must not call the library, nor throw.
 *
 * \param context  what unisono_log_set() was given
 * \param level    the level of the line
 * \param message  the line, without an end of line
 */
typedef void (*unisono_log_function)(void* context, unisono_log_level level, const char* message);

/**
 * Chooses what receives the log of what unisono chose and met with, from now on and for the whole
 * process. Without this call standard error is told, up to the level that the setting "log" says.
 *
 * \param function  gets the lines; NULL for standard error. When this call returns, the function it
 *                  replaces is not called any more.
 * \param context   passed to `function`
 * \param level     the last level to be told
 */
unisono_status unisono_log_set(unisono_log_function function, void* context,
                               unisono_log_level level);

/** \} */
/**
 * \defgroup communicators Communicators
 *
 * The functions that make a communicator block until all its ranks have come, or for as long as the
 * setting "join_timeout" says; then they fail and name the ranks that did not come. Every rank
 * needs the same value of the settings that must agree. They fail with #UNISONO_INVALID_ARGUMENT,
 * #UNISONO_TIMEOUT, #UNISONO_MISMATCH (two ranks with one number, another world size, other
 * settings), #UNISONO_UNTRUSTED or #UNISONO_SYSTEM.
 * \{
 */

/** A group of ranks, numbered from 0, that communicate. */
typedef struct unisono_communicator unisono_communicator;

/** An operation under way. */
typedef struct unisono_work unisono_work;

/** No limit, where a time in seconds is asked for. */
#define UNISONO_FOREVER (-1.0)

/**
 * Joins by what the launcher left in the environment: unisono launch and torchrun (RANK,
 * WORLD_SIZE, MASTER_ADDR, MASTER_PORT), Open MPI, MPICH, Slurm, Kubernetes.
 *
 * \param config     copied; NULL for the settings of the environment
 * \param[out] comm  give it back by unisono_communicator_destroy()
 */
unisono_status unisono_communicator_from_environment(const unisono_config* config,
                                                     unisono_communicator** comm);

/**
 * Joins at a URL.
 *
 * \param url         the same on all ranks: tcp://host:port, an address of rank 0, which serves
 *                    there; or file:///path, a file that all ranks can reach and that is new for
 *                    every job
 * \param rank        the number of this process
 * \param world_size  how many ranks there are
 * \param config      copied; NULL for the settings of the environment
 * \param[out] comm   give it back by unisono_communicator_destroy()
 */
unisono_status unisono_communicator_from_url(const char* url, int32_t rank, int32_t world_size,
                                             const unisono_config* config,
                                             unisono_communicator** comm);

/** Where the ranks of one communicator meet, and the secret that makes them its members. A value:
 * copy it as bytes. */
typedef struct unisono_unique_id {
  uint8_t bytes[128]; /**< only the library reads them */
} unisono_unique_id;

/**
 * Makes an id in one process, normally that of rank 0, which passes it to the others by whatever
 * means there are (MPI_Bcast, a socket, a file). The others meet at this process, so it must live
 * until all have joined. An id serves for one communicator. It holds a secret: who sees it can
 * join.
 *
 * \param config   NULL for the settings of the environment; the setting "interface" says by which
 *                 address others reach this process
 * \param[out] id  the id
 */
unisono_status unisono_unique_id_create(const unisono_config* config, unisono_unique_id* id);

/**
 * Joins the ranks that have the same id.
 *
 * \param id          made by unisono_unique_id_create() in one process
 * \param rank        the number of this process
 * \param world_size  how many ranks there are
 * \param config      copied; NULL for the settings of the environment
 * \param[out] comm   give it back by unisono_communicator_destroy()
 */
unisono_status unisono_communicator_from_id(const unisono_unique_id* id, int32_t rank,
                                            int32_t world_size, const unisono_config* config,
                                            unisono_communicator** comm);

/** The `length` that #unisono_store.get writes for a key that is not set. */
#define UNISONO_NOT_SET SIZE_MAX

/**
 * A key-value store that all ranks reach, given by three functions. Keys are text of at most 4 KiB,
 * set once and never deleted; values are bytes, at most 1 MiB. The thread that joins calls the
 * functions while it joins. They return #UNISONO_OK or why they failed. They must not throw, and
 * must not call the library. A job that uses one store several times puts a prefix of its own
 * before the keys of each.
 */
typedef struct unisono_store {
  size_t size;   /**< sizeof(unisono_store) */
  void* context; /**< whatever the functions need: their first argument */
  /** Sets `key` to `length` bytes. */
  unisono_status (*set)(void* context, const char* key, const void* value, size_t length);
  /** Writes the value of `key` to `value` and its length to `length`, if it is set now. A value of
   * more than `capacity` bytes is not written, only its length; the library calls again with more
   * room. If the key is not set, writes #UNISONO_NOT_SET to `length` and returns #UNISONO_OK. */
  unisono_status (*get)(void* context, const char* key, void* value, size_t capacity,
                        size_t* length);
  /** As get, but waits until the key is set; #UNISONO_TIMEOUT if it is not after `seconds`. */
  unisono_status (*wait)(void* context, const char* key, double seconds, void* value,
                         size_t capacity, size_t* length);
} unisono_store;

/** The initial value of a #unisono_store. */
#define UNISONO_STORE_INIT {sizeof(unisono_store), NULL, NULL, NULL, NULL}

/**
 * Joins over a store of the program.
 *
 * \param store       one that all ranks reach; used during the call only
 * \param rank        the number of this process
 * \param world_size  how many ranks there are
 * \param config      copied; NULL for the settings of the environment
 * \param[out] comm   give it back by unisono_communicator_destroy()
 */
unisono_status unisono_communicator_from_store(const unisono_store* store, int32_t rank,
                                               int32_t world_size, const unisono_config* config,
                                               unisono_communicator** comm);

/** The color of a rank that is to be in no part. */
#define UNISONO_NO_COLOR INT64_MIN

/**
 * Divides the group: ranks that give the same `color` form a new one. A collective: every rank
 * calls it. The group lives on beside its parts, which have its settings.
 *
 * \param comm       the group to divide
 * \param color      which part this rank is in, or #UNISONO_NO_COLOR
 * \param key        orders the ranks of a part; equal keys go by rank
 * \param[out] part  this rank's part; NULL for #UNISONO_NO_COLOR
 */
unisono_status unisono_communicator_split(unisono_communicator* comm, int64_t color, int64_t key,
                                          unisono_communicator** part);

/**
 * Makes a communicator of the ranks that are left, numbered in the order of their numbers in
 * `comm`. All of them call it, as a rule after a rank has gone and an operation has failed; those
 * that are gone, and those that are excluded, need not. It needs neither the store nor rank 0, and
 * ranks may go meanwhile. The ranks agree on the result, so each that succeeds has the same. One
 * whose process has ended is left out. Ranks that cannot be reached and may live are left out by a
 * majority alone (of half the ranks, the half with the lowest). `comm` stays as it is: destroy it
 * when nothing needs it. #UNISONO_TIMEOUT names a rank that lives and did not call; called again,
 * also with other ranks excluded, it goes on from there.
 *
 * \param comm            the group, which may have failed
 * \param excluded        ranks that are left out although they live; may be NULL if there are none
 * \param excluded_count  how many
 * \param patience        seconds to wait for ranks that live, or #UNISONO_FOREVER
 * \param[out] shrunk     give it back by unisono_communicator_destroy()
 */
unisono_status unisono_communicator_shrink(unisono_communicator* comm, const int32_t* excluded,
                                           size_t excluded_count, double patience,
                                           unisono_communicator** shrunk);

/**
 * Makes a communicator of the ranks that are left of `comm`, as unisono_communicator_shrink() does,
 * in which they keep their numbers. unisono_communicator_rank() and
 * unisono_communicator_world_size() are those of `comm`; each collective is one of the ranks that
 * are left, and sums and averages are of what they give. Where a buffer has a block for each rank,
 * it has one for each that is gone, too: nothing reads or writes that. A rank that is gone is no
 * root, and no message goes to it: #UNISONO_INVALID_ARGUMENT.
 *
 * \param comm            the group, which may have failed
 * \param excluded        ranks that are left out although they live; may be NULL if there are none
 * \param excluded_count  how many
 * \param patience        seconds to wait for ranks that live, or #UNISONO_FOREVER
 * \param[out] masked     give it back by unisono_communicator_destroy()
 */
unisono_status unisono_communicator_mask(unisono_communicator* comm, const int32_t* excluded,
                                         size_t excluded_count, double patience,
                                         unisono_communicator** masked);

/**
 * Tells which ranks take part: all of them; in a communicator that unisono_communicator_mask() made
 * those that are left.
 *
 * \param comm        the group
 * \param[out] ranks  their numbers: room for as many as the group has ranks
 * \param[out] count  how many
 */
unisono_status unisono_communicator_living(const unisono_communicator* comm, int32_t* ranks,
                                           size_t* count);

/**
 * Makes a communicator of the ranks of `comm` and of processes that come, such as those that take
 * the places of ranks that are gone. All ranks of `comm` call it with the same arguments; a process
 * that comes calls unisono_communicator_from_environment() or unisono_communicator_from_url(), as
 * at the start. Each rank of `comm` has the number that it had when the job began, and those that
 * come have the rest. All ranks get the new communicator or none does. `comm` stays as it is:
 * destroy it when nothing needs it. After #UNISONO_TIMEOUT, which names ranks that did not come, it
 * may be called again, or `comm` serves on.
 *
 * \param comm        the group, such as unisono_communicator_shrink() makes
 * \param url         where they meet; NULL: where the ranks of `comm` met, by the environment or a
 *                    URL, unless that was a file
 * \param world_size  how many ranks there will be; 0: as many as met before
 * \param patience    seconds to wait for those that come, or #UNISONO_FOREVER
 * \param[out] grown  give it back by unisono_communicator_destroy()
 * \return #UNISONO_INVALID_ARGUMENT if there is no place to meet, no rank is missing, or a rank's
 * number is not below `world_size`; #UNISONO_ABORTED if another rank of `comm` did not meet those
 * that came
 */
unisono_status unisono_communicator_grow(unisono_communicator* comm, const char* url,
                                         int32_t world_size, double patience,
                                         unisono_communicator** grown);

/**
 * A process that may become a member of groups, again and again, with other processes each time.
 * It has a handle, a text that tells other processes how to reach it. The program passes handles
 * around as it likes: no store, launcher or rank 0 takes part. As long as it lives it listens for
 * members of its groups.
 */
typedef struct unisono_candidate unisono_candidate;

/**
 * Makes this process a candidate.
 *
 * \param config          the settings of all its groups, or NULL for those of the environment
 * \param[out] candidate  give it back by unisono_candidate_destroy()
 */
unisono_status unisono_candidate_create(const unisono_config* config,
                                        unisono_candidate** candidate);

/**
 * Tells the text by which others get to know this process. It tells no secret.
 *
 * \param candidate    this process
 * \param[out] handle  some hundred characters, which live as long as the candidate
 */
unisono_status unisono_candidate_handle(const unisono_candidate* candidate, const char** handle);

/**
 * Forms a group of the processes with these handles, and waits until all have come. An earlier
 * group lives on beside it until it is destroyed.
 *
 * \param candidate  this process
 * \param handles    of all members, in the order of their ranks: the same in all of them
 * \param count      how many
 * \param number     the same in all of them, and not used before by any
 * \param patience   seconds to wait for the others, or #UNISONO_FOREVER
 * \param[out] comm  give it back by unisono_communicator_destroy()
 * \return #UNISONO_INVALID_ARGUMENT if this process's handle is missing, one is none or is there
 * twice, or the number was used; #UNISONO_MISMATCH if one is of another version or has other
 * settings or another secret; #UNISONO_TIMEOUT, which names on rank 0 those that did not come
 */
unisono_status unisono_candidate_form(unisono_candidate* candidate, const char* const* handles,
                                      size_t count, int64_t number, double patience,
                                      unisono_communicator** comm);

/**
 * Gives the handle back. Its groups live on.
 *
 * \param candidate  this process, or NULL
 */
unisono_status unisono_candidate_destroy(unisono_candidate* candidate);

/**
 * Tells which ranks came when a communicator formed: all of them at the start of a job, those that
 * came to others after unisono_communicator_grow(), none of a part or a shrunk one.
 *
 * \param comm        the group
 * \param[out] ranks  their numbers: room for as many as the group has ranks
 * \param[out] count  how many
 */
unisono_status unisono_communicator_newcomers(const unisono_communicator* comm, int32_t* ranks,
                                              size_t* count);

/**
 * Tells where a communicator that unisono_communicator_shrink() or unisono_communicator_mask() made
 * comes from.
 *
 * \param comm        the group of those that were left
 * \param[out] ranks  the number that each of its ranks had before: as many as it has ranks
 * \param[out] ended  up to this number, from 1, the collectives of the group before had ended on
 * all of these ranks
 * \return #UNISONO_INVALID_ARGUMENT for any other communicator
 */
unisono_status unisono_communicator_former(const unisono_communicator* comm, int32_t* ranks,
                                           uint64_t* ended);

/**
 * Tells how many collectives have ended on this rank, one after the other; it stays after a
 * failure. Those in streams do not count.
 *
 * \param comm        the group
 * \param[out] ended  up to this number, from 1, they have
 */
unisono_status unisono_communicator_ended(const unisono_communicator* comm, uint64_t* ended);

/**
 * Tells the number of this process.
 *
 * \param comm       the group
 * \param[out] rank  from 0 to world_size - 1
 */
unisono_status unisono_communicator_rank(const unisono_communicator* comm, int32_t* rank);

/**
 * Tells how many ranks there are.
 *
 * \param comm             the group
 * \param[out] world_size  the number of ranks
 */
unisono_status unisono_communicator_world_size(const unisono_communicator* comm,
                                               int32_t* world_size);

/**
 * Limits how long an operation may take from now on, unless its options say otherwise. One that
 * takes longer fails and names the rank it waited for.
 *
 * \param comm     the group
 * \param seconds  more than 0, or #UNISONO_FOREVER
 */
unisono_status unisono_communicator_set_timeout(unisono_communicator* comm, double seconds);

/**
 * Tells whether the communicator lives. Does not block.
 *
 * \param comm  the group
 * \return #UNISONO_OK while it lives, else the first cause of its end
 */
unisono_status unisono_communicator_status(const unisono_communicator* comm);

/**
 * Ends every operation on every rank with #UNISONO_ABORTED.
 *
 * \param comm    the group
 * \param reason  told to all ranks; may be NULL
 */
unisono_status unisono_communicator_abort(unisono_communicator* comm, const char* reason);

/**
 * Tells what this rank was last in, a line for each operation, oldest first, for reports.
 *
 * \param comm         the group
 * \param[out] text    the lines with a terminating 0, cut off at `capacity` bytes
 * \param capacity     how many bytes `text` has room for
 * \param[out] length  how many bytes the whole text has, without the terminating 0
 */
unisono_status unisono_communicator_report(const unisono_communicator* comm, char* text,
                                           size_t capacity, size_t* length);

/**
 * Tells what this rank has called and for which ranks it has waited, as JSON:
 *
 * - `rank`, `collectives` and `messages`: the rank, and how many it has called;
 * - `called`: these by name and by size, with bytes; of collectives `moving_seconds` as well, the
 *   time in which they waited for no rank;
 * - `links` and `network`: the ways on which they go;
 * - `waited`: seconds and operations in all, by operation and size, and by rank, the most costly
 *   first.
 *
 * A collective waits, and is timed, if it does not end within some tens of microseconds. A rank
 * that is late has waited little itself: compare the ranks.
 *
 * \param comm         the group
 * \param[out] text    the JSON with a terminating 0, cut off at `capacity` bytes
 * \param capacity     how many bytes `text` has room for
 * \param[out] length  how many bytes the whole text has, without the terminating 0; it grows while
 *                     operations are under way: call again if it is not below `capacity`
 */
unisono_status unisono_communicator_stats(const unisono_communicator* comm, char* text,
                                          size_t capacity, size_t* length);

/**
 * Leaves the group in good order and gives the handle back. Waits for operations in streams; what
 * else is under way here fails with #UNISONO_ABORTED, also in other threads. The others can still
 * receive what this rank has sent. Ranks need not wait for each other first.
 *
 * \param comm  the group, or NULL
 */
unisono_status unisono_communicator_destroy(unisono_communicator* comm);

/** \} */
/**
 * \defgroup collectives Collectives
 *
 * `count` and `counts` are elements of `dtype`, not bytes; `counts` has one number for each rank.
 * An operation fails with #UNISONO_INVALID_ARGUMENT or #UNISONO_UNSUPPORTED before anything is
 * sent. Otherwise it fails with what ended it, and then the content of an output is not specified.
 * With a `work` the wait for it returns the failure of the operation.
 * \{
 */

/** The types of elements. */
typedef enum unisono_dtype {
  UNISONO_FLOAT16 = 1,       /**< IEEE 754 binary16 */
  UNISONO_BFLOAT16 = 2,      /**< the upper half of a binary32 */
  UNISONO_FLOAT32 = 3,       /**< float */
  UNISONO_FLOAT64 = 4,       /**< double */
  UNISONO_FLOAT8_E4M3FN = 5, /**< OCP 8-bit, 4 bits of exponent, no infinities */
  UNISONO_FLOAT8_E5M2 = 6,   /**< OCP 8-bit, 5 bits of exponent */
  UNISONO_INT8 = 7,          /**< int8_t */
  UNISONO_INT16 = 8,         /**< int16_t */
  UNISONO_INT32 = 9,         /**< int32_t */
  UNISONO_INT64 = 10,        /**< int64_t */
  UNISONO_UINT8 = 11,        /**< uint8_t */
  UNISONO_UINT16 = 12,       /**< uint16_t */
  UNISONO_UINT32 = 13,       /**< uint32_t */
  UNISONO_UINT64 = 14,       /**< uint64_t */
  UNISONO_BOOL = 15,         /**< one byte, 0 or 1 */
  UNISONO_COMPLEX64 = 16,    /**< two floats: real, imaginary */
  UNISONO_COMPLEX128 = 17    /**< two doubles */
} unisono_dtype;

/** How contributions are combined, element by element, with the same bits on every rank. The 16 and
 * 8 bit floats are accumulated in float32 and rounded once; a sum that is too large is infinite,
 * one of integers wraps. Averages of integers do not wrap and are rounded toward zero. Operators
 * without a meaning for a type (order of complex numbers, bits of floats, premultiplied sums of
 * integers, averages of bools) are #UNISONO_UNSUPPORTED. */
typedef enum unisono_op {
  UNISONO_SUM = 1,        /**< the sum */
  UNISONO_AVG = 2,        /**< the sum, divided at its end by the number of ranks */
  UNISONO_PROD = 3,       /**< the product */
  UNISONO_MIN = 4,        /**< the smallest; NaN wins */
  UNISONO_MAX = 5,        /**< the largest; NaN wins */
  UNISONO_BAND = 6,       /**< bitwise and */
  UNISONO_BOR = 7,        /**< bitwise or */
  UNISONO_BXOR = 8,       /**< bitwise exclusive or */
  UNISONO_LAND = 9,       /**< 1 where every contribution is not zero, else 0 */
  UNISONO_LOR = 10,       /**< 1 where some contribution is not zero, else 0 */
  UNISONO_LXOR = 11,      /**< 1 where an odd number of contributions is not zero, else 0 */
  UNISONO_PREMUL_SUM = 12 /**< the sum of each contribution times `factor` of its rank's options */
} unisono_op;

/** CUDA's legacy default stream, as cudaStreamLegacy; its cudaStreamPerThread serves as well. */
#define UNISONO_DEFAULT_STREAM ((void*)1)

/** Further options of an operation; NULL for none. The same struct may serve many calls. */
typedef struct unisono_options {
  size_t size; /**< sizeof(unisono_options) */
  /** NULL: all buffers are memory of the host. Otherwise they are memory of a CUDA device, and this
   * is the stream (cudaStream_t, CUstream) in whose order the operation happens; see \ref streams.
   * The default stream, which CUDA also writes as NULL, must be named: #UNISONO_DEFAULT_STREAM. The
   * operation fails with #UNISONO_INVALID_ARGUMENT if a buffer lies elsewhere than the options say,
   * as far as that can be told, and with #UNISONO_UNSUPPORTED without CUDA's driver, which the
   * library looks for when it is first needed. */
  void* stream;
  double timeout; /**< seconds it may take; 0: the communicator's; or #UNISONO_FOREVER */
  double factor;  /**< of #UNISONO_PREMUL_SUM, and only there */
  /** NULL, or the place to which unisono_recv() and unisono_sendrecv() write how many elements have
   * come, and which other calls ignore. NULL between unisono_group_start() and unisono_group_end().
   */
  size_t* received;
} unisono_options;

/** The initial value of a #unisono_options. */
#define UNISONO_OPTIONS_INIT {sizeof(unisono_options), NULL, 0.0, 1.0, NULL}

/**
 * Every rank's `output` becomes the reduction of all inputs.
 *
 * \param comm         the group
 * \param input        `count` elements
 * \param[out] output  `count` elements; in place: output == input
 * \param count        how many elements each rank has
 * \param dtype        their type
 * \param op           how they are combined
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_all_reduce(unisono_communicator* comm, const void* input, void* output,
                                  size_t count, unisono_dtype dtype, unisono_op op,
                                  const unisono_options* options, unisono_work** work);

/**
 * Every rank's `output` becomes the reduction of the inputs of the ranks up to itself, as in
 * MPI_Scan.
 *
 * Rank r gets ((x0 op x1) op ...) op xr, in exactly this order whatever the algorithm: each result
 * is, bit for bit, what continues that of the rank before, and the same in every run. 16-bit and
 * 8-bit floats are summed in float32 and rounded once for each result. #UNISONO_AVG averages these
 * r + 1 inputs.
 *
 * \param comm         the group
 * \param input        `count` elements
 * \param[out] output  `count` elements; in place: output == input
 * \param count        how many elements each rank has
 * \param dtype        their type
 * \param op           how they are combined
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_scan(unisono_communicator* comm, const void* input, void* output,
                            size_t count, unisono_dtype dtype, unisono_op op,
                            const unisono_options* options, unisono_work** work);

/**
 * As unisono_scan(), of the ranks before this one, as in MPI_Exscan. #UNISONO_AVG averages these r
 * inputs.
 *
 * \param comm         the group
 * \param input        `count` elements
 * \param[out] output  `count` elements; in place: output == input. On rank 0 it stays as it is; it
 * may be NULL.
 * \param count        how many elements each rank has
 * \param dtype        their type
 * \param op           how they are combined
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_exscan(unisono_communicator* comm, const void* input, void* output,
                              size_t count, unisono_dtype dtype, unisono_op op,
                              const unisono_options* options, unisono_work** work);

/**
 * The root's `output` becomes the reduction of all inputs.
 *
 * \param comm         the group
 * \param input        `count` elements
 * \param[out] output  on the root `count` elements; in place: output == input. On the others
 *                     ignored; it may be NULL.
 * \param count        how many elements each rank has
 * \param dtype        their type
 * \param op           how they are combined
 * \param root         the rank that gets the result
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_reduce(unisono_communicator* comm, const void* input, void* output,
                              size_t count, unisono_dtype dtype, unisono_op op, int32_t root,
                              const unisono_options* options, unisono_work** work);

/**
 * Every rank's `buffer` becomes the root's.
 *
 * \param comm            the group
 * \param[in,out] buffer  `count` elements, on the root read, on the others written
 * \param count           how many elements each rank has
 * \param dtype           their type
 * \param root            the rank whose buffer it is
 * \param options         or NULL
 * \param[out] work       the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_broadcast(unisono_communicator* comm, void* buffer, size_t count,
                                 unisono_dtype dtype, int32_t root, const unisono_options* options,
                                 unisono_work** work);

/**
 * Every rank's `output` becomes all inputs, one after the other by rank.
 *
 * \param comm         the group
 * \param input        `count` elements; in place: this rank's block of `output`
 * \param[out] output  world_size * count elements
 * \param count        how many elements each rank gives
 * \param dtype        their type
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_all_gather(unisono_communicator* comm, const void* input, void* output,
                                  size_t count, unisono_dtype dtype, const unisono_options* options,
                                  unisono_work** work);

/**
 * As unisono_all_gather(), with a count for each rank.
 *
 * \param comm         the group
 * \param input        counts[rank] elements; in place: this rank's block of `output`
 * \param[out] output  as many elements as `counts` add up to
 * \param counts       counts[r] elements come from rank r; the same on every rank
 * \param dtype        their type
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_all_gather_v(unisono_communicator* comm, const void* input, void* output,
                                    const size_t* counts, unisono_dtype dtype,
                                    const unisono_options* options, unisono_work** work);

/**
 * This rank's `output` becomes its block of the reduction of all inputs.
 *
 * \param comm         the group
 * \param input        world_size * count elements
 * \param[out] output  `count` elements
 * \param count        how many elements each rank gets
 * \param dtype        their type
 * \param op           how they are combined
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_reduce_scatter(unisono_communicator* comm, const void* input, void* output,
                                      size_t count, unisono_dtype dtype, unisono_op op,
                                      const unisono_options* options, unisono_work** work);

/**
 * As unisono_reduce_scatter(), with a count for each rank.
 *
 * \param comm         the group
 * \param input        as many elements as `counts` add up to
 * \param[out] output  counts[rank] elements
 * \param counts       counts[r] elements go to rank r; the same on every rank
 * \param dtype        their type
 * \param op           how they are combined
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_reduce_scatter_v(unisono_communicator* comm, const void* input, void* output,
                                        const size_t* counts, unisono_dtype dtype, unisono_op op,
                                        const unisono_options* options, unisono_work** work);

/**
 * The root's `output` becomes all inputs, one after the other by rank.
 *
 * \param comm         the group
 * \param input        `count` elements
 * \param[out] output  on the root world_size * count elements; on the others ignored, may be NULL
 * \param count        how many elements each rank gives
 * \param dtype        their type
 * \param root         the rank that gets them
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_gather(unisono_communicator* comm, const void* input, void* output,
                              size_t count, unisono_dtype dtype, int32_t root,
                              const unisono_options* options, unisono_work** work);

/**
 * As unisono_gather(), with a count for each rank.
 *
 * \param comm         the group
 * \param input        `count` elements
 * \param count        how many elements this rank gives
 * \param[out] output  on the root as many elements as `counts` add up to; on the others ignored,
 *                     may be NULL
 * \param counts       on the root: counts[r] elements come from rank r; on the others ignored, may
 *                     be NULL
 * \param dtype        their type
 * \param root         the rank that gets them
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_gather_v(unisono_communicator* comm, const void* input, size_t count,
                                void* output, const size_t* counts, unisono_dtype dtype,
                                int32_t root, const unisono_options* options, unisono_work** work);

/**
 * This rank's `output` becomes its block of the root's `input`.
 *
 * \param comm         the group
 * \param input        on the root world_size * count elements; on the others ignored, may be NULL
 * \param[out] output  `count` elements
 * \param count        how many elements each rank gets
 * \param dtype        their type
 * \param root         the rank that gives them
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_scatter(unisono_communicator* comm, const void* input, void* output,
                               size_t count, unisono_dtype dtype, int32_t root,
                               const unisono_options* options, unisono_work** work);

/**
 * As unisono_scatter(), with a count for each rank.
 *
 * \param comm         the group
 * \param input        on the root as many elements as `counts` add up to; on the others ignored,
 *                     may be NULL
 * \param counts       on the root: counts[r] elements go to rank r; on the others ignored, may be
 *                     NULL
 * \param[out] output  `count` elements
 * \param count        how many elements this rank gets
 * \param dtype        their type
 * \param root         the rank that gives them
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_scatter_v(unisono_communicator* comm, const void* input,
                                 const size_t* counts, void* output, size_t count,
                                 unisono_dtype dtype, int32_t root, const unisono_options* options,
                                 unisono_work** work);

/**
 * Block r of `input` goes to rank r, block r of `output` comes from rank r.
 *
 * \param comm         the group
 * \param input        world_size * count elements
 * \param[out] output  world_size * count elements
 * \param count        how many elements one block has
 * \param dtype        their type
 * \param options      or NULL
 * \param[out] work    the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_all_to_all(unisono_communicator* comm, const void* input, void* output,
                                  size_t count, unisono_dtype dtype, const unisono_options* options,
                                  unisono_work** work);

/**
 * As unisono_all_to_all(), with counts for each rank. The blocks lie one after the other by rank.
 *
 * \param comm            the group
 * \param input           as many elements as `send_counts` add up to
 * \param send_counts     send_counts[r] elements go to rank r
 * \param[out] output     as many elements as `receive_counts` add up to
 * \param receive_counts  receive_counts[r] elements come from rank r
 * \param dtype           their type
 * \param options         or NULL
 * \param[out] work       the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_all_to_all_v(unisono_communicator* comm, const void* input,
                                    const size_t* send_counts, void* output,
                                    const size_t* receive_counts, unisono_dtype dtype,
                                    const unisono_options* options, unisono_work** work);

/**
 * Ends when all ranks have called it. With a stream: what is put into it later happens after every
 * rank's stream has come here.
 *
 * \param comm       the group
 * \param options    or NULL
 * \param[out] work  the handle to wait on; NULL: the call blocks
 */
unisono_status unisono_barrier(unisono_communicator* comm, const unisono_options* options,
                               unisono_work** work);

/** \} */
/**
 * \defgroup messages Send and receive
 *
 * A message meets the first receive on rank `to` that asks for its tag and for its sender, or for
 * any; two messages of one sender and tag arrive in order. A receive takes a message of its type
 * and at most its count, and leaves the rest of its buffer as it is; in a stream, of exactly its
 * count. Anything else is #UNISONO_MISMATCH, and fatal. A tag is any number up to INT64_MAX.
 * \{
 */

/** As `from`: a message of any rank. */
#define UNISONO_ANY_SOURCE (-1)

/**
 * Sends. Returns when `buffer` may be used again, not when it was received. A rank that sends to
 * itself starts the receive first.
 *
 * \param comm     the group
 * \param buffer   `count` elements
 * \param count    how many elements
 * \param dtype    their type
 * \param to       the rank that receives
 * \param tag      the receive's
 * \param options  or NULL
 */
unisono_status unisono_send(unisono_communicator* comm, const void* buffer, size_t count,
                            unisono_dtype dtype, int32_t to, uint64_t tag,
                            const unisono_options* options);

/**
 * Receives. With a stream the call does not wait for the message, except in one case: if `from` is
 * #UNISONO_ANY_SOURCE and `source` is not NULL, it waits until it knows who sent the message.
 *
 * \param comm         the group
 * \param[out] buffer  `count` elements
 * \param count        how many elements at most; unisono_options::received tells how many came
 * \param dtype        their type
 * \param from         the rank that sends, or #UNISONO_ANY_SOURCE
 * \param tag          the send's
 * \param options      or NULL
 * \param[out] source  the rank that the message came from. May be NULL, and must be between
 *                     unisono_group_start() and unisono_group_end().
 */
unisono_status unisono_recv(unisono_communicator* comm, void* buffer, size_t count,
                            unisono_dtype dtype, int32_t from, uint64_t tag,
                            const unisono_options* options, int32_t* source);

/**
 * Looks for a message of host memory, and leaves it to the next receive that asks for it. A message
 * that was sent before another one of the same rank and tag is found first.
 *
 * \param comm         the group
 * \param from         the rank that sends, or #UNISONO_ANY_SOURCE
 * \param tag          the send's
 * \param seconds      how long to wait for one; 0: not at all; or #UNISONO_FOREVER
 * \param[out] source  the rank that sent it, or NULL
 * \param[out] count   how many elements it has, or NULL
 * \param[out] dtype   their type, or NULL
 * \return #UNISONO_TIMEOUT when none has come in time, which is not fatal
 */
unisono_status unisono_probe(unisono_communicator* comm, int32_t from, uint64_t tag, double seconds,
                             int32_t* source, size_t* count, unisono_dtype* dtype);

/**
 * Sends and receives at the same time, with one type and tag: as a send and a receive in a group.
 * The buffers must not overlap.
 *
 * \param comm                 the group
 * \param send_buffer          `send_count` elements
 * \param send_count           how many elements to send
 * \param to                   the rank that receives them
 * \param[out] receive_buffer  `receive_count` elements
 * \param receive_count        how many elements to receive at most
 * \param from                 the rank that sends them, or #UNISONO_ANY_SOURCE
 * \param dtype                the type of both
 * \param tag                  the tag of both
 * \param options              or NULL
 * \param[out] source          as of unisono_recv()
 */
unisono_status unisono_sendrecv(unisono_communicator* comm, const void* send_buffer,
                                size_t send_count, int32_t to, void* receive_buffer,
                                size_t receive_count, int32_t from, unisono_dtype dtype,
                                uint64_t tag, const unisono_options* options, int32_t* source);

/**
 * Starts to send.
 *
 * \param comm       the group
 * \param buffer     `count` elements
 * \param count      how many elements
 * \param dtype      their type
 * \param to         the rank that receives
 * \param tag        the receive's
 * \param options    or NULL
 * \param[out] work  the handle to wait on
 */
unisono_status unisono_isend(unisono_communicator* comm, const void* buffer, size_t count,
                             unisono_dtype dtype, int32_t to, uint64_t tag,
                             const unisono_options* options, unisono_work** work);

/**
 * Starts to receive.
 *
 * \param comm         the group
 * \param[out] buffer  `count` elements
 * \param count        how many elements at most
 * \param dtype        their type
 * \param from         the rank that sends, or #UNISONO_ANY_SOURCE
 * \param tag          the send's
 * \param options      or NULL
 * \param[out] work    the handle to wait on; unisono_work_source() tells which rank sent the
 *                     message, unisono_work_received() how long it is
 */
unisono_status unisono_irecv(unisono_communicator* comm, void* buffer, size_t count,
                             unisono_dtype dtype, int32_t from, uint64_t tag,
                             const unisono_options* options, unisono_work** work);

/**
 * Begins a group of operations: until unisono_group_end(), operations of this thread that would
 * block are started instead. So they can be written in any order: a send and a receive that every
 * rank does at once, or many small ones. Operations with a `work` are not part of the group. Groups
 * may be nested; the outermost counts. Operations with a stream are put into it, the receives last,
 * when the group ends; that does not wait.
 */
unisono_status unisono_group_start(void);

/**
 * Ends the group. A call inside that was refused is not part of it.
 *
 * \param[out] work  one handle for all operations of the group; NULL: the call waits for all
 * \return the first failure of one of the operations, after the end of all
 */
unisono_status unisono_group_end(unisono_work** work);

/** \} */
/**
 * \defgroup work Work
 *
 * These functions return the failure of the operation, if it failed. The handle is still to be
 * destroyed then.
 * \{
 */

/**
 * Tells whether the operation has ended.
 *
 * \param work       the operation
 * \param[out] done  1 if it has ended, well or not, else 0; also when this fails
 */
unisono_status unisono_work_test(unisono_work* work, int32_t* done);

/**
 * Waits for the end of the operation.
 *
 * \param work     the operation
 * \param seconds  how long to wait, or #UNISONO_FOREVER
 * \return #UNISONO_TIMEOUT when the time is up; the operation goes on, and the error is not fatal,
 *         unlike the timeout of the operation itself
 */
unisono_status unisono_work_wait(unisono_work* work, double seconds);

/**
 * Waits until one of several has ended. One that ended before is found again: put NULL in its
 * place.
 *
 * \param works       the operations; NULLs among them are skipped, but one must be there
 * \param count       how many they are
 * \param seconds     how long to wait, or #UNISONO_FOREVER
 * \param[out] index  which one has ended, also when that one has failed
 */
unisono_status unisono_work_wait_any(unisono_work* const* works, size_t count, double seconds,
                                     size_t* index);

/**
 * Waits until all of several have ended.
 *
 * \param works    the operations; NULLs among them are skipped
 * \param count    how many they are
 * \param seconds  how long to wait, or #UNISONO_FOREVER
 * \return the failure of the first that failed
 */
unisono_status unisono_work_wait_all(unisono_work* const* works, size_t count, double seconds);

/**
 * Tells which rank a received message came from.
 *
 * \param work         of unisono_irecv()
 * \param[out] source  the rank
 * \return #UNISONO_INVALID_ARGUMENT before the end of the operation, and for any other operation
 */
unisono_status unisono_work_source(const unisono_work* work, int32_t* source);

/**
 * Tells how long a received message is.
 *
 * \param work        of unisono_irecv()
 * \param[out] count  how many elements have come
 * \return #UNISONO_INVALID_ARGUMENT before the end of the operation, and for any other operation
 */
unisono_status unisono_work_received(const unisono_work* work, size_t* count);

/**
 * Gives the handle back. The operation, if it has not ended, goes on and uses its buffers.
 *
 * \param work  the operation, or NULL
 */
unisono_status unisono_work_destroy(unisono_work* work);

/** \} */
/**
 * \defgroup windows Windows
 *
 * Memory that each rank exposes to the others. A rank puts bytes into another's memory or gets
 * bytes of it, and that one calls nothing. It signals when it has put what belongs together; the
 * other one waits for the signal, and finds there what was put before. The ranks agree on who uses
 * which bytes when. Between processes of one host, memory of unisono_mem_alloc() is written and
 * read where it lies; other memory, and that of ranks on other hosts, goes by messages.
 *
 * A window has a group of its own: when a rank is gone, all calls on the window fail with the first
 * cause, and the communicator may be shrunk and a new window made of that.
 * \{
 */

/** Memory of all ranks of a group. */
typedef struct unisono_window unisono_window;

/**
 * Exposes memory to all ranks. All ranks call it, each with memory of its own; a collective.
 *
 * \param comm         the group
 * \param memory       stays allocated until the window is destroyed, here and, if it is mapped
 *                     there, on the other ranks. NULL for no bytes. It may be memory of a CUDA
 *                     device on which streams have nothing under way: then what is put and where
 *                     it is got may be, too
 * \param bytes        how many
 * \param[out] window  the memory of all ranks
 */
unisono_status unisono_window_create(unisono_communicator* comm, void* memory, size_t bytes,
                                     unisono_window** window);

/**
 * Tells how much memory a rank exposes.
 *
 * \param window      the window
 * \param rank        the rank
 * \param[out] bytes  how many bytes
 */
unisono_status unisono_window_bytes(const unisono_window* window, int32_t rank, size_t* bytes);

/**
 * Writes to a rank's memory. Returns when the bytes are there.
 *
 * \param window  the window
 * \param source  `bytes` bytes
 * \param bytes   how many
 * \param to      the rank
 * \param offset  where they go, in bytes from the beginning of that rank's memory
 */
unisono_status unisono_window_put(unisono_window* window, const void* source, size_t bytes,
                                  int32_t to, size_t offset);

/**
 * Reads a rank's memory.
 *
 * \param window       the window
 * \param[out] target  `bytes` bytes
 * \param bytes        how many
 * \param from         the rank
 * \param offset       where they lie, in bytes from the beginning of that rank's memory
 */
unisono_status unisono_window_get(unisono_window* window, void* target, size_t bytes, int32_t from,
                                  size_t offset);

/**
 * Signals to a rank, which waits once for each signal. Bytes that were put into its memory before
 * are there then.
 *
 * \param window  the window
 * \param to      the rank
 */
unisono_status unisono_window_signal(unisono_window* window, int32_t to);

/**
 * Waits for a signal, and takes it.
 *
 * \param window   the window
 * \param from     the rank that signals
 * \param seconds  how long to wait; 0: not at all; or #UNISONO_FOREVER
 * \return #UNISONO_TIMEOUT when none has come in time, which is not fatal
 */
unisono_status unisono_window_wait_signal(unisono_window* window, int32_t from, double seconds);

/**
 * Tells where the memory of a rank of this host lies in this process.
 *
 * \param window       the window
 * \param rank         another rank
 * \param[out] memory  its memory, until this rank destroys the window
 * \return #UNISONO_UNSUPPORTED where it is not memory of unisono_mem_alloc() of this host, or of
 *         a device, which only that can read
 */
unisono_status unisono_window_map(unisono_window* window, int32_t rank, void** memory);

/**
 * Waits until all ranks have called it: what any has put before is there then.
 *
 * \param window  the window
 */
unisono_status unisono_window_fence(unisono_window* window);

/**
 * Ends the use of this rank's memory by others, and gives the handle back. It waits for nothing
 * that is under way: call unisono_window_fence() before, on all ranks. With UNISONO_TIMEOUT the
 * handle is gone, too, and another rank may still be writing to the memory: keep that allocated.
 *
 * \param window  the window, or NULL
 */
unisono_status unisono_window_destroy(unisono_window* window);

/** \} */
/**
 * \defgroup memory Memory
 * \{
 */

/**
 * Allocates memory in the heap that other processes of the host read in place. Where that heap has
 * no more room (setting "heap_bytes"), it is ordinary memory, which serves as well, but is copied.
 *
 * \param bytes        how many
 * \param[out] memory  at a multiple of 64, of a page from 64 KiB on; its content is not specified
 */
unisono_status unisono_mem_alloc(size_t bytes, void** memory);

/**
 * Frees what unisono_mem_alloc() made. No operation may be under way on it.
 *
 * \param memory  its address; NULL is ignored, another address #UNISONO_INVALID_ARGUMENT
 */
unisono_status unisono_mem_free(void* memory);

/** \} */

#ifdef __cplusplus
}
#endif

#endif
