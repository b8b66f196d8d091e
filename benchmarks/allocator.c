/* Counts the bytes that torch's CPU allocator holds: every posix_memalign that libc10.so calls, and its free, in any thread.
   Preloaded by cpu_memory.py. lowmem_mark() closes a section and returns its highest count; the next one starts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS (1u << 21)
#define GONE ((void *)1)

static struct { void *pointer; size_t size; } table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t live, peak, entries;
static void *counted_caller;

static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static unsigned slot_of(void *pointer) { return (unsigned)(((uintptr_t)pointer >> 6) * 2654435761u) % SLOTS; }

static int is_counted(void *caller) {
    if (caller == counted_caller) return 1;
    Dl_info info;
    if (counted_caller || !dladdr(caller, &info) || !info.dli_fname || !strstr(info.dli_fname, "libc10.so")) return 0;
    counted_caller = caller;
    return 1;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    int status = real_memalign(out, alignment, size);
    if (status || !is_counted(__builtin_return_address(0))) return status;
    pthread_mutex_lock(&lock);
    unsigned at = slot_of(*out);
    while (table[at].pointer && table[at].pointer != GONE) at = (at + 1) % SLOTS;
    table[at].pointer = *out;
    table[at].size = size;
    entries++;
    live += (int64_t)size;
    if (live > peak) peak = live;
    pthread_mutex_unlock(&lock);
    return status;
}

void free(void *pointer) {
    if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
    if (pointer && entries) {
        pthread_mutex_lock(&lock);
        for (unsigned at = slot_of(pointer); table[at].pointer; at = (at + 1) % SLOTS)
            if (table[at].pointer == pointer) {
                live -= (int64_t)table[at].size;
                entries--;
                table[at].pointer = GONE;
                break;
            }
        pthread_mutex_unlock(&lock);
    }
    real_free(pointer);
}

/* Whether a pointer is one of those counted. */
int lowmem_holds(void *pointer) {
    pthread_mutex_lock(&lock);
    unsigned at = slot_of(pointer);
    while (table[at].pointer && table[at].pointer != pointer) at = (at + 1) % SLOTS;
    int found = table[at].pointer == pointer;
    pthread_mutex_unlock(&lock);
    return found;
}

/* The highest count since the last mark; *now gets the count at this moment. */
int64_t lowmem_mark(int64_t *now) {
    pthread_mutex_lock(&lock);
    int64_t highest = peak;
    *now = peak = live;
    pthread_mutex_unlock(&lock);
    return highest;
}
