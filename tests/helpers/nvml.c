/* A stand-in for NVIDIA's management library, driven by the file `scene` beside it, which is read
   again whenever it changes. Built by fake_nvml.py; -DNEWEST=1 or 2 leaves out newer process lists.

   init CODE                       what nvmlInit answers
   driver 550.54.15
   cuda 12040
   gpu  name=NVIDIA_H200 uuid=GPU-0 use=97 total=1 used=1 reserved=0 temp=64 power=612000 limit=700000
        fan=30 code=15 handle=15 lists=4 wide=1 grow=1 mig=1 capability=90 errors=1 rows=1
        pending=1 pages=1 energy=1
        (- or nothing: not supported; code: of every question; handle: of getting hold of it;
        lists: of its process lists; rows, pending: remapped for
        uncorrected errors, and still to be; pages: still to be retired; wide: entries of 32 bytes; grow: more have come
        when the list is asked for)
   slice of=0 name=NVIDIA_H200_MIG_3g.71gb uuid=MIG-0 total=1 used=1
   process on=0 pid=1 memory=1 slice=0 draws=1 once=1
        (memory=-: not known; once: gone after it was listed once) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#ifndef NEWEST
#define NEWEST 3
#endif
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { MOST = 512 };
#define ABSENT (-1LL)

typedef struct {
  char name[96], uuid[96];
  long long use, total, used, reserved, temp, power, limit, fan, code, handle, lists, wide, grow, mig;
  long long capability, errors, rows, pending, pages, energy;
  int parent; /* of a slice; -1 of a GPU */
} Device;
typedef struct { long long on, pid, memory, slice, draws, once, told; } Process;

static Device gpus[64], slices[64];
static Process processes[MOST];
static int gpu_count, slice_count, process_count, init_code, cuda;
static char driver[96];
static struct timespec read_at;

static const char *value(char *line, const char *key, char *out) {
  char wanted[32];
  snprintf(wanted, sizeof wanted, " %s=", key);
  char *at = strstr(line, wanted);
  if (!at) return NULL;
  sscanf(at + strlen(wanted), "%95s", out);
  return out;
}
static long long number(char *line, const char *key, long long otherwise) {
  char text[96];
  return value(line, key, text) && strcmp(text, "-") ? atoll(text) : otherwise;
}
static void words(char *line, const char *key, char *out) {
  if (!value(line, key, out)) out[0] = 0;
  for (; *out; out++)
    if (*out == '_') *out = ' ';
}
static Device device(char *line, int parent) {
  Device d = {.parent = parent};
  words(line, "name", d.name);
  words(line, "uuid", d.uuid);
  d.use = number(line, "use", ABSENT), d.total = number(line, "total", ABSENT);
  d.used = number(line, "used", 0), d.reserved = number(line, "reserved", 0);
  d.temp = number(line, "temp", ABSENT), d.power = number(line, "power", ABSENT);
  d.limit = number(line, "limit", ABSENT), d.fan = number(line, "fan", ABSENT);
  d.code = number(line, "code", OK), d.handle = number(line, "handle", OK);
  d.lists = number(line, "lists", OK), d.wide = number(line, "wide", 0);
  d.grow = number(line, "grow", 0), d.mig = number(line, "mig", 0);
  d.capability = number(line, "capability", 90), d.errors = number(line, "errors", ABSENT);
  d.rows = number(line, "rows", ABSENT), d.pending = number(line, "pending", 0);
  d.pages = number(line, "pages", ABSENT), d.energy = number(line, "energy", ABSENT);
  return d;
}
static void read_scene(void) {
  Dl_info self;
  char path[4096], line[1024];
  struct stat now;
  dladdr((void *)read_scene, &self);
  snprintf(path, sizeof path, "%s", self.dli_fname);
  strcpy(strrchr(path, '/') + 1, "scene");
  if (stat(path, &now) || !memcmp(&now.st_mtim, &read_at, sizeof read_at)) return;
  FILE *file = fopen(path, "r");
  if (!file) return;
  read_at = now.st_mtim;
  gpu_count = slice_count = process_count = init_code = 0;
  while (fgets(line, sizeof line, file)) {
    if (!strncmp(line, "init ", 5)) init_code = atoi(line + 5);
    if (!strncmp(line, "cuda ", 5)) cuda = atoi(line + 5);
    if (!strncmp(line, "driver ", 7)) sscanf(line + 7, "%95s", driver);
    if (!strncmp(line, "gpu ", 4)) gpus[gpu_count++] = device(line, -1);
    if (!strncmp(line, "slice ", 6)) slices[slice_count++] = device(line, number(line, "of", 0));
    if (!strncmp(line, "process ", 8))
      processes[process_count++] = (Process){
          number(line, "on", 0), number(line, "pid", 0), number(line, "memory", ABSENT),
          number(line, "slice", -1), number(line, "draws", 0), number(line, "once", 0), 0};
  }
  fclose(file);
}

int nvmlInit_v2(void) { read_scene(); return init_code; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "%s", driver); return OK; }
int nvmlSystemGetCudaDriverVersion(int *out) { *out = cuda; return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { read_scene(); *out = gpu_count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
  if ((int)index >= gpu_count) return INVALID;
  *out = &gpus[index];
  return gpus[index].handle;
}

static int tell(Device *d, long long from, unsigned *out) {
  if (d->code) return d->code;
  if (from == ABSENT) return NOT_SUPPORTED;
  *out = from;
  return OK;
}
int nvmlDeviceGetName(Device *d, char *out, unsigned size) { snprintf(out, size, "%s", d->name); return d->code; }
int nvmlDeviceGetUUID(Device *d, char *out, unsigned size) { snprintf(out, size, "%s", d->uuid); return d->code; }
int nvmlDeviceGetUtilizationRates(Device *d, unsigned *out) { out[1] = 0; return tell(d, d->use, out); }
int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *out) { (void)sensor; return tell(d, d->temp, out); }
int nvmlDeviceGetPowerUsage(Device *d, unsigned *out) { return tell(d, d->power, out); }
int nvmlDeviceGetTotalEnergyConsumption(Device *d, unsigned long long *out) {
  read_scene();
  if (d->code || d->energy == ABSENT) return d->code ? d->code : NOT_SUPPORTED;
  *out = d->energy; /* mJ */
  return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *out) { return tell(d, d->limit, out); }
int nvmlDeviceGetPowerManagementLimit(Device *d, unsigned *out) { return tell(d, d->limit, out); }
int nvmlDeviceGetFanSpeed(Device *d, unsigned *out) { return tell(d, d->fan, out); }
int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
  *major = d->capability / 10, *minor = d->capability % 10;
  return d->code;
}
int nvmlDeviceGetTotalEccErrors(Device *d, int type, int counter, unsigned long long *out) {
  if (type != 1 || counter != 0) return INVALID; /* uncorrected, since the driver was loaded */
  read_scene();
  if (d->code || d->errors == ABSENT) return d->code ? d->code : NOT_SUPPORTED;
  *out = d->errors;
  return OK;
}
int nvmlDeviceGetRemappedRows(Device *d, unsigned *corrected, unsigned *rows, unsigned *pending, unsigned *failed) {
  *corrected = *failed = 0, *pending = d->pending;
  return tell(d, d->rows, rows);
}
int nvmlDeviceGetRetiredPagesPendingStatus(Device *d, unsigned *out) { return tell(d, d->pages, out); }
int nvmlDeviceGetIndex(Device *d, unsigned *out) { return tell(d, d - gpus, out); }
int nvmlDeviceGetEncoderUtilization(Device *d, unsigned *out, unsigned *period) { *period = 0; return tell(d, 0, out); }
int nvmlDeviceGetDecoderUtilization(Device *d, unsigned *out, unsigned *period) { *period = 0; return tell(d, 0, out); }
int nvmlDeviceGetMemoryInfo(Device *d, unsigned long long *out) {
  if (d->code || d->total == ABSENT) return d->code ? d->code : NOT_SUPPORTED;
  out[0] = d->total, out[1] = d->total - d->used - d->reserved, out[2] = d->used + d->reserved;
  return OK;
}
#if NEWEST > 1
int nvmlDeviceGetMemoryInfo_v2(Device *d, unsigned long long *out) {
  if (d->code || d->total == ABSENT) return d->code ? d->code : NOT_SUPPORTED;
  out[1] = d->total, out[2] = d->reserved, out[3] = d->total - d->used - d->reserved, out[4] = d->used;
  return OK;
}
int nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *later) {
  *now = *later = d->mig;
  return d->code ? d->code : d->mig ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *out) { *out = 7; return d->code; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
  int seen = 0;
  for (int i = 0; i < slice_count; i++)
    if (slices[i].parent == d - gpus && seen++ == (int)index) { *out = &slices[i]; return OK; }
  return NOT_FOUND;
}
#endif

static int list(Device *d, unsigned *count, char *out, int draws, size_t size) {
  int gpu = d->parent < 0 ? (int)(d - gpus) : d->parent, slice = -1, found = 0;
  if (d->code || d->lists) return d->code ? d->code : d->lists;
  if (d->parent >= 0) {
    slice = 0;
    for (Device *before = slices; before < d; before++) slice += before->parent == d->parent;
  }
  size = d->wide && size == 24 ? 32 : size;
  for (int i = 0; i < process_count; i++) {
    Process *p = &processes[i];
    if (p->on != gpu || p->draws != draws || p->slice != slice || (p->once && p->told)) continue;
    if (out && found < (int)*count) {
      char *at = out + size * found;
      memset(at, size > 24 ? 1 : 0, size);
      *(unsigned *)at = p->pid, *(unsigned long long *)(at + 8) = p->memory, p->told = 1;
    }
    found++;
  }
  int missing = d->grow == 2 && !draws ? 20 : 0; /* as if so many had come since the first answer */
  if (d->grow && !draws) d->grow++;
  int fits = out && (unsigned)found + missing <= *count;
  *count = found + missing;
  if (!found && !missing) return OK;
  if (!fits) return TOO_SMALL;
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses(Device *d, unsigned *n, char *out) { return list(d, n, out, 0, 16); }
int nvmlDeviceGetGraphicsRunningProcesses(Device *d, unsigned *n, char *out) { return list(d, n, out, 1, 16); }
#if NEWEST > 1
int nvmlDeviceGetComputeRunningProcesses_v2(Device *d, unsigned *n, char *out) { return list(d, n, out, 0, 24); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(Device *d, unsigned *n, char *out) { return list(d, n, out, 1, 24); }
#endif
#if NEWEST > 2
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *n, char *out) { return list(d, n, out, 0, 24); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, unsigned *n, char *out) { return list(d, n, out, 1, 24); }
#endif
/* What nvidia-ml-py and nvidia-smi's imitators ask beside. */
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
const char *nvmlErrorString(int code) { (void)code; return "an error"; }
