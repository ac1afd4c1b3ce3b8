/* NVML: the table of private entry points that NVIDIA's own programs request.
 *
 * nvidia-smi refuses to start without this table ("Mismatch in versions"), but accepts that its
 * entries return "not supported". The first word is the table's size in bytes. */
#include <stddef.h>

#include "nvml.h"

#define ENTRIES 1024 /* nvidia-smi of driver 535 was observed to call entries up to 242 */

static int unsupported(void)
{
    return NVML_ERROR_NOT_SUPPORTED;
}

union entry {
    size_t size;
    int (*function)(void);
};

static const union entry table[ENTRIES] = {
    {.size = sizeof table},
    [1 ... ENTRIES - 1] = {.function = unsupported},
};

API int nvmlInternalGetExportTable(const void **result, const unsigned char id[16])
{
    if (!result || !id)
        return NVML_ERROR_INVALID_ARGUMENT;
    *result = table;
    return NVML_SUCCESS;
}
