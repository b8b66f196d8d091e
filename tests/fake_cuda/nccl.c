/* NCCL between processes of one machine: ranks meet in shared memory. A collective is a job of the
   queue; its result is real.

   NVIDIA_FAKE_NCCL makes it fail as cards do: "error" and "hang" at the first collective, "hang_at=N" at the
   N-th, "p2p_hangs" unless NCCL_P2P_DISABLE=1, "shm_full" unless NCCL_SHM_DISABLE=1. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, NUM_OPERATIONS, PRE_MULTIPLIED = 100 };
enum type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, NUM_TYPES };
static const size_t type_bytes[NUM_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static const size_t CHUNK = (size_t)4 << 20; /* of each rank, in shared memory */

typedef struct {
    _Atomic int arrived, round;
} Meeting;
typedef struct {
    int size, rank, num_splits;
    _Atomic bool is_aborted;
    char name[96], *data;
    Meeting *meeting;
} Communicator;
typedef struct {
    char bytes[128];
} UniqueId;

static char last_error[512];
static double factors[64];
static int num_factors;

static bool is_on(const char *variable) {
    const char *value = getenv(variable);
    return value && !strcmp(value, "1");
}
static bool fault_is(const char *name) {
    const char *fault = getenv("NVIDIA_FAKE_NCCL");
    return fault && !strcmp(fault, name);
}

/* Waits for every rank; false: the communicator was aborted meanwhile. */
static bool meet(Communicator *comm) {
    if (comm->size == 1) return true;
    int round = atomic_load(&comm->meeting->round);
    if (atomic_fetch_add(&comm->meeting->arrived, 1) == comm->size - 1) {
        atomic_store(&comm->meeting->arrived, 0);
        atomic_fetch_add(&comm->meeting->round, 1);
        return true;
    }
    while (atomic_load(&comm->meeting->round) == round) {
        if (comm->is_aborted) return false;
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
    return true;
}

static Communicator *join(const char *name, int size, int rank) {
    Communicator *comm = calloc(1, sizeof *comm);
    if (!comm) abort();
    comm->size = size;
    comm->rank = rank;
    snprintf(comm->name, sizeof comm->name, "%s", name);
    if (size == 1) return comm;
    size_t bytes = 4096 + CHUNK * (size_t)size;
    int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes)) abort();
    char *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (start == MAP_FAILED) abort();
    comm->meeting = (Meeting *)start;
    comm->data = start + 4096;
    meet(comm);
    if (!rank) shm_unlink(name);
    return comm;
}

int ncclGetVersion(int *version) { return *version = 22907, OK; }
int ncclGetUniqueId(UniqueId *id) {
    memset(id, 0, sizeof *id);
    return getrandom(id->bytes, 16, 0) == 16 ? OK : SYSTEM_ERROR;
}

int ncclCommInitRank(Communicator **comm, int size, UniqueId id, int rank) {
    char name[96] = "/fake-nccl-";
    for (int i = 0; i < 16; i++) sprintf(name + strlen(name), "%02x", (unsigned char)id.bytes[i]);
    if (size > 1 && fault_is("shm_full") && !is_on("NCCL_SHM_DISABLE")) {
        snprintf(last_error, sizeof last_error,
                 "Error while creating shared memory segment /dev/shm/nccl-fake (size 9637888), "
                 "error: No space left on device (28)");
        fprintf(stderr, "NCCL WARN %s\n", last_error);
        return SYSTEM_ERROR;
    }
    *comm = join(name, size, rank);
    return OK;
}
int ncclCommInitRankConfig(Communicator **comm, int size, UniqueId id, int rank, void *config) {
    return (void)config, ncclCommInitRank(comm, size, id, rank);
}
int ncclCommInitRankScalable(Communicator **comm, int size, int rank, int count, UniqueId *ids, void *config) {
    return (void)count, (void)config, ncclCommInitRank(comm, size, ids[0], rank);
}
int ncclCommCount(const Communicator *comm, int *count) { return *count = comm->size, OK; }
int ncclCommUserRank(const Communicator *comm, int *rank) { return *rank = comm->rank, OK; }
int ncclCommGetAsyncError(Communicator *comm, int *error) { return (void)comm, *error = OK; }
int ncclCommAbort(Communicator *comm) { return comm->is_aborted = true, OK; }
int ncclCommFinalize(Communicator *comm) { return (void)comm, wait_for(enqueued()), OK; }
int ncclCommDestroy(Communicator *comm) {
    wait_for(enqueued());
    if (comm->meeting) munmap(comm->meeting, 4096 + CHUNK * (size_t)comm->size);
    return free(comm), OK;
}
const char *ncclGetErrorString(int error) {
    return error == SYSTEM_ERROR ? "unhandled system error (run with NCCL_DEBUG=INFO for details)"
           : error ? "internal error - please report this issue to the NCCL developers" : "no error";
}
const char *ncclGetLastError(Communicator *comm) { return (void)comm, last_error; }
int ncclGroupStart(void) { return OK; }
int ncclGroupEnd(void) { return OK; }

/* Numbers of each type as double */

static float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    return memcpy(&value, &wide, 4), value;
}
static uint16_t to_bfloat16(double number) {
    float value = (float)number;
    uint32_t wide;
    return memcpy(&wide, &value, 4), (uint16_t)(wide >> 16);
}
static double get(const void *numbers, size_t i, enum type type) {
    switch (type) {
    case INT8: return ((const int8_t *)numbers)[i];
    case UINT8: return ((const uint8_t *)numbers)[i];
    case INT32: return ((const int32_t *)numbers)[i];
    case UINT32: return ((const uint32_t *)numbers)[i];
    case INT64: return (double)((const int64_t *)numbers)[i];
    case UINT64: return (double)((const uint64_t *)numbers)[i];
    case FLOAT16: return (double)((const _Float16 *)numbers)[i];
    case FLOAT32: return ((const float *)numbers)[i];
    case FLOAT64: return ((const double *)numbers)[i];
    default: return from_bfloat16(((const uint16_t *)numbers)[i]);
    }
}
static void put(void *numbers, size_t i, enum type type, double value) {
    switch (type) {
    case INT8: ((int8_t *)numbers)[i] = (int8_t)value; break;
    case UINT8: ((uint8_t *)numbers)[i] = (uint8_t)value; break;
    case INT32: ((int32_t *)numbers)[i] = (int32_t)value; break;
    case UINT32: ((uint32_t *)numbers)[i] = (uint32_t)value; break;
    case INT64: ((int64_t *)numbers)[i] = (int64_t)value; break;
    case UINT64: ((uint64_t *)numbers)[i] = (uint64_t)value; break;
    case FLOAT16: ((_Float16 *)numbers)[i] = (_Float16)value; break;
    case FLOAT32: ((float *)numbers)[i] = (float)value; break;
    case FLOAT64: ((double *)numbers)[i] = value; break;
    default: ((uint16_t *)numbers)[i] = to_bfloat16(value);
    }
}

int ncclRedOpCreatePreMulSum(int *operation, void *factor, int type, int where, Communicator *comm) {
    (void)where, (void)comm;
    factors[num_factors % 64] = get(factor, 0, (enum type)type);
    *operation = PRE_MULTIPLIED + num_factors++ % 64;
    return OK;
}
int ncclRedOpDestroy(int operation, Communicator *comm) { return (void)operation, (void)comm, OK; }

static double combine(double a, double b, int operation) {
    switch (operation) {
    case PRODUCT: return a * b;
    case MAXIMUM: return b > a ? b : a;
    case MINIMUM: return b < a ? b : a;
    default: return a + b;
    }
}

/* Numbers first to first + count of every rank's chunk, into to. */
static void reduce(const Communicator *comm, void *to, size_t first, size_t count, enum type type, int operation) {
    double factor = operation >= PRE_MULTIPLIED ? factors[operation - PRE_MULTIPLIED] : 1;
    if (operation == AVERAGE) factor = 1.0 / comm->size;
    for (size_t i = 0; i < count; i++) {
        double value = get(comm->data, first + i, type) * factor;
        for (int rank = 1; rank < comm->size; rank++) {
            double other = get(comm->data + (size_t)rank * CHUNK, first + i, type) * factor;
            value = combine(value, other, operation);
        }
        put(to, i, type, value);
    }
}

/* Collectives as jobs */

enum collective { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };
typedef struct {
    Job job;
    enum collective collective;
    const char *from;
    char *to;
    size_t count;
    enum type type;
    int operation, root;
    Communicator *comm;
    bool hangs, owns_to;
} Collective;

static char *chunk(const Communicator *comm, int rank) { return comm->data + (size_t)rank * CHUNK; }
static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* One piece of at most CHUNK bytes of each rank, numbers at to at + count; false: aborted. */
static bool run_piece(const Collective *work, size_t at, size_t count) {
    Communicator *comm = work->comm;
    size_t width = type_bytes[work->type], bytes = count * width;
    char *mine = chunk(comm, comm->rank);
    if (work->collective == REDUCE_SCATTER)
        for (int rank = 0; rank < comm->size; rank++)
            memcpy(mine + (size_t)rank * bytes, work->from + ((size_t)rank * work->count + at) * width, bytes);
    else if (work->collective != BROADCAST || comm->rank == work->root)
        memcpy(mine, work->from + at * width, bytes);
    if (!meet(comm)) return false;
    if (work->collective == ALL_REDUCE)
        reduce(comm, work->to + at * width, 0, count, work->type, work->operation);
    if (work->collective == REDUCE_SCATTER)
        reduce(comm, work->to + at * width, (size_t)comm->rank * count, count, work->type, work->operation);
    if (work->collective == BROADCAST && comm->rank != work->root)
        memcpy(work->to + at * width, chunk(comm, work->root), bytes);
    if (work->collective == ALL_GATHER)
        for (int rank = 0; rank < comm->size; rank++)
            memcpy(work->to + ((size_t)rank * work->count + at) * width, chunk(comm, rank), bytes);
    return meet(comm);
}

static void run_collective(Job *job) {
    Collective *work = (Collective *)job;
    Communicator *comm = work->comm;
    size_t width = type_bytes[work->type], piece = CHUNK / width;
    while (work->hangs && !comm->is_aborted) nanosleep(&(struct timespec){0, 1000000}, NULL);
    if (comm->size == 1 && work->to != work->from) memmove(work->to, work->from, work->count * width);
    if (work->collective == REDUCE_SCATTER) piece /= (size_t)comm->size;
    for (size_t at = 0; comm->size > 1 && at < work->count; at += piece)
        if (!run_piece(work, at, smaller(piece, work->count - at))) break;
    if (work->owns_to) free(work->to);
}

static int start(Collective collective) {
    if (collective.type >= NUM_TYPES || (collective.operation >= NUM_OPERATIONS && collective.operation < PRE_MULTIPLIED)) {
        snprintf(last_error, sizeof last_error, "fake NCCL: type %d, operation %d", collective.type,
                 collective.operation);
        return INVALID_ARGUMENT;
    }
    size_t number = ++this_process()->collectives;
    const char *fault = getenv("NVIDIA_FAKE_NCCL");
    size_t hang_at = fault && !strncmp(fault, "hang_at=", 8) ? (size_t)atol(fault + 8) : 0;
    if (collective.comm->size > 1) {
        if (fault_is("error")) {
            snprintf(last_error, sizeof last_error, "Call to ibv_modify_qp failed");
            return SYSTEM_ERROR;
        }
        collective.hangs = fault_is("hang") || (hang_at && number >= hang_at) ||
                           (fault_is("p2p_hangs") && !is_on("NCCL_P2P_DISABLE"));
    }
    Collective *work = malloc(sizeof *work);
    if (!work) abort();
    *work = collective;
    work->job.run = run_collective;
    enqueue(&work->job);
    return OK;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *comm, void *stream) {
    (void)stream;
    return start((Collective){.collective = ALL_REDUCE, .from = from, .to = to, .count = count,
                              .type = (enum type)type, .operation = operation, .comm = comm});
}
int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, Communicator *comm,
               void *stream) {
    (void)stream;
    if (type >= NUM_TYPES) return INVALID_ARGUMENT;
    bool is_root = comm->rank == root; /* the others' sums go into memory that is thrown away */
    return start((Collective){.collective = ALL_REDUCE, .from = from, .count = count, .type = (enum type)type,
                              .to = is_root ? to : malloc(count * type_bytes[type] + 1), .owns_to = !is_root,
                              .operation = operation, .comm = comm});
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *comm, void *stream) {
    (void)stream;
    return start((Collective){.collective = BROADCAST, .from = from, .to = to, .count = count,
                              .type = (enum type)type, .root = root, .comm = comm});
}
int ncclBcast(void *bytes, size_t count, int type, int root, Communicator *comm, void *stream) {
    return ncclBroadcast(bytes, bytes, count, type, root, comm, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *comm, void *stream) {
    (void)stream;
    return start((Collective){.collective = ALL_GATHER, .from = from, .to = to, .count = count,
                              .type = (enum type)type, .comm = comm});
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Communicator *comm,
                      void *stream) {
    (void)stream;
    return start((Collective){.collective = REDUCE_SCATTER, .from = from, .to = to, .count = count,
                              .type = (enum type)type, .operation = operation, .comm = comm});
}

int ncclCommSplit(Communicator *comm, int color, int key, Communicator **split, void *config) {
    (void)key, (void)config;
    enum { MAX_RANKS = 64 };
    int colors[MAX_RANKS], size = 0, rank = 0;
    char name[96];
    if (comm->size > MAX_RANKS) return INVALID_ARGUMENT;
    ncclAllGather(&color, colors, 1, INT32, comm, NULL);
    wait_for(enqueued());
    for (int i = 0; i < comm->size; i++) {
        if (colors[i] != color) continue;
        if (i == comm->rank) rank = size;
        size++;
    }
    snprintf(name, sizeof name, "%.70s.%d.%d", comm->name, comm->num_splits++, color);
    *split = color < 0 ? NULL : join(name, size, rank);
    return OK;
}

/* What moves data and is not built says so. */
static int not_built(void) {
    snprintf(last_error, sizeof last_error, "fake NCCL: no point-to-point and no all-to-all");
    return INTERNAL_ERROR;
}
int ncclSend(void) { return not_built(); }
int ncclRecv(void) { return not_built(); }
int ncclAlltoAll(void) { return not_built(); }
int ncclCommInitAll(void) { return not_built(); }
