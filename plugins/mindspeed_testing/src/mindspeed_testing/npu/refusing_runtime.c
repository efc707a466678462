/* The device runtime of a machine without a device, as far as torch_npu asks for it while it is loaded.

   Every function refuses with REFUSED unless it is written out below; the list of the others is generated from
   the symbols that the installed torch_npu leaves undefined (other_symbols.h). With
   MINDSPEED_NPU_STUB_DEVICES=1 a device is announced that has a context and streams but no memory: shapes can be
   computed for it, values cannot. Memory, copies and kernels are refused always. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REFUSED 507899 /* driver internal error */
#define SUCCESS 0

static void traced(const char *name) {
  if (getenv("MINDSPEED_NPU_STUB_TRACE")) fprintf(stderr, "npu stub: %s\n", name);
}

static uint32_t devices(void) {
  const char *count = getenv("MINDSPEED_NPU_STUB_DEVICES");
  return count && strcmp(count, "1") == 0;
}

static int with_device(const char *name) {
  traced(name);
  return devices() ? SUCCESS : REFUSED;
}

#define STATUS(name) int name(void) { traced(#name); return REFUSED; }
#define POINTER(name) void *name(void) { traced(#name); return NULL; }
#define WITH_DEVICE(name) int name(void) { return with_device(#name); }

#include "other_symbols.h"

int aclInit(const char *configuration) { traced("aclInit"); return SUCCESS; }
int aclFinalize(void) { traced("aclFinalize"); return SUCCESS; }
void aclAppLog(void) { }

const char *aclrtGetSocName(void) {
  const char *name = getenv("MINDSPEED_NPU_STUB_SOC");
  return name ? name : "Ascend910B1";
}

const char *aclGetRecentErrMsg(void) { return "no device: these libraries only stand in for the runtime"; }

int aclrtGetDeviceCount(uint32_t *count) { traced("aclrtGetDeviceCount"); *count = devices(); return SUCCESS; }

static char context;

int aclrtSetDevice(int32_t device) { return device == 0 ? with_device("aclrtSetDevice") : REFUSED; }
int aclrtGetDevice(int32_t *device) { *device = 0; return with_device("aclrtGetDevice"); }
int aclrtGetCurrentContext(void **current) { *current = &context; return with_device("aclrtGetCurrentContext"); }
WITH_DEVICE(aclrtSetCurrentContext)
WITH_DEVICE(aclrtResetDevice)

static int new_stream(void **stream, const char *name) {
  static char streams[4096];
  static int next;
  *stream = &streams[next++ % 4096];
  return with_device(name);
}

int aclrtCreateStream(void **stream) { return new_stream(stream, "aclrtCreateStream"); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
  return new_stream(stream, "aclrtCreateStreamWithConfig");
}
WITH_DEVICE(aclrtDestroyStream)
WITH_DEVICE(aclrtDestroyStreamForce)
WITH_DEVICE(aclrtSetDeviceSatMode)
WITH_DEVICE(aclrtSetOpExecuteTimeOut)
WITH_DEVICE(aclrtSetStreamOverflowSwitch)
WITH_DEVICE(aclrtSetSysParamOpt)
WITH_DEVICE(aclSetCompileopt)

int aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return with_device("aclrtGetSysParamOpt"); }

static const char DISABLED[] = "disable";
size_t aclGetCompileoptSize(int option) { return sizeof DISABLED; }
int aclGetCompileopt(int option, char *value, size_t length) {
  if (length < sizeof DISABLED) return REFUSED;
  memcpy(value, DISABLED, sizeof DISABLED);
  return with_device("aclGetCompileopt");
}

/* Memory of the value device (while MINDSPEED_NPU_STUB_MEMORY=1): the host's. Operations never reach this runtime
   then, only allocations and copies do, so that whatever is queued is done when the call returns. */

static uint32_t memory(void) {
  const char *value = getenv("MINDSPEED_NPU_STUB_MEMORY");
  return devices() && value && strcmp(value, "1") == 0;
}

static int with_memory(const char *name) {
  traced(name);
  return memory() ? SUCCESS : REFUSED;
}

#define WITH_MEMORY(name) int name(void) { return with_memory(#name); }

static int allocate(void **pointer, size_t size, const char *name) {
  if (with_memory(name)) return REFUSED;
  return posix_memalign(pointer, 512, size ? size : 1) ? REFUSED : SUCCESS;
}

int aclrtMalloc(void **pointer, size_t size, int policy) { return allocate(pointer, size, "aclrtMalloc"); }
int aclrtMallocAlign32(void **pointer, size_t size, int policy) {
  return allocate(pointer, size, "aclrtMallocAlign32");
}
int aclrtMallocHost(void **pointer, size_t size) { return allocate(pointer, size, "aclrtMallocHost"); }
static int release(void *pointer, const char *name) {
  if (!pointer) return with_memory(name);
  traced(name);
  free(pointer);
  return SUCCESS;
}

int aclrtFree(void *pointer) { return release(pointer, "aclrtFree"); }
int aclrtFreeHost(void *pointer) { return release(pointer, "aclrtFreeHost"); }

int aclrtGetMemInfo(int kind, size_t *unused, size_t *total) {
  *unused = *total = (size_t)1 << 36;
  return with_memory("aclrtGetMemInfo");
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  if (with_memory("aclrtMemcpy")) return REFUSED;
  memmove(to, from, size);
  return SUCCESS;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
  return aclrtMemcpy(to, room, from, size, kind);
}

int aclrtMemset(void *pointer, size_t room, int32_t value, size_t size) {
  if (with_memory("aclrtMemset")) return REFUSED;
  memset(pointer, value, size);
  return SUCCESS;
}

static int new_event(void **event, const char *name) {
  new_stream(event, name);
  return with_memory(name);
}

int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return new_event(event, "aclrtCreateEventWithFlag"); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) {
  return new_event(event, "aclrtCreateEventExWithFlag");
}

int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return with_memory("aclrtQueryEventStatus"); }
int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
  *milliseconds = 0;
  return with_memory("aclrtEventElapsedTime");
}

WITH_MEMORY(aclrtDestroyEvent)
WITH_MEMORY(aclrtRecordEvent)
WITH_MEMORY(aclrtResetEvent)
WITH_MEMORY(aclrtStreamWaitEvent)
WITH_MEMORY(aclrtSynchronizeDevice)
WITH_MEMORY(aclrtSynchronizeEvent)
WITH_MEMORY(aclrtSynchronizeStream)
WITH_MEMORY(aclrtSynchronizeStreamWithTimeout)
