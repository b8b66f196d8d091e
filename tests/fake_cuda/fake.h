/* What the parts of the driver without a card share: described cards, the memory that every process
   holds on them, and the one queue of work that takes time (collectives). */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_CARDS = 8, MAX_PROCESSES = 4096 };

typedef struct {
    char name[96];
    double memory_gib, hidden_limit_gib, other_gib, context_mib;
    int major, minor, multiprocessors;
    long fails_at_launch; /* 0: never */
    bool lost, peer_access, mig;
    int xid;               /* that its failure is reported with; 79: it falls off the bus */
    unsigned slowdown;     /* bits of NVML's reasons for lower clocks */
} Card;

/* One process; its numbers stay readable after its end. */
typedef struct {
    _Atomic int pid;
    _Atomic size_t used[MAX_CARDS], peak[MAX_CARDS], pinned, peak_pinned;
    _Atomic int has_context[MAX_CARDS], failed[MAX_CARDS];
    _Atomic size_t launches, synchronizations, copies_to_host, collectives;
} Process;

/* cards.c: the cards as the bus has them, and as CUDA_VISIBLE_DEVICES shows them to this process */
int cards_on_the_bus(void);
const Card *card_on_the_bus(int index);
int visible_cards(void);
int driver_version(void); /* the newest CUDA that it serves: 12040 is 12.4 */
int bus_index(int device); /* -1: no such device */
void card_uuid(int index, unsigned char bytes[16]);
size_t total_bytes(int index);
size_t used_bytes(int index); /* of all living processes, and of others that were described */
Process *this_process(void);
Process *processes(void); /* MAX_PROCESSES of them */
bool is_alive(const Process *process);
void make_context(int index);
bool take_bytes(int index, size_t size); /* false: more than the card has */
void give_bytes(int index, size_t size);

/* runtime.c: the address ranges that are handed out */
enum kind { NOT_OURS = 0, PINNED = 1, ON_CARD = 2, MANAGED = 3 }; /* as cudaMemoryType */
typedef struct Range {
    uintptr_t start;
    size_t size;
    enum kind kind;
    int device;
    struct Range *next;
} Range;
void add_range(void *start, size_t size, enum kind kind, int device);
bool remove_range(void *start, Range *removed);
Range range_of(const void *address);

/* kernels.c: runs a kernel that is known to only fill memory; others do nothing */
void run_if_fill(const void *function, void **arguments);

/* queue.c: jobs run in order on a thread of their own, as on a stream */
typedef struct Job {
    void (*run)(struct Job *);
    struct Job *next;
} Job;
uint64_t enqueue(Job *job); /* number of the job; the queue frees it */
uint64_t enqueued(void);
bool is_done(uint64_t number);
void wait_for(uint64_t number);

#endif
