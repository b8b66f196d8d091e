/* A libnvidia-ml.so.1 for tests: three GPUs, of which the middle one has fallen off the bus.

   The environment changes its answers: FAKE_NVML_INIT, _COUNT_ERROR, _HANDLE, _MEMORY and _CUDA_ERROR are the number
   that this call returns instead of success (of _HANDLE: for every card); _COUNT, _CAPABILITY ("7.0"), _NAME, _CUDA
   (12040 is CUDA 12.4), _MIG (1: on) are what it says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned long long total, free, used;
} Memory;

enum { SUCCESS = 0, GPU_IS_LOST = 15 };
static int devices[8];

static unsigned number(int *device) { return (unsigned)(device - devices); }
static int error(const char *name) { return getenv(name) ? atoi(getenv(name)) : SUCCESS; }
static const char *text_or(const char *name, const char *usual) { return getenv(name) ? getenv(name) : usual; }

const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "An error"; }
int nvmlInitWithFlags(unsigned flags) { return error("FAKE_NVML_INIT"); }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { return snprintf(text, length, "550.54.15"), SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = atoi(text_or("FAKE_NVML_CUDA", "13000"));
    return error("FAKE_NVML_CUDA_ERROR");
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)atoi(text_or("FAKE_NVML_COUNT", "3"));
    return error("FAKE_NVML_COUNT_ERROR");
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **device) {
    *device = &devices[index];
    if (error("FAKE_NVML_HANDLE")) return error("FAKE_NVML_HANDLE");
    return index == 1 && !getenv("FAKE_NVML_COUNT") ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetMemoryInfo(int *device, Memory *memory) {
    *memory = (Memory){21474836480ULL, 21045339750ULL, 429496730ULL};
    return error("FAKE_NVML_MEMORY");
}
int nvmlDeviceGetMigMode(int *device, unsigned *current, unsigned *pending) {
    *current = *pending = (unsigned)atoi(text_or("FAKE_NVML_MIG", "0"));
    return getenv("FAKE_NVML_MIG") ? SUCCESS : 3; /* Not Supported, as cards without MIG say */
}
int nvmlDeviceGetCudaComputeCapability(int *device, int *major, int *minor) {
    return sscanf(text_or("FAKE_NVML_CAPABILITY", "8.6"), "%d.%d", major, minor) == 2 ? SUCCESS : 2;
}
int nvmlDeviceGetName(int *device, char *text, unsigned length) {
    return snprintf(text, length, "%s", text_or("FAKE_NVML_NAME", "NVIDIA GeForce RTX 3080")), SUCCESS;
}
int nvmlDeviceGetUUID(int *device, char *text, unsigned length) {
    return snprintf(text, length, "GPU-%u%u%u%u", number(device), number(device), number(device), number(device)), SUCCESS;
}
