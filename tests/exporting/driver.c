// A CUDA driver that only takes notes: a line per launch with its grid, block, shared bytes and arguments.
// The environment says where to ($NOTES) and what a kernel's arguments are ($<kernel>: p for a pointer, n for an int, w at the
// end where Triton has to be given memory of its own).

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char names[64][256];
static int known;

int cuModuleLoadData(void **module, const void *image) {
  *module = (void *)image;
  return memcmp(image, "\177ELF", 4) != 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  strncpy(names[known], name, 255);
  *function = names[known++];
  return module == NULL;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
  FILE *notes = fopen(getenv("NOTES"), "a");
  fprintf(notes, "# %s attribute %d = %d\n", (char *)function, attribute, value);
  return fclose(notes);
}

int cuGetErrorString(int code, const char **text) {
  *text = code == 1 ? "not an image" : "unknown";
  return 0;
}

int cuCtxGetDevice(int *device) { return *device = 0; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = atoi(getenv("CAPABILITY"));
  *value = attribute == 75 ? *value / 10 : *value % 10;
  return device;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  FILE *notes = fopen(getenv("NOTES"), "a");
  const char *kinds = getenv(function);
  fprintf(notes, "%s %u,%u,%u %u,%u,%u %u", (char *)function, gx, gy, gz, bx, by, bz, shared);
  int i = 0;
  for (; kinds[i] && kinds[i] != 'w'; i++) {
    if (kinds[i] == 'p') fprintf(notes, " %llu", (unsigned long long)(uintptr_t)*(void **)arguments[i]);
    else fprintf(notes, " %d", *(int32_t *)arguments[i]);
  }
  fprintf(notes, "\n");
  int scratch = !*(void **)arguments[i] == !kinds[i] && !*(void **)arguments[i + 1];  /* Triton's own two */
  return fclose(notes) || stream || extra || !scratch;
}
