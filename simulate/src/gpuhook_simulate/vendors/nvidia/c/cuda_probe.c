/* gpuhook-cuda-probe: prints the number and names of the devices that CUDA sees.
 *
 * With a number as its argument, it also allocates that many times 1 GiB of the first device's
 * memory, and prints the memory and the number of successful allocations.
 *
 * It loads libcuda.so.1 by its bare name, as CUDA programs do, so it also tests whether the
 * loader finds the driver. It works with real and with simulated drivers. The exit status is 0, or
 * 1 with a reason on standard error. With --context it creates a context on the first device,
 * prints its MPS limits, and keeps it until its standard input ends. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct cuda {
    int (*init)(unsigned flags);
    int (*count)(int *count);
    int (*get)(int *device, int ordinal);
    int (*name)(char *name, int length, int device);
    int (*uuid)(unsigned char uuid[16], int device);
    int (*error_name)(int error, const char **name);
    int (*create)(void **context, unsigned flags, int device);
    int (*memory)(size_t *unused, size_t *total);
    int (*allocate)(unsigned long long *address, size_t bytes);
    const char *(*limits)(void); /* only in the simulated library */
};

/* The _v2 of cuDeviceGetUuid names the MIG device and not its GPU; older drivers lack it. */
static int load(struct cuda *cuda)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    if (!library) {
        fprintf(stderr, "gpuhook-cuda-probe: %s\n", dlerror());
        return 0;
    }
    *(void **)&cuda->init = dlsym(library, "cuInit");
    *(void **)&cuda->count = dlsym(library, "cuDeviceGetCount");
    *(void **)&cuda->get = dlsym(library, "cuDeviceGet");
    *(void **)&cuda->name = dlsym(library, "cuDeviceGetName");
    *(void **)&cuda->error_name = dlsym(library, "cuGetErrorName");
    *(void **)&cuda->create = dlsym(library, "cuCtxCreate_v2");
    *(void **)&cuda->memory = dlsym(library, "cuMemGetInfo_v2");
    *(void **)&cuda->allocate = dlsym(library, "cuMemAlloc_v2");
    *(void **)&cuda->limits = dlsym(library, "cuGpuhookMpsLimits");
    *(void **)&cuda->uuid = dlsym(library, "cuDeviceGetUuid_v2");
    if (!cuda->uuid)
        *(void **)&cuda->uuid = dlsym(library, "cuDeviceGetUuid");
    if (cuda->init && cuda->count && cuda->get && cuda->name && cuda->uuid && cuda->error_name)
        return 1;
    fprintf(stderr, "gpuhook-cuda-probe: libcuda.so.1 lacks a function: %s\n", dlerror());
    return 0;
}

static int failed(const struct cuda *cuda, const char *call, int error)
{
    const char *name = NULL;

    if (error == 0)
        return 0;
    cuda->error_name(error, &name);
    fprintf(stderr, "gpuhook-cuda-probe: %s: %s (%d)\n", call, name ? name : "unknown", error);
    return 1;
}

static int print_device(const struct cuda *cuda, int ordinal)
{
    unsigned char u[16];
    char name[256];
    int device;

    if (failed(cuda, "cuDeviceGet", cuda->get(&device, ordinal)) ||
        failed(cuda, "cuDeviceGetName", cuda->name(name, sizeof name, device)) ||
        failed(cuda, "cuDeviceGetUuid", cuda->uuid(u, device)))
        return 1;
    printf("CUDA device %d: %s %s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-"
           "%02x%02x%02x%02x%02x%02x\n",
           ordinal, name, strstr(name, " MIG ") ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[4], u[5],
           u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    return 0;
}

static int use_memory(const struct cuda *cuda, long times)
{
    unsigned long long address;
    size_t unused, total;
    void *context;
    long done = 0;
    int error;

    if (failed(cuda, "cuCtxCreate", cuda->create(&context, 0, 0)) ||
        failed(cuda, "cuMemGetInfo", cuda->memory(&unused, &total)))
        return 1;
    printf("CUDA memory: %zu MiB of %zu MiB\n", unused >> 20, total >> 20);
    while (done < times && (error = cuda->allocate(&address, 1 << 30)) == 0)
        done++;
    printf("CUDA allocated: %ld GiB of %ld GiB\n", done, times);
    return done < times && failed(cuda, "cuMemAlloc", error);
}

/* Holds a context until standard input ends. */
static int hold(const struct cuda *cuda)
{
    void *context;
    char byte;

    if (!cuda->create || failed(cuda, "cuCtxCreate", cuda->create(&context, 0, 0)))
        return 1;
    printf("CUDA context%s%s", cuda->limits && *cuda->limits() ? " by MPS: " : "\n",
           cuda->limits ? cuda->limits() : "");
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        ;
    return 0;
}

int main(int argc, char **argv)
{
    struct cuda cuda;
    int count, i;

    if (!load(&cuda) || failed(&cuda, "cuInit", cuda.init(0)) ||
        failed(&cuda, "cuDeviceGetCount", cuda.count(&count)))
        return 1;
    printf("CUDA devices: %d\n", count);
    for (i = 0; i < count; i++)
        if (print_device(&cuda, i))
            return 1;
    if (argc < 2 || !count)
        return 0;
    return strcmp(argv[1], "--context") ? use_memory(&cuda, atol(argv[1])) : hold(&cuda);
}
