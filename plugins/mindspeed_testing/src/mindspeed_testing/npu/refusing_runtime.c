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
