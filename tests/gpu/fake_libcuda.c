// SPDX-License-Identifier: MIT
// fake_libcuda.c - what llamac/gpu/devices.py calls of the driver's library, for a machine with two devices.
#include <stdlib.h>
#include <string.h>

static int number_from(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}
int cuInit(unsigned flags) { return flags ? 1 : number_from("FAKE_INIT", 0); }
int cuDriverGetVersion(int *version) { *version = number_from("FAKE_VERSION", 13010); return 0; }
int cuDeviceGetCount(int *count) { *count = number_from("FAKE_COUNT", 2); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetName(char *name, int bytes, int device) {
    strncpy(name, device == 10 ? "NVIDIA First" : "NVIDIA Second", (size_t)bytes);
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device - 9) << 33; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute == 75) *value = number_from("FAKE_MAJOR", 9);
    else *value = attribute == 76 ? device - 10 : attribute == 16 ? 132 : -1;
    return 0;
}
int cuGetErrorName(int status, const char **name) { *name = status == 999 ? "CUDA_ERROR_UNKNOWN" : NULL; return 0; }
int cuGetErrorString(int status, const char **text) { *text = status == 999 ? "unknown error" : NULL; return 0; }
