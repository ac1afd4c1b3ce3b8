/* A program that prints what nvidia-smi prints: the list (-L), a table, the versions; and that sets
 * and lists time slices (compute-policy), only of simulated drivers.
 *
 * Loads libnvidia-ml.so.1 by its bare name, so it also tests whether the loader finds the
 * driver. Works with real and with simulated drivers. Messages and exit statuses are those of
 * the real program. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void *device;

static int (*nvml_init)(void);
static const char *(*nvml_error)(int result);
static int (*nvml_driver)(char *text, unsigned size);
static int (*nvml_version)(char *text, unsigned size);
static int (*nvml_cuda)(int *version);
static int (*nvml_count)(unsigned *count);
static int (*nvml_handle)(unsigned index, device *handle);
static int (*nvml_name)(device handle, char *text, unsigned size);
static int (*nvml_uuid)(device handle, char *text, unsigned size);
static int (*nvml_pci)(device handle, void *info);
static int (*nvml_memory)(device handle, void *memory);
static int (*nvml_temperature)(device handle, unsigned sensor, unsigned *value);
static int (*nvml_power)(device handle, unsigned *value);
static int (*nvml_power_limit)(device handle, unsigned *value);
static int (*nvml_mig_mode)(device handle, unsigned *current, unsigned *pending);
static int (*nvml_mig_max)(device handle, unsigned *count);
static int (*nvml_mig)(device handle, unsigned index, device *mig);
static int (*nvml_compute)(device handle, unsigned *count, void *list);
static int (*nvml_graphics)(device handle, unsigned *count, void *list);
static int (*nvml_mps)(device handle, unsigned *count, void *list);
static int (*nvml_process_name)(unsigned pid, char *name, unsigned size);
static int (*get_time_slice)(device handle, unsigned *slice); /* NULL with a real driver */
static int (*set_time_slice)(device handle, unsigned slice);

struct memory { /* nvmlMemory_v2_t */
    unsigned version;
    unsigned long long total, reserved, free, used;
};

static const struct {
    const char *name;
    void *pointer;
} functions[] = {
    {"nvmlInit_v2", &nvml_init},
    {"nvmlErrorString", &nvml_error},
    {"nvmlSystemGetDriverVersion", &nvml_driver},
    {"nvmlSystemGetNVMLVersion", &nvml_version},
    {"nvmlSystemGetCudaDriverVersion", &nvml_cuda},
    {"nvmlDeviceGetCount_v2", &nvml_count},
    {"nvmlDeviceGetHandleByIndex_v2", &nvml_handle},
    {"nvmlDeviceGetName", &nvml_name},
    {"nvmlDeviceGetUUID", &nvml_uuid},
    {"nvmlDeviceGetPciInfo_v3", &nvml_pci},
    {"nvmlDeviceGetMemoryInfo_v2", &nvml_memory},
    {"nvmlDeviceGetTemperature", &nvml_temperature},
    {"nvmlDeviceGetPowerUsage", &nvml_power},
    {"nvmlDeviceGetEnforcedPowerLimit", &nvml_power_limit},
    {"nvmlDeviceGetMigMode", &nvml_mig_mode},
    {"nvmlDeviceGetMaxMigDeviceCount", &nvml_mig_max},
    {"nvmlDeviceGetMigDeviceHandleByIndex", &nvml_mig},
    {"nvmlDeviceGetComputeRunningProcesses_v3", &nvml_compute},
    {"nvmlDeviceGetGraphicsRunningProcesses_v3", &nvml_graphics},
    {"nvmlDeviceGetMPSComputeRunningProcesses_v3", &nvml_mps},
    {"nvmlSystemGetProcessName", &nvml_process_name},
};

static int load(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    size_t i;

    for (i = 0; library && i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(library, functions[i].name);

        if (!found)
            return 0;
        memcpy(functions[i].pointer, &found, sizeof found);
    }
    if (library) {
        *(void **)&get_time_slice = dlsym(library, "simGetTimeSlice");
        *(void **)&set_time_slice = dlsym(library, "simSetTimeSlice");
    }
    return library != NULL;
}

/* Says why NVML can't be used and returns the exit status for it. */
static int init_failed(int result)
{
    char version[80];

    if (result == 9) {
        puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
             "Make sure that the latest NVIDIA driver is installed and running.\n");
        return 9;
    }
    printf("Failed to initialize NVML: %s\n", nvml_error(result));
    if (result == 18 && nvml_version(version, sizeof version) == 0) {
        const char *dot = strchr(version, '.'); /* the library's own major version comes first */

        printf("NVML library version: %s\n", dot ? dot + 1 : version);
    }
    return result > 255 ? 255 : result;
}

static void bus_id(device handle, char *text, size_t size)
{
    char info[68] = ""; /* struct nvmlPciInfo: the text is the last 32 bytes */

    nvml_pci(handle, info);
    snprintf(text, size, "%s", info + 36);
}

static int list_migs(device gpu)
{
    unsigned current = 0, pending, max = 0, i;
    char name[128], uuid[96], *profile;
    device mig;

    if (nvml_mig_mode(gpu, &current, &pending) || !current || nvml_mig_max(gpu, &max))
        return 0;
    for (i = 0; i < max; i++) {
        if (nvml_mig(gpu, i, &mig) || nvml_name(mig, name, sizeof name) ||
            nvml_uuid(mig, uuid, sizeof uuid))
            continue;
        profile = strstr(name, " MIG ");
        printf("  MIG %-11s Device %2u: (UUID: %s)\n", profile ? profile + 5 : name, i, uuid);
    }
    return 0;
}

static int handle_failed(unsigned index, int result)
{
    printf("Unable to determine the device handle for GPU%u: %s\n", index, nvml_error(result));
    return result;
}

static int list(unsigned count)
{
    char name[128], uuid[96];
    unsigned i;
    device gpu;
    int status = 0;

    for (i = 0; i < count; i++) {
        int result = nvml_handle(i, &gpu);

        if (result) {
            status = handle_failed(i, result);
            continue;
        }
        if (nvml_name(gpu, name, sizeof name) == 0 && nvml_uuid(gpu, uuid, sizeof uuid) == 0)
            printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
        list_migs(gpu);
    }
    return status;
}

#define RULE "+-----------------------------------------+------------------------+"

static int row(unsigned index)
{
    struct memory memory = {sizeof memory | 2 << 24, 0, 0, 0, 0};
    unsigned temperature = 0, power = 0, limit = 0;
    char name[128] = "", bus[40] = "", text[64];
    device gpu;
    int result = nvml_handle(index, &gpu);

    if (result)
        return handle_failed(index, result);
    nvml_name(gpu, name, sizeof name);
    bus_id(gpu, bus, sizeof bus);
    nvml_memory(gpu, &memory);
    nvml_temperature(gpu, 0, &temperature);
    nvml_power(gpu, &power);
    nvml_power_limit(gpu, &limit);
    printf("| %3u  %-34.34s | %22s |\n", index, name, bus);
    snprintf(text, sizeof text, "%uC  %uW / %uW", temperature, power / 1000, limit / 1000);
    printf("|      %-34s |", text);
    snprintf(text, sizeof text, "%lluMiB / %lluMiB", memory.used >> 20, memory.total >> 20);
    printf(" %22s |\n" RULE "\n", text);
    return 0;
}

#define MOST_PROCESSES 4096

/* Prints a GPU's processes of one kind and returns how many there are. */
static unsigned list_processes(unsigned index, const char *kind,
                               int (*running)(device handle, unsigned *count, void *list))
{
    static struct {
        unsigned pid;
        unsigned long long bytes;
        unsigned gi, ci;
    } found[MOST_PROCESSES];
    char name[256], memory[32];
    unsigned count = MOST_PROCESSES, p;
    device gpu;

    if (nvml_handle(index, &gpu) || running(gpu, &count, found))
        return 0;
    for (p = 0; p < count; p++) {
        if (nvml_process_name(found[p].pid, name, sizeof name))
            strcpy(name, "[Not Found]");
        snprintf(memory, sizeof memory, "%lluMiB", found[p].bytes >> 20);
        printf("| %3u %8u %6s   %-29.29s %12s |\n", index, found[p].pid, kind, name, memory);
    }
    return count;
}

#define LINE "+------------------------------------------------------------------+"

static void processes(unsigned count)
{
    unsigned i, all = 0;

    puts("\n" LINE "\n| GPU      PID   Type   Process name                        Memory |\n" LINE);
    for (i = 0; i < count; i++) {
        all += list_processes(i, "C", nvml_compute);
        all += list_processes(i, "G", nvml_graphics);
        all += list_processes(i, "M+C", nvml_mps);
    }
    if (!all)
        puts("| No running processes found                                       |");
    puts(LINE);
}

static int table(unsigned count)
{
    char driver[80] = "", text[160];
    int cuda = 0, status = 0, result;
    unsigned i;

    nvml_driver(driver, sizeof driver);
    nvml_cuda(&cuda);
    snprintf(text, sizeof text, "Driver Version: %s   CUDA Version: %d.%d", driver, cuda / 1000,
             cuda % 1000 / 10);
    printf(LINE "\n"
           "| NVIDIA-SMI  %-52s |\n" RULE "\n"
           "| GPU  Name                               |                 Bus-Id |\n"
           "|      Temp Pwr:Usage/Cap                 |           Memory-Usage |\n" RULE "\n",
           text);
    for (i = 0; i < count; i++) {
        result = row(i);
        status = result ? result : status;
    }
    processes(count);
    return status;
}

static int versions(void)
{
    char driver[80] = "", nvml[80] = "";
    int cuda = 0;

    nvml_driver(driver, sizeof driver);
    nvml_version(nvml, sizeof nvml);
    nvml_cuda(&cuda);
    printf("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\n"
           "CUDA Version        : %d.%d\n",
           driver, nvml, driver, cuda / 1000, cuda % 1000 / 10);
    return 0;
}

static const char *const slices[] = {"Default", "Short", "Medium", "Long"};

/* Whether a GPU is the one of that number or UUID; every one is without a word. */
static int is_meant(unsigned index, device gpu, const char *word)
{
    char number[16], uuid[96];

    snprintf(number, sizeof number, "%u", index);
    return !word || strcmp(word, number) == 0 ||
           (nvml_uuid(gpu, uuid, sizeof uuid) == 0 && strcmp(word, uuid) == 0);
}

/* Sets a GPU's time slice; prints it where there is nothing to set. */
static int one_policy(unsigned index, device gpu, const char *set)
{
    unsigned slice = set ? (unsigned)(*set - '0') : 0;
    int result = 3; /* not supported */

    if (get_time_slice && set_time_slice)
        result = set ? set_time_slice(gpu, slice) : get_time_slice(gpu, &slice);
    if (result && set)
        printf("Failed to set timeslice policy with value %s for GPU %u : %s\n", slices[slice],
               index, nvml_error(result));
    else if (result)
        printf("Failed to get compute policies for GPU %u : %s\n", index, nvml_error(result));
    else if (set)
        printf("Successfully set timeslice policy with value %s for GPU %u\n", slices[slice],
               index);
    else
        printf("| %3u   Timeslice       %-13s |\n", index, slices[slice]);
    return result;
}

#define POLICY "+-------------------------------------+"
#define SET "--set-timeslice="

/* nvidia-smi compute-policy [-i ID] [-l | --list | --set-timeslice=0..3] */
static int policies(unsigned count, int argc, char **argv)
{
    const char *wanted = NULL, *set = NULL;
    unsigned i;
    int result, status = 0;
    device gpu;

    for (i = 2; i < (unsigned)argc; i++)
        if (strcmp(argv[i], "-i") == 0 && i + 1 < (unsigned)argc)
            wanted = argv[++i];
        else if (strncmp(argv[i], SET, sizeof SET - 1) == 0)
            set = argv[i] + sizeof SET - 1;
        else if (strcmp(argv[i], "-l") && strcmp(argv[i], "--list"))
            return 2;
    if (set && (*set < '0' || *set > '3' || set[1]))
        return 2;
    if (!set)
        puts(POLICY "\n| GPU compute policies:               |\n"
                    "| GPU     Name           Value        |\n"
                    "|=====================================|");
    for (i = 0; i < count; i++) {
        result = nvml_handle(i, &gpu);
        if (!result && !is_meant(i, gpu, wanted))
            continue;
        result = result ? handle_failed(i, result) : one_policy(i, gpu, set);
        status = result ? result : status;
    }
    if (!set && !status)
        puts(POLICY);
    return status;
}

int main(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : "";
    int is_policy = strcmp(word, "compute-policy") == 0;
    unsigned count = 0;
    int result;

    if (is_policy)
        word = "";
    if ((argc > 2 && !is_policy) || (*word && strcmp(word, "-L") && strcmp(word, "--list-gpus") &&
                     strcmp(word, "--version"))) {
        fprintf(stderr, "usage: %s [-L | --list-gpus | --version]\n", argv[0]);
        return 2;
    }
    if (!load()) {
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure "
             "that the NVIDIA Display Driver is properly installed and present in your system.\n"
             "Please also try adding directory that contains libnvidia-ml.so to your system PATH.");
        return 12;
    }
    result = nvml_init();
    if (result)
        return init_failed(result);
    if (strcmp(word, "--version") == 0)
        return versions();
    nvml_count(&count);
    if (count == 0 && *word) { /* an empty list isn't a failure */
        puts("No devices found.");
        return 0;
    }
    if (count == 0) {
        puts("No devices were found");
        return 6;
    }
    if (is_policy)
        return policies(count, argc, argv);
    return *word ? list(count) : table(count);
}
