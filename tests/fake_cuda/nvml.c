/* NVML over the same described cards: what nvidia-smi and the probe see, processes included. */
#include "fake.h"

#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { XID_CRITICAL_ERROR = 8, OFF_THE_BUS = 79 };
typedef struct {
    unsigned long long total, free, used;
} Memory;
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Running;

typedef struct {
    int *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} Event;

typedef struct {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} PciInfo;

static int handles[MAX_CARDS];
static int card_of(int *device) { return (int)(device - handles); }

/* How often a card has failed under a process */
static int failures(int card) {
    int count = 0;
    for (int i = 0; i < MAX_PROCESSES && processes()[i].pid; i++) count += processes()[i].failed[card];
    return count;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.65.06"), SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = driver_version(), SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = (unsigned)cards_on_the_bus(), SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **device) {
    if ((int)index >= cards_on_the_bus()) return INVALID_ARGUMENT;
    *device = &handles[index];
    const Card *card = card_on_the_bus((int)index);
    return card->lost || (card->xid == OFF_THE_BUS && failures((int)index)) ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, int **device) {
    unsigned domain, number;
    if (sscanf(bus, "%x:%x", &domain, &number) != 2 || !number) return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(number - 1, device);
}
int nvmlDeviceGetName(int *device, char *text, unsigned size) {
    return snprintf(text, size, "%s", card_on_the_bus(card_of(device))->name), SUCCESS;
}
int nvmlDeviceGetUUID(int *device, char *text, unsigned size) {
    return snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", card_of(device) + 1), SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(int *device, PciInfo *place) {
    *place = (PciInfo){.bus = (unsigned)card_of(device) + 1};
    return SUCCESS;
}
int nvmlDeviceGetMigMode(int *device, unsigned *current, unsigned *pending) {
    *current = *pending = card_on_the_bus(card_of(device))->mig;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(int *device, Memory *memory) {
    unsigned long long total = total_bytes(card_of(device)), used = used_bytes(card_of(device));
    if (used > total) used = total;
    return *memory = (Memory){total, total - used, used}, SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(int *device, int *major, int *minor) {
    const Card *card = card_on_the_bus(card_of(device));
    return *major = card->major, *minor = card->minor, SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(int *device, unsigned *count, Running *running) {
    unsigned room = *count, number = 0;
    size_t context = (size_t)(card_on_the_bus(card_of(device))->context_mib * (1 << 20));
    for (int i = 0; i < MAX_PROCESSES && processes()[i].pid; i++) {
        const Process *process = &processes()[i];
        if (!is_alive(process) || !process->has_context[card_of(device)]) continue;
        if (number < room)
            running[number] = (Running){(unsigned)process->pid, process->used[card_of(device)] + context, 0, 0};
        number++;
    }
    *count = number;
    return number > room ? INSUFFICIENT_SIZE : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(int *device, unsigned *count, Running *running) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, running);
}
int nvmlDeviceGetNvLinkRemoteDeviceType(int *device, unsigned link, int *type) {
    return (void)device, (void)link, (void)type, NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(int *device, unsigned link, void *information) {
    return (void)device, (void)link, (void)information, NOT_SUPPORTED;
}
int nvmlDeviceGetGpuFabricInfoV(int *device, void *information) {
    return (void)device, (void)information, SUCCESS; /* all zero: no fabric */
}

/* Clocks: a card is slower for the reasons that were described */

int nvmlDeviceGetCurrentClocksEventReasons(int *device, unsigned long long *reasons) {
    unsigned slowdown = card_on_the_bus(card_of(device))->slowdown;
    return *reasons = slowdown ? slowdown : 1 /* idle */, SUCCESS;
}
int nvmlDeviceGetMaxClockInfo(int *device, int type, unsigned *mhz) {
    return (void)device, (void)type, *mhz = 1980, SUCCESS;
}
int nvmlDeviceGetClockInfo(int *device, int type, unsigned *mhz) {
    return (void)type, *mhz = card_on_the_bus(card_of(device))->slowdown ? 600 : 210, SUCCESS;
}
int nvmlDeviceGetTemperature(int *device, int sensor, unsigned *celsius) {
    return (void)sensor, *celsius = card_on_the_bus(card_of(device))->slowdown & 0x60 ? 91 : 40, SUCCESS;
}

/* Events: the Xid of each failure since a card was registered, to those who listen */

static int listens[MAX_CARDS], reported[MAX_CARDS];

int nvmlEventSetCreate(void **set) { return *set = listens, SUCCESS; }
int nvmlEventSetFree(void *set) { return (void)set, memset(listens, 0, sizeof listens), SUCCESS; }
int nvmlDeviceRegisterEvents(int *device, unsigned long long types, void *set) {
    (void)set;
    listens[card_of(device)] = types & XID_CRITICAL_ERROR ? 1 : 0;
    reported[card_of(device)] = failures(card_of(device));
    return SUCCESS;
}
int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout_ms) {
    (void)set, (void)timeout_ms;
    for (int card = 0; card < cards_on_the_bus(); card++) {
        int xid = card_on_the_bus(card)->xid;
        if (!xid || !listens[card] || reported[card] >= failures(card)) continue;
        reported[card]++;
        return *event = (Event){&handles[card], XID_CRITICAL_ERROR, (unsigned long long)xid, 0, 0}, SUCCESS;
    }
    return TIMEOUT;
}
