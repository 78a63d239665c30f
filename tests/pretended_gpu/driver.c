// A pretended CUDA driver. It answers as an H100, keeps what was loaded, and hands every launch to a callback.
#include "cuda.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// What a CUmodule is here: a cubin, and whether it was unloaded. It is never freed: who still has it can be told.
typedef struct {
  const void *image;
  int unloaded;
} Module;

// What a CUfunction is here: the cubin it was loaded from, its name, the shared memory that it may ask for, its module.
typedef struct {
  const void *image;
  char name[512];
  int max_dynamic;
  Module *module;
} Function;

typedef CUresult (*Launch)(const CUlaunchConfig *, Function *, void **);

static Launch on_launch;
static __thread CUcontext context;
static int threads_per_block = 1024;

void pretend_launch(Launch launch) { on_launch = launch; }
void pretend_threads(int most) { threads_per_block = most; }

// ---------------------------------------------------------------- contexts and devices
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = (int)((uintptr_t)context - 0x1000), CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *current) { return *current = context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext wanted) { return context = wanted, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
  return *made = (CUcontext)(uintptr_t)(0x1000 + device), CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  switch (error) {
  case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; break;
  case CUDA_ERROR_INVALID_HANDLE: *text = "invalid resource handle"; break;
  case CUDA_ERROR_OUT_OF_MEMORY: *text = "out of memory"; break;
  case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: *text = "too many resources requested for launch"; break;
  case CUDA_ERROR_ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; break;
  default: *text = "unknown error";
  }
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- modules and functions
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  Module *made = calloc(1, sizeof(Module));
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  made->image = image;
  return *module = (CUmodule)made, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return ((Module *)module)->unloaded = 1, CUDA_SUCCESS; }
int pretended_unloaded(const Function *function) { return function->module->unloaded; }
CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
  Function *made = calloc(1, sizeof(Function));
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  made->module = (Module *)module;
  made->image = made->module->image;
  made->max_dynamic = 49152;
  strncpy(made->name, name, sizeof made->name - 1);
  return *found = (CUfunction)made, CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? threads_per_block
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}
// An attribute that this CUDA does not know is refused: Triton 3.8 asks for one of a later CUDA's before the usual one.
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) ((Function *)function)->max_dynamic = value;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  return *clusters = 1, CUDA_SUCCESS;
}

// ---------------------------------------------------------------- pointers and launches
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr *)out = pointer, CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (pretended_unloaded((Function *)function)) return CUDA_ERROR_INVALID_HANDLE;
  int empty = !config->gridDimX || !config->gridDimY || !config->gridDimZ;
  int large = config->gridDimY > 65535 || config->gridDimZ > 65535 || config->blockDimX > (unsigned)threads_per_block;
  if (empty || large || (int)config->sharedMemBytes > ((Function *)function)->max_dynamic) return CUDA_ERROR_INVALID_VALUE;
  return on_launch ? on_launch(config, (Function *)function, parameters) : CUDA_SUCCESS;
}
