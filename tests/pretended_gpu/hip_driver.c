// A pretended HIP runtime. It answers as an MI300X, keeps what was loaded, and hands every launch to the callback of
// driver.c, in the same words.
#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const void *image;
  char name[512];
  int max_dynamic;
} Function;

// As CUlaunchConfig.
typedef struct {
  unsigned gx, gy, gz, bx, by, bz, shared;
  void *stream, *attributes;
  unsigned count;
} Config;

typedef int (*Launch)(const Config *, Function *, void **);

static Launch on_launch;
static int threads_per_block = 1024;

void pretend_launch(Launch launch) { on_launch = launch; }
void pretend_threads(int most) { threads_per_block = most; }

static hipError_t properties(hipDeviceProp_t *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "AMD Instinct MI300X");
  strcpy(properties->gcnArchName, "gfx942:sramecc+:xnack-");
  properties->sharedMemPerBlock = 65536;
  properties->regsPerBlock = 65536;
  properties->multiProcessorCount = 304;
  properties->warpSize = 64;
  properties->clockRate = 2100000;
  properties->memoryClockRate = 1300000;
  properties->memoryBusWidth = 8192;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->cooperativeLaunch = 1;
  return hipSuccess;
}
static hipError_t last_error(void) { return hipSuccess; }
static const char *error_string(hipError_t error) {
  return error == hipErrorOutOfMemory          ? "out of memory"
         : error == hipErrorLaunchOutOfResources ? "out of resources"
         : error == hipErrorIllegalAddress       ? "an illegal memory access was encountered"
                                                 : "invalid argument";
}
static hipError_t load(hipModule_t *module, const void *image, unsigned count, hipJitOption *options, void **values) {
  return *module = (hipModule_t)image, hipSuccess;
}
static hipError_t function_of(hipFunction_t *found, hipModule_t module, const char *name) {
  Function *made = calloc(1, sizeof(Function));
  if (!made) return hipErrorOutOfMemory;
  made->image = module;
  made->max_dynamic = 65536;
  strncpy(made->name, name, sizeof made->name - 1);
  return *found = (hipFunction_t)made, hipSuccess;
}
static hipError_t attribute(int *value, hipFunction_attribute wanted, hipFunction_t function) {
  *value = wanted == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? threads_per_block
           : wanted == HIP_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                              : 0;
  return hipSuccess;
}
static hipError_t pointer(void *out, hipPointer_attribute wanted, hipDeviceptr_t place) {
  return *(hipDeviceptr_t *)out = place, hipSuccess;
}
static hipError_t launch(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                         unsigned bz, unsigned shared, hipStream_t stream, void **parameters, void **extra) {
  Config config = {gx, gy, gz, bx, by, bz, shared, stream, NULL, 0};
  if (!gx || !gy || !gz || bx > (unsigned)threads_per_block || (int)shared > ((Function *)function)->max_dynamic)
    return hipErrorInvalidValue;
  return on_launch ? on_launch(&config, (Function *)function, parameters) : hipSuccess;
}

hipError_t hipDriverGetVersion(int *version) { return *version = 60443483, hipSuccess; }

static const struct {
  const char *name;
  void *function;
} functions[] = {
    {"hipGetLastError", last_error}, {"hipGetErrorString", error_string}, {"hipGetDeviceProperties", properties},
    {"hipModuleLoadDataEx", load}, {"hipModuleGetFunction", function_of}, {"hipFuncGetAttribute", attribute},
    {"hipPointerGetAttribute", pointer}, {"hipModuleLaunchKernel", launch},
};

// What Triton asks for and has no entry is for clusters and cooperative kernels, of which there are none here.
hipError_t hipGetProcAddress(const char *symbol, void **found, int version, uint64_t flags,
                             hipDriverProcAddressQueryResult *status) {
  *found = NULL;
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (!strcmp(functions[i].name, symbol)) *found = functions[i].function;
  return hipSuccess;
}
