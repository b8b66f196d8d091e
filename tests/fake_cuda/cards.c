/* Described cards and who holds how much of them.

   $NVIDIA_FAKE_CUDA/cards: a card a line, "name=NVIDIA GeForce RTX 3080;memory_gib=20;capability=8.6;...".
   $NVIDIA_FAKE_CUDA/processes: shared by every process of this machine that opened a card. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t GIB = (size_t)1 << 30, MIB = (size_t)1 << 20;
static const size_t GRANULE = (size_t)2 << 20; /* the driver hands out 2 MiB at a time */

static Card cards[MAX_CARDS];
static int num_cards, devices[MAX_CARDS], num_devices;
static Process *table, *own;
static pthread_once_t read_once = PTHREAD_ONCE_INIT, shown_once = PTHREAD_ONCE_INIT, mapped_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t own_lock = PTHREAD_MUTEX_INITIALIZER;

static void die(const char *what) {
    fprintf(stderr, "fake CUDA: %s: %s\n", what, strerror(errno));
    _exit(70);
}

static void in_folder(const char *name, char *path, size_t size) {
    const char *folder = getenv("NVIDIA_FAKE_CUDA");
    if (!folder) {
        fprintf(stderr, "fake CUDA: NVIDIA_FAKE_CUDA names no folder with a file of cards\n");
        _exit(70);
    }
    snprintf(path, size, "%s/%s", folder, name);
}

static void set_fact(Card *card, const char *key, const char *value) {
    if (!strcmp(key, "name")) snprintf(card->name, sizeof card->name, "%s", value);
    else if (!strcmp(key, "memory_gib")) card->memory_gib = atof(value);
    else if (!strcmp(key, "hidden_limit_gib")) card->hidden_limit_gib = atof(value);
    else if (!strcmp(key, "other_gib")) card->other_gib = atof(value);
    else if (!strcmp(key, "context_mib")) card->context_mib = atof(value);
    else if (!strcmp(key, "capability")) sscanf(value, "%d.%d", &card->major, &card->minor);
    else if (!strcmp(key, "multiprocessors")) card->multiprocessors = atoi(value);
    else if (!strcmp(key, "fails_at_launch")) card->fails_at_launch = atol(value);
    else if (!strcmp(key, "lost")) card->lost = atoi(value);
    else if (!strcmp(key, "mig")) card->mig = atoi(value);
    else if (!strcmp(key, "xid")) card->xid = atoi(value);
    else if (!strcmp(key, "slowdown")) card->slowdown = (unsigned)atoi(value);
    else if (!strcmp(key, "peer_access")) card->peer_access = atoi(value);
    else {
        fprintf(stderr, "fake CUDA: a card has no %s\n", key);
        _exit(70);
    }
}

static int by_speed(const void *a, const void *b) {
    const Card *one = &cards[*(const int *)a], *other = &cards[*(const int *)b];
    int difference = (other->major - one->major) * 100 + other->minor - one->minor;
    if (!difference) difference = other->multiprocessors - one->multiprocessors;
    return difference ? difference : *(const int *)a - *(const int *)b;
}

/* A number of the order in which CUDA has them, or the start of a UUID; -1: neither */
static int named(const char *word, const int *order, int count) {
    char *end, uuid[48];
    long number = strtol(word, &end, 10);
    if (end != word && !*end) return number >= 0 && number < count ? order[number] : -1;
    for (int i = 0; i < count; i++) {
        snprintf(uuid, sizeof uuid, "GPU-%08x-0000-0000-0000-000000000000", order[i] + 1);
        if (!strncmp(word, "GPU-", 4) && !strncmp(word, uuid, strlen(word))) return order[i];
    }
    return -1;
}

static void show_cards(void) {
    int order[MAX_CARDS], count = 0;
    for (int i = 0; i < num_cards; i++)
        if (!cards[i].lost) order[count++] = i;
    const char *how = getenv("CUDA_DEVICE_ORDER"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!how || strcmp(how, "PCI_BUS_ID")) qsort(order, (size_t)count, sizeof *order, by_speed);
    if (!visible) {
        memcpy(devices, order, sizeof order);
        num_devices = count;
        return;
    }
    char words[1024], *rest = NULL;
    snprintf(words, sizeof words, "%s", visible);
    for (char *word = strtok_r(words, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        int index = named(word, order, count);
        if (index < 0 || num_devices == MAX_CARDS) break; /* the first wrong word ends the list */
        devices[num_devices++] = index;
    }
}

static void read_cards(void) {
    char path[4096], line[1024];
    in_folder("cards", path, sizeof path);
    FILE *file = fopen(path, "r");
    if (!file) die(path);
    while (num_cards < MAX_CARDS && fgets(line, sizeof line, file)) {
        Card *card = &cards[num_cards++];
        *card = (Card){.name = "NVIDIA GeForce RTX 3080", .memory_gib = 20, .context_mib = 300,
                       .major = 8, .minor = 6, .multiprocessors = 68};
        char *rest = NULL;
        line[strcspn(line, "\n")] = 0;
        for (char *fact = strtok_r(line, ";", &rest); fact; fact = strtok_r(NULL, ";", &rest)) {
            char *equals = strchr(fact, '=');
            if (!equals) continue;
            *equals = 0;
            set_fact(card, fact, equals + 1);
        }
    }
    fclose(file);
}

static void read_cards_once(void) { pthread_once(&read_once, read_cards); }
/* CUDA reads its variables when it is first called, which may be after NVML */
static void show_cards_once(void) { read_cards_once(), pthread_once(&shown_once, show_cards); }

int cards_on_the_bus(void) { return read_cards_once(), num_cards; }
const Card *card_on_the_bus(int index) { return read_cards_once(), &cards[index]; }
int visible_cards(void) { return show_cards_once(), num_devices; }

int driver_version(void) {
    const char *version = getenv("NVIDIA_FAKE_DRIVER");
    return version ? atoi(version) : 13000;
}

int bus_index(int device) {
    show_cards_once();
    return device >= 0 && device < num_devices ? devices[device] : -1;
}

void card_uuid(int index, unsigned char bytes[16]) {
    memset(bytes, 0, 16);
    bytes[3] = (unsigned char)(index + 1);
}

static void map_processes(void) {
    char path[4096];
    in_folder("processes", path, sizeof path);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    size_t size = sizeof(Process) * MAX_PROCESSES;
    if (file < 0 || ftruncate(file, (off_t)size)) die(path);
    table = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (table == MAP_FAILED) die(path);
    close(file);
}

Process *processes(void) { return pthread_once(&mapped_once, map_processes), table; }

Process *this_process(void) {
    pthread_mutex_lock(&own_lock);
    if (!own || own->pid != getpid()) { /* a forked child gets a place of its own */
        own = NULL;
        for (int i = 0; i < MAX_PROCESSES && !own; i++) {
            int nobody = 0;
            if (__atomic_compare_exchange_n((int *)&processes()[i].pid, &nobody, getpid(), false,
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
                own = &table[i];
        }
        if (!own) die("more processes than the table holds");
    }
    pthread_mutex_unlock(&own_lock);
    return own;
}

bool is_alive(const Process *process) {
    return process->pid && (!kill(process->pid, 0) || errno == EPERM);
}

size_t total_bytes(int index) { return (size_t)(card_on_the_bus(index)->memory_gib * (double)GIB); }

size_t used_bytes(int index) {
    const Card *card = card_on_the_bus(index);
    size_t context = (size_t)(card->context_mib * (double)MIB);
    size_t sum = (size_t)(card->other_gib * (double)GIB);
    for (int i = 0; i < MAX_PROCESSES && processes()[i].pid; i++)
        if (is_alive(&table[i])) sum += table[i].used[index] + (table[i].has_context[index] ? context : 0);
    return sum;
}

void make_context(int index) { this_process()->has_context[index] = 1; }

static size_t granules(size_t size) { return (size + GRANULE - 1) / GRANULE * GRANULE; }

static void raise_to(_Atomic size_t *peak, size_t value) {
    if (value > *peak) *peak = value;
}

bool take_bytes(int index, size_t size) {
    const Card *card = card_on_the_bus(index);
    make_context(index);
    Process *process = this_process();
    size_t used = used_bytes(index) + granules(size);
    if (used > total_bytes(index)) return false;
    if (card->hidden_limit_gib > 0 && used > (size_t)(card->hidden_limit_gib * (double)GIB)) return false;
    process->used[index] += granules(size);
    raise_to(&process->peak[index], process->used[index]);
    return true;
}

void give_bytes(int index, size_t size) { this_process()->used[index] -= granules(size); }
