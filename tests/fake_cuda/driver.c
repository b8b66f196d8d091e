/* The driver's own functions: contexts, and virtual memory, which expandable segments are made of: an
   address range is reserved once, and memory of the card is mapped into it as it grows. */
#define _GNU_SOURCE
#include "fake.h"

#include <cuda.h>
#include <stdlib.h>
#include <sys/mman.h>
#undef cuMemAddressReserve
#undef cuMemAddressFree

typedef struct {
    size_t size;
    int device;
} Memory;

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flags) {
    (void)properties, (void)flags;
    return *granularity = (size_t)2 << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    void *range = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *start = (CUdeviceptr)range;
    return range == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    return munmap((void *)start, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    (void)flags;
    int device = properties->location.id;
    if (bus_index(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    if (!take_bytes(bus_index(device), size)) return CUDA_ERROR_OUT_OF_MEMORY;
    Memory *memory = malloc(sizeof *memory);
    if (!memory) abort();
    *memory = (Memory){size, device};
    return *handle = (CUmemGenericAllocationHandle)memory, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Memory *memory = (Memory *)handle;
    give_bytes(bus_index(memory->device), memory->size);
    free(memory);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    (void)offset, (void)flags;
    if (mprotect((void *)start, size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
    add_range((void *)start, size, ON_CARD, ((Memory *)handle)->device);
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    Range range;
    wait_for(enqueued());
    for (CUdeviceptr at = start; at < start + size && remove_range((void *)at, &range);) at += range.size;
    mmap((void *)start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t count) {
    (void)start, (void)size, (void)access, (void)count;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    return *device = ordinal, bus_index(ordinal) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    /* shared handles between machines and multicast are not there */
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = this_process()->has_context[bus_index(device)];
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
    for (int device = 0; device < visible_cards(); device++)
        if (this_process()->has_context[bus_index(device)]) return *context = (CUcontext)this_process(), CUDA_SUCCESS;
    return *context = NULL, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : error ? "unknown error" : "no error";
    return CUDA_SUCCESS;
}
