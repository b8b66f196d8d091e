/* A libnvidia-ml.so.1 for tests: three GPUs, of which the middle one has fallen off the bus. */
#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned long long total, free, used;
} Memory;

enum { SUCCESS = 0, GPU_IS_LOST = 15 };
static int devices[3];

static unsigned number(int *device) { return (unsigned)(device - devices); }

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { return snprintf(text, length, "550.54.15"), SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 3, SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **device) {
    *device = &devices[index];
    return index == 1 ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetMemoryInfo(int *device, Memory *memory) {
    *memory = (Memory){21474836480ULL, 21045339750ULL, 429496730ULL};
    return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(int *device, int *major, int *minor) { return *major = 8, *minor = 6, SUCCESS; }
int nvmlDeviceGetName(int *device, char *text, unsigned length) {
    return snprintf(text, length, "NVIDIA GeForce RTX 3080"), SUCCESS;
}
int nvmlDeviceGetUUID(int *device, char *text, unsigned length) {
    return snprintf(text, length, "GPU-%u%u%u%u", number(device), number(device), number(device), number(device)), SUCCESS;
}
