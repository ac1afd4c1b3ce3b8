/* CUDA: contexts as empty handles, in which nothing can run. */
#include <stdlib.h>

#include "cuda.h"

#define STACK_DEPTH 64

struct sim_context {
    int ordinal;
    int retained; /* of a primary context */
};

static struct sim_context primary[SIM_MAX_GPUS];
static __thread struct sim_context *stack[STACK_DEPTH];
static __thread int depth;

API int cuCtxPushCurrent_v2(struct sim_context *context)
{
    if (!context || depth == STACK_DEPTH)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

ALIAS("cuCtxPushCurrent_v2") int cuCtxPushCurrent(struct sim_context *context);

API int cuCtxPopCurrent_v2(struct sim_context **context)
{
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

ALIAS("cuCtxPopCurrent_v2") int cuCtxPopCurrent(struct sim_context **context);

API int cuCtxGetCurrent(struct sim_context **context)
{
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

API int cuCtxSetCurrent(struct sim_context *context)
{
    if (depth)
        depth--;
    return context ? cuCtxPushCurrent_v2(context) : CUDA_SUCCESS;
}

API int cuCtxCreate_v2(struct sim_context **context, unsigned flags, int ordinal)
{
    int error;

    (void)flags;
    if (!sim_cuda_device(ordinal, &error))
        return error;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    error = sim_cuda_join_mps();
    if (error)
        return error;
    *context = calloc(1, sizeof **context);
    if (!*context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*context)->ordinal = ordinal;
    return cuCtxPushCurrent_v2(*context);
}

ALIAS("cuCtxCreate_v2") int cuCtxCreate(struct sim_context **context, unsigned flags, int ordinal);

/* The third version has affinity parameters before the flags, the fourth a structure. */
API int cuCtxCreate_v3(struct sim_context **context, void *parameters, int count, unsigned flags,
                       int ordinal)
{
    (void)parameters;
    (void)count;
    return cuCtxCreate_v2(context, flags, ordinal);
}

API int cuCtxCreate_v4(struct sim_context **context, void *parameters, unsigned flags, int ordinal)
{
    (void)parameters;
    return cuCtxCreate_v2(context, flags, ordinal);
}

API int cuCtxDestroy_v2(struct sim_context *context)
{
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth && stack[depth - 1] == context)
        depth--;
    free(context);
    return CUDA_SUCCESS;
}

ALIAS("cuCtxDestroy_v2") int cuCtxDestroy(struct sim_context *context);

API int cuCtxGetDevice(int *ordinal)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!ordinal)
        return CUDA_ERROR_INVALID_VALUE;
    *ordinal = stack[depth - 1]->ordinal;
    return CUDA_SUCCESS;
}

API int cuCtxSynchronize(void)
{
    return depth ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API int cuCtxGetApiVersion(struct sim_context *context, unsigned *version)
{
    (void)context;
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = 3020; /* the value of every driver since CUDA 4 */
    return CUDA_SUCCESS;
}

API int cuDevicePrimaryCtxRetain(struct sim_context **context, int ordinal)
{
    int error;

    if (!sim_cuda_device(ordinal, &error))
        return error;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    error = sim_cuda_join_mps();
    if (error)
        return error;
    primary[ordinal].ordinal = ordinal;
    primary[ordinal].retained++;
    *context = &primary[ordinal];
    return CUDA_SUCCESS;
}

API int cuDevicePrimaryCtxRelease_v2(int ordinal)
{
    int error;

    if (!sim_cuda_device(ordinal, &error))
        return error;
    if (!primary[ordinal].retained)
        return CUDA_ERROR_INVALID_CONTEXT;
    primary[ordinal].retained--;
    return CUDA_SUCCESS;
}

ALIAS("cuDevicePrimaryCtxRelease_v2") int cuDevicePrimaryCtxRelease(int ordinal);

API int cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active)
{
    int error;

    if (!sim_cuda_device(ordinal, &error))
        return error;
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = 0;
    *active = primary[ordinal].retained > 0;
    return CUDA_SUCCESS;
}

API int cuModuleLoad(void)
{
    return sim_cuda_initialized() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_NOT_SUPPORTED;
}

/* A simulated GPU can't compute. */
#define UNSUPPORTED(name) ALIAS("cuModuleLoad") int name(void);

UNSUPPORTED(cuMemAllocHost_v2)
UNSUPPORTED(cuMemAllocManaged)
UNSUPPORTED(cuMemcpyDtoH_v2)
UNSUPPORTED(cuMemcpyHtoD_v2)
UNSUPPORTED(cuModuleLoadData)
UNSUPPORTED(cuModuleLoadDataEx)
UNSUPPORTED(cuModuleGetFunction)
UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuLaunchKernel)
UNSUPPORTED(cuStreamCreate)
UNSUPPORTED(cuStreamDestroy_v2)
UNSUPPORTED(cuStreamSynchronize)
UNSUPPORTED(cuEventCreate)
UNSUPPORTED(cuEventDestroy_v2)

API int cuGetExportTable(const void **table, const void *id)
{
    (void)id;
    if (table)
        *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
