/* cuBLAS: handles and answers without which PyTorch does not go on; products themselves do nothing. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { HANDLE_BYTES = 256, HEURISTIC_BYTES = 96 }; /* cublasLtMatmulHeuristicResult_t */

static int new_handle(void **handle) { return !(*handle = calloc(1, HANDLE_BYTES)); }

int cublasCreate_v2(void **handle) { return new_handle(handle); }
int cublasDestroy_v2(void *handle) { return free(handle), 0; }
int cublasGetMathMode(void *handle, int *mode) { return (void)handle, *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, *mode = 0; }
size_t cublasLtGetVersion(void) { return 130101; }
int cublasLtCreate(void **handle) { return new_handle(handle); }
int cublasLtMatmulDescCreate(void **descriptor, int compute, int scale) {
    return (void)compute, (void)scale, new_handle(descriptor);
}
int cublasLtMatmulPreferenceCreate(void **preference) { return new_handle(preference); }
int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return (void)type, (void)rows, (void)columns, (void)stride, new_handle(layout);
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *count) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
    memset(results, 0, HEURISTIC_BYTES); /* one algorithm, without a workspace */
    return *count = 1, 0;
}
