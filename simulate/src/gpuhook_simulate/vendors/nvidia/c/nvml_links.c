/* NVML: connections of GPUs - NVLink, PCI Express, NUMA nodes. */
#include <string.h>

#include "nvml.h"
#include "state.h"

#define LINKS 36 /* NVML_NVLINK_MAX_LINKS: link numbers are below this */
#define CAPABILITIES 6
#define SLI_BRIDGE 4
#define REMOTE_GPU 0
#define REMOTE_SWITCH 2
#define SWITCHES 4
#define FIRST_SWITCH_BUS 5
#define SWITCH_PCI_ID 0x22a310de
#define ERROR_COUNTERS 5

enum p2p { P2P_READ, P2P_WRITE, P2P_NVLINK, P2P_ATOMICS, P2P_PCI, P2P_END };
enum p2p_status { P2P_OK = 0, P2P_ACROSS_SOCKETS = 3, P2P_NOT_SUPPORTED = 5 };
enum level { SAME_GPU = 0, ONE_SWITCH = 10, HOST_BRIDGE = 30, SAME_NODE = 40, ACROSS_NODES = 50 };

/* The GPU at the other ends of a GPU's links, if GPUs are linked in pairs; NULL if it is gone. */
static const struct sim_gpu *pair_of(const struct sim_gpu *gpu)
{
    unsigned i;

    for (i = 0; i < SIM_GPU_COUNT; i++)
        if (sim_gpus[i].slot == (gpu->slot ^ 1))
            return &sim_gpus[i];
    return NULL;
}

/* True if a GPU's links are up, with something at their other ends. */
static int is_linked(const struct sim_gpu *gpu)
{
    const struct sim_gpu *pair;

    if (SIM_NVLINK == SIM_NVLINK_ALL)
        return gpu->nvlinks > 0;
    pair = SIM_NVLINK == SIM_NVLINK_PAIRS ? pair_of(gpu) : NULL;
    return gpu->nvlinks && pair && pair->nvlinks && !pair->lost;
}

static int are_linked(const struct sim_gpu *a, const struct sim_gpu *b)
{
    if (a == b || a->mig_enabled || b->mig_enabled || !is_linked(a) || !is_linked(b))
        return 0;
    return SIM_NVLINK == SIM_NVLINK_ALL || pair_of(a) == b;
}

/* A GPU with links, and one of them. */
static int resolve_link(nvml_device handle, unsigned link, const struct sim_gpu **gpu)
{
    int result = sim_resolve_gpu(handle, gpu);

    if (result)
        return result;
    if (link >= LINKS)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (SIM_NVLINK == SIM_NVLINK_NONE || !(*gpu)->nvlinks)
        return NVML_ERROR_NOT_SUPPORTED;
    return link < (*gpu)->nvlinks ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

API int nvmlDeviceGetNvLinkState(nvml_device handle, unsigned link, unsigned *active)
{
    const struct sim_gpu *gpu;
    int result = resolve_link(handle, link, &gpu);

    if (result)
        return result;
    if (!active)
        return NVML_ERROR_INVALID_ARGUMENT;
    *active = (unsigned)is_linked(gpu);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetNvLinkVersion(nvml_device handle, unsigned link, unsigned *version)
{
    const struct sim_gpu *gpu;
    int result = resolve_link(handle, link, &gpu);

    if (result)
        return result;
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = gpu->nvlink_version;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetNvLinkCapability(nvml_device handle, unsigned link, unsigned capability,
                                      unsigned *has)
{
    const struct sim_gpu *gpu;
    int result = resolve_link(handle, link, &gpu);

    if (result)
        return result;
    if (!has || capability >= CAPABILITIES)
        return NVML_ERROR_INVALID_ARGUMENT;
    *has = capability != SLI_BRIDGE;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetNvLinkErrorCounter(nvml_device handle, unsigned link, unsigned counter,
                                        u64 *errors)
{
    const struct sim_gpu *gpu;
    int result = resolve_link(handle, link, &gpu);

    if (result)
        return result;
    if (!errors || counter >= ERROR_COUNTERS)
        return NVML_ERROR_INVALID_ARGUMENT;
    *errors = 0;
    return NVML_SUCCESS;
}

/* A link that is up; the remote end of a link that is down is unknown. */
static int resolve_active(nvml_device handle, unsigned link, const struct sim_gpu **gpu)
{
    int result = resolve_link(handle, link, gpu);

    if (result)
        return result;
    return is_linked(*gpu) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(nvml_device handle, unsigned link, unsigned *type)
{
    const struct sim_gpu *gpu;
    int result = resolve_active(handle, link, &gpu);

    if (result)
        return result;
    if (!type)
        return NVML_ERROR_INVALID_ARGUMENT;
    *type = SIM_NVLINK == SIM_NVLINK_ALL ? REMOTE_SWITCH : REMOTE_GPU;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvml_device handle, unsigned link,
                                            struct nvml_pci_info *info)
{
    const struct sim_gpu *gpu, *pair;
    int result = resolve_active(handle, link, &gpu);

    if (result)
        return result;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (SIM_NVLINK == SIM_NVLINK_PAIRS) {
        pair = pair_of(gpu);
        sim_pci_info(info, pair->domain, pair->bus, pair->pci_id, pair->pci_subsystem);
    } else {
        sim_pci_info(info, gpu->domain, FIRST_SWITCH_BUS + link % SWITCHES, SWITCH_PCI_ID,
                     SWITCH_PCI_ID);
    }
    return NVML_SUCCESS;
}

/* As with nvmlDeviceGetPciInfo, the first version ends 16 bytes after the start of bus_id. */
API int nvmlDeviceGetNvLinkRemotePciInfo(nvml_device handle, unsigned link,
                                         struct nvml_pci_info *old)
{
    struct nvml_pci_info info;
    int result = nvmlDeviceGetNvLinkRemotePciInfo_v2(handle, link, &info);

    if (result)
        return result;
    if (!old)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_old_pci_info(old, &info);
    return NVML_SUCCESS;
}

/* GPUs 0 and 1, 2 and 3 ... share a PCI Express switch, four of them a host bridge. */
static enum level level_of(const struct sim_gpu *a, const struct sim_gpu *b)
{
    if (a == b)
        return SAME_GPU;
    if (a->numa_node != b->numa_node)
        return ACROSS_NODES;
    if (a->slot / 2 == b->slot / 2)
        return ONE_SWITCH;
    return a->slot / 4 == b->slot / 4 ? HOST_BRIDGE : SAME_NODE;
}

static int resolve_two(nvml_device a, nvml_device b, const struct sim_gpu **first,
                       const struct sim_gpu **second)
{
    int result = sim_resolve_gpu(a, first);

    return result ? result : sim_resolve_gpu(b, second);
}

API int nvmlDeviceGetTopologyCommonAncestor(nvml_device a, nvml_device b, unsigned *level)
{
    const struct sim_gpu *first, *second;
    int result = resolve_two(a, b, &first, &second);

    if (result)
        return result;
    if (!level)
        return NVML_ERROR_INVALID_ARGUMENT;
    *level = level_of(first, second);
    return NVML_SUCCESS;
}

static enum p2p_status p2p_status(const struct sim_gpu *a, const struct sim_gpu *b, unsigned what)
{
    if (a->mig_enabled || b->mig_enabled)
        return P2P_NOT_SUPPORTED;
    if (are_linked(a, b) && what != P2P_PCI)
        return P2P_OK;
    if (what == P2P_NVLINK || what == P2P_ATOMICS)
        return P2P_NOT_SUPPORTED;
    return level_of(a, b) == ACROSS_NODES ? P2P_ACROSS_SOCKETS : P2P_OK;
}

API int nvmlDeviceGetP2PStatus(nvml_device a, nvml_device b, unsigned what, unsigned *status)
{
    const struct sim_gpu *first, *second;
    int result = resolve_two(a, b, &first, &second);

    if (result)
        return result;
    if (!status || what >= P2P_END || first == second)
        return NVML_ERROR_INVALID_ARGUMENT;
    *status = p2p_status(first, second, what);
    return NVML_SUCCESS;
}

API int nvmlDeviceOnSameBoard(nvml_device a, nvml_device b, int *same)
{
    const struct sim_gpu *first, *second;
    int result = resolve_two(a, b, &first, &second);

    if (result)
        return result;
    if (!same)
        return NVML_ERROR_INVALID_ARGUMENT;
    *same = first == second;
    return NVML_SUCCESS;
}

/* The nearest NUMA nodes, a bit for each, in words of the C type. */
API int nvmlDeviceGetMemoryAffinity(nvml_device handle, unsigned size, unsigned long *nodes,
                                    unsigned scope)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!nodes || !size || scope > 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(nodes, 0, size * sizeof *nodes);
    nodes[0] = 1UL << gpu->numa_node;
    return NVML_SUCCESS;
}
